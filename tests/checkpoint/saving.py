"""Ranks as writers in one process: what the engine does around a save."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import Reader, Writer, newest_good
from shoal.checkpoint.files import FileSystem
from shoal.checkpoint.layout import MANIFEST, seal, unseal


class FullDisk(FileSystem):
    """Takes some bytes, then has no space."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        if len(data) > self.room_bytes:
            super().write(descriptor, memoryview(data)[: self.room_bytes])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room_bytes -= len(data)
        super().write(descriptor, data)


def state(mark: float = 1.0, finite: bool = True) -> dict[str, torch.Tensor]:
    values = {
        "model/embed": torch.arange(12.0).reshape(3, 4) * mark,
        "model/norm": torch.full((5,), mark).to(torch.bfloat16),
        "model/seen": torch.tensor(int(mark)),
        "model/empty": torch.empty(0, 3),
        "optimizer/exp_avg/embed": (torch.arange(12.0).reshape(4, 3) * mark).t(),
    }
    if not finite:
        values["model/embed"][0, 0] = float("nan")
    return values


def writers(folder: Path, ranks: int, keep: int = 2, files: dict[int, FileSystem] | None = None) -> list[Writer]:
    return [Writer(folder, rank, ranks, keep, (files or {}).get(rank)) for rank in range(ranks)]


def save(group: list[Writer], step: int, tensors: dict[str, torch.Tensor], **values) -> None:
    """A whole save on all ranks, to its end."""
    for writer in group:
        writer.begin(step, tensors, {"step": step, "finite": True, **values})
    for writer in group:
        writer.wait()
        assert writer.poll() == (True, False), writer.error()
    for writer in group:
        writer.commit()
    for writer in group:
        writer.wait()
        assert writer.error() is None


def assert_holds(path: Path, step: int, tensors: dict[str, torch.Tensor]) -> None:
    reader = Reader(path)
    assert reader.step == step and reader.values["step"] == step
    assert reader.names() == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(reader.read(name), tensor), name
        assert reader.dtype(name) == tensor.dtype


def newest(folder: Path) -> int | None:
    found, _ = newest_good(folder)
    return found.step if found else None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let ``change`` work on the body of a checkpoint's manifest, which stays whole."""
    body = unseal(path / MANIFEST)
    change(body)
    (path / MANIFEST).write_bytes(seal(body))
