"""Saving while training goes on: each rank copies its share, a thread writes it, rank 0 commits."""

from __future__ import annotations

import _thread
import contextlib
import errno
import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.boxes import Box, flaw
from shoal.checkpoint.files import FileSystem
from shoal.checkpoint.folder import publish, rotate, tidy
from shoal.checkpoint.layout import (
    CHUNK_BYTES,
    FORMAT,
    MANIFEST,
    Layout,
    dtype_name,
    plan_file,
    seal,
    unseal,
)
from shoal.checkpoint.pieces import Piece, Slab, as_pieces, to_write
from shoal.core.errors import CheckpointError


@dataclass
class _Save:
    """One save from ``begin`` until it is committed or abandoned; its facts are of the moment of ``begin``."""

    step: int
    partial: Path
    layout: Layout
    entries: dict[str, Any]
    values: str  # JSON, so that later changes of the caller's dict do not reach it
    time_s: float
    written: bool = False


class Writer:
    """Writes checkpoints to ``folder/step-N``, one at a time, in the background.

    Rank 0 clears what an earlier run left when it is constructed: synchronise the ranks between construction and
    the first ``begin``. A failure in the background stays in ``error()`` until ``abandon()``.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, keep: int = 2, files: FileSystem | None = None) -> None:
        if keep < 1:
            raise CheckpointError(
                f"cannot keep {keep} checkpoints: at least 1 must stay to resume from; set keep to 1 or more"
            )
        self.folder = Path(folder)
        self.rank = rank
        self.ranks = ranks
        self.keep = keep
        self.files = files or FileSystem()
        self.committed: int | None = None  # known on rank 0, which commits
        self.stall_s = 0.0  # how long the last begin held up training
        self._save: _Save | None = None
        self._error: CheckpointError | None = None
        self._done: threading.Event | None = None  # of the work in the background
        self._host = torch.empty(0, dtype=torch.uint8)
        self._verified: set[int] = set()
        self._attempts: dict[int, int] = {}
        if rank == 0:
            try:
                self.files.mkdir(self.folder)
                self.files.fsync_dir(self.folder.parent)
                tidy(self.folder, self.files)
            except OSError as error:
                raise self._failure(error, "prepare the checkpoints' folder", 0) from None

    @property
    def in_flight(self) -> int | None:
        """Step of the save that is begun and not yet committed or abandoned."""
        return self._save.step if self._save else None

    def reserve(self, pieces: Mapping[str, Tensor | Piece]) -> None:
        """Allocate the host buffer ahead, so that the first ``begin`` stalls no longer than later ones."""
        slabs, layout = self._layout(pieces)
        self._reserve(layout, slabs)
        self._host.zero_()

    def begin(self, step: int, pieces: Mapping[str, Tensor | Piece], values: Mapping[str, Any]) -> None:
        """Copy this rank's share and start writing it. Waits first where an earlier write is still running.

        Each rank passes what it holds; a tensor itself is one that every rank holds whole. Raises CheckpointError
        where values are not JSON, a piece is not as it says, or rank 0 still holds a save that was neither committed
        nor abandoned. With an error pending nothing is written.
        """
        start = time.perf_counter()
        self.wait()
        if self._error is not None:
            return
        if self._save is not None and self.rank == 0:
            raise CheckpointError(
                f"cannot save step {step}: the save of step {self._save.step} is neither committed nor "
                "abandoned; call commit() once all ranks have written, or abandon()"
            )
        try:
            text = json.dumps(dict(values))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"cannot save step {step}: its values are not JSON ({error}); pass plain values"
            ) from None
        slabs, layout = self._layout(pieces)
        self._copy(layout, slabs)
        attempt = self._attempts[step] = self._attempts.get(step, 0) + 1
        partial = self.folder / (f"step-{step}.partial" if attempt == 1 else f"step-{step}.{attempt}.partial")
        save = _Save(step, partial, layout, self._entries(pieces, slabs), text, time.time())
        self._save = save
        self._start(
            lambda: self._write_shard(save),
            f"write rank {self.rank}'s shard of step {step}",
            layout.file_bytes,
        )
        self.stall_s = time.perf_counter() - start

    def poll(self) -> tuple[bool, bool]:
        """(this rank's shard of the save in flight is written, something failed)."""
        return self._save is not None and self._save.written, self._error is not None

    def commit(self) -> None:
        """Make the save in flight a checkpoint, once all ranks have written; in the background, by rank 0.

        On other ranks this only ends the save in flight.
        """
        save = self._save
        if save is None or not save.written:
            what = "no save is in flight" if save is None else f"rank {self.rank} has not written step {save.step} yet"
            raise CheckpointError(f"cannot commit: {what}; call commit() when poll() says written on all ranks")
        if self.rank != 0:
            self._save = None
            return
        self.wait()
        self._start(lambda: self._commit(save), f"commit step {save.step}", len(save.values))

    def wait(self) -> None:
        """Return once this rank's thread has nothing to do; look at ``error()`` then."""
        if self._done is not None:
            self._done.wait()
            self._done = None

    def error(self) -> CheckpointError | None:
        """What failed in the background and was not yet abandoned."""
        return self._error

    def abandon(self) -> None:
        """Give up the save in flight: its partial folder goes, earlier checkpoints stay, the error clears.

        Every rank calls it, in any order; whoever comes last leaves nothing.
        """
        self.wait()
        save, self._save, self._error = self._save, None, None
        work: list[Callable[[], None]] = []
        if save is not None:
            work.append(lambda: self._remove_own(save))
        if save is not None and self.rank == 0:
            work.append(lambda: self.files.remove_tree(save.partial))
        if self.rank == 0:  # a publication that stopped half way is undone
            work.append(lambda: tidy(self.folder, self.files, partials=False))
        for part in work:
            with contextlib.suppress(OSError):  # on a failing device; the next Writer clears what is left
                part()

    # -- on the caller's thread -----------------------------------------------------------------------------

    def _layout(self, pieces: Mapping[str, Tensor | Piece]) -> tuple[dict[str, Slab], Layout]:
        """What this rank writes by its key in the file, and the file."""
        slabs: dict[str, Slab] = {}
        for slab in to_write(as_pieces(pieces), self.rank, self.ranks):
            whole = tuple(slab.tensor.shape) == tuple(pieces[slab.name].shape)
            key = slab.name if whole else f"{slab.name}@{','.join(map(str, slab.offsets))}"
            while key in slabs:
                key += "'"
            slabs[key] = slab
        sized = {key: (tuple(slab.tensor.shape), slab.tensor.dtype) for key, slab in slabs.items()}
        return slabs, plan_file(sized, {"format": "pt"})

    def _reserve(self, layout: Layout, slabs: Mapping[str, Slab]) -> None:
        """A host buffer of the body's size, kept between saves; page-locked where tensors are on a GPU."""
        pinned = any(slab.tensor.is_cuda for slab in slabs.values())
        if self._host.numel() != layout.body_bytes or self._host.is_pinned() != pinned:
            self._host = torch.empty(0, dtype=torch.uint8)  # let the old one go first
            self._host = torch.empty(layout.body_bytes, dtype=torch.uint8, pin_memory=pinned)

    @torch.no_grad()
    def _copy(self, layout: Layout, slabs: Mapping[str, Slab]) -> None:
        self._reserve(layout, slabs)
        devices = set()
        for key, (start, end) in layout.spans.items():
            tensor = slabs[key].tensor
            if start == end:
                continue
            target = self._host[start:end].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def _entries(self, pieces: Mapping[str, Tensor | Piece], slabs: Mapping[str, Slab]) -> dict[str, Any]:
        """The manifest's entries of what this rank writes."""
        entries: dict[str, Any] = {}
        for key, slab in slabs.items():
            piece = {
                "file": self._shard_name, "key": key, "offsets": list(slab.offsets), "shape": list(slab.tensor.shape),
            }  # fmt: skip
            shape = list(pieces[slab.name].shape)
            kind = dtype_name(slab.name, slab.tensor.dtype)
            entry = entries.setdefault(slab.name, {"dtype": kind, "shape": shape, "pieces": []})
            entry["pieces"].append(piece)
        return entries

    @property
    def _shard_name(self) -> str:
        return f"shard-{self.rank:05d}-of-{self.ranks:05d}.safetensors"

    def _start(self, work: Callable[[], None], what: str, needed_bytes: int) -> None:
        done = threading.Event()

        def body() -> None:
            try:
                work()
            except CheckpointError as error:
                self._error = error
            except Exception as error:  # kept whatever it is: nobody else would see it
                self._error = self._failure(error, what, needed_bytes)
            finally:
                done.set()

        self._done = done
        _thread.start_new_thread(body, ())  # Thread.start() would wait until it is scheduled: a longer stall

    def _failure(self, error: Exception, what: str, needed_bytes: int) -> CheckpointError:
        text = f"cannot {what} in {self.folder}: {error}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = "an unknown number of"
            with contextlib.suppress(OSError):
                free = f"{self.files.free_bytes(self.folder)}"
            text += (
                f"; it needs {needed_bytes} bytes, {free} bytes are free; free space, keep fewer, or use another --out"
            )
        failure = CheckpointError(text)
        failure.__cause__ = error
        return failure

    # -- on the background thread ---------------------------------------------------------------------------

    def _write_shard(self, save: _Save) -> None:
        self.files.mkdir(save.partial)
        descriptor = self.files.create(save.partial / self._shard_name)
        try:
            self.files.write(descriptor, save.layout.header)
            checksum = zlib.crc32(save.layout.header)
            body = self._host.numpy().data
            for start in range(0, len(body), CHUNK_BYTES):
                chunk = body[start : start + CHUNK_BYTES]
                checksum = zlib.crc32(chunk, checksum)
                self.files.write(descriptor, chunk)
            self.files.fsync(descriptor)
        finally:
            self.files.close(descriptor)
        facts = {"size": save.layout.file_bytes, "crc32": checksum}
        record = {"step": save.step, "file": self._shard_name, "facts": facts, "tensors": save.entries}
        descriptor = self.files.create(save.partial / _record_name(self.rank))
        try:
            self.files.write(descriptor, seal(record))
            self.files.fsync(descriptor)
        finally:
            self.files.close(descriptor)
        save.written = True

    def _commit(self, save: _Save) -> None:
        written: dict[str, Any] = {}
        entries: dict[str, Any] = {}
        for rank in range(self.ranks):
            record = unseal(save.partial / _record_name(rank))
            if record["step"] != save.step:
                raise CheckpointError(
                    f"rank {rank} wrote step {record['step']} where step {save.step} was asked; save again"
                )
            written[record["file"]] = record["facts"]
            _merge(entries, record["tensors"], record["file"])
        _check_whole(entries)
        for name in self.files.listdir(save.partial):
            if name not in written:
                self.files.unlink(save.partial / name)
        manifest = {
            "format": FORMAT,
            "step": save.step,
            "time_s": save.time_s,
            "ranks": self.ranks,
            "values": json.loads(save.values),
            "files": written,
            "tensors": entries,
        }
        self.files.write_whole(save.partial / MANIFEST, seal(manifest))
        self.files.fsync_dir(save.partial)
        publish(save.partial, self.folder / f"step-{save.step}", self.files)
        self.committed = save.step
        if manifest["values"].get("finite") is not False:
            self._verified.add(save.step)
        self._save = None
        rotate(self.folder, save.step, self.keep, self._verified, self.files)

    def _remove_own(self, save: _Save) -> None:
        for name in (self._shard_name, _record_name(self.rank)):
            self.files.unlink(save.partial / name)
        with contextlib.suppress(OSError):  # others' files may still be in it
            self.files.rmdir(save.partial)


def _record_name(rank: int) -> str:
    return f"shard-{rank:05d}.json"


def _merge(entries: dict[str, Any], more: dict[str, Any], file: str) -> None:
    """Add what one rank wrote."""
    for name, entry in more.items():
        known = entries.setdefault(name, {**entry, "pieces": []})
        if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
            raise CheckpointError(
                f"cannot save {name!r}: {file} holds a part of {entry['dtype']} {entry['shape']}, other ranks of "
                f"{known['dtype']} {known['shape']}; every rank must mean the same tensor by a name"
            )
        known["pieces"] += entry["pieces"]


def _check_whole(entries: dict[str, Any]) -> None:
    """Raises CheckpointError where the ranks' parts of a tensor leave something out or hold something twice."""
    for name, entry in entries.items():
        boxes = [Box(tuple(piece["offsets"]), tuple(piece["shape"])) for piece in entry["pieces"]]
        if problem := flaw(Box.whole(entry["shape"]), boxes):
            raise CheckpointError(
                f"cannot save {name!r} of shape {entry['shape']}: {problem}; the ranks' parts must make up the whole, "
                "each named by all who hold it"
            )
