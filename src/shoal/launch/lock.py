"""One run per output folder at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from shoal.core.errors import ConfigError


class FolderLock:
    """Holds an output folder until closed, or until the process and all it has forked have ended."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Let another run use the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_folder(out: Path) -> FolderLock:
    """Take ``out`` for this process and the workers it will start; ConfigError where another has it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"the output folder {out} cannot be made or written to ({error.strerror}); use another --out"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"asked to use the output folder {out}, but it is in use by process {holder}: "
            "wait until that has ended, or give another folder with --out"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return FolderLock(descriptor)
