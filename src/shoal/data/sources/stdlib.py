"""The Python standard library's own sources: real text that every machine has."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

from shoal.core.errors import DataError

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_HELD_OUT_ONE_IN = 20


def stdlib_files(held_out: bool) -> list[Path]:
    """The library's .py files, sorted; about one in 20, chosen by its name, is held out for evaluation."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    files = [
        root / name for name in names if not _LEFT_OUT.intersection(name.split("/")) and _is_held_out(name) == held_out
    ]
    if not files:
        raise DataError(f"the standard library's sources were asked for, but {root} holds none; give other text files")
    return files


def _is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % _HELD_OUT_ONE_IN == 0
