"""Where the tests' folders are, and what their forks share."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM_BYTES = 4 << 30


def pytest_configure() -> None:
    """In memory where there is room: a sync to disk takes milliseconds, and checkpoints make thousands. What users'
    runs measured of this machine decides nothing here."""
    cache = tempfile.mkdtemp(prefix="shoal-tests-cache-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["XDG_CACHE_HOME"] = cache
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_finish() -> None:
    """What was imported stays: no collection goes through it, here or in a fork, which would copy it."""
    gc.collect()
    gc.freeze()
