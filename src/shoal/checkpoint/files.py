"""The file operations that checkpoints are made of, in one object that tests can record and let fail."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


class FileSystem:
    """The real file system. Every change that a Writer or an export makes goes through one of these calls."""

    def mkdir(self, path: Path) -> None:
        """Create a folder and its parents; one that exists is fine."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Open a file for writing from its start; returns the descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def fsync(self, descriptor: int) -> None:
        """Return once the file's content is on the device."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor of ``create``."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name; a file that has it is replaced."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is gone already is fine."""
        path.unlink(missing_ok=True)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder; one that is gone already is fine."""
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()

    def listdir(self, path: Path) -> list[str]:
        """Sorted names in a folder; none where it is gone."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def fsync_dir(self, path: Path) -> None:
        """Return once the folder's entries (names created, renamed, removed) are on the device."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write where ``path`` is."""
        return shutil.disk_usage(path).free

    def write_whole(self, path: Path, data: bytes) -> None:
        """Replace the file at ``path`` at once: written beside it, synced, renamed; the folder is not synced."""
        beside = path.with_name(path.name + ".tmp")
        descriptor = self.create(beside)
        try:
            self.write(descriptor, data)
            self.fsync(descriptor)
        finally:
            self.close(descriptor)
        self.rename(beside, path)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and what it holds; parts that are gone already are fine."""
        for name in self.listdir(path):
            inner = path / name
            if inner.is_dir() and not inner.is_symlink():
                self.remove_tree(inner)
            else:
                self.unlink(inner)
        self.rmdir(path)
