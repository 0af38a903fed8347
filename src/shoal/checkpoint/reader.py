"""Finding a good checkpoint and reading it, piece by piece, into tensors that exist already."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import le
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.boxes import Box, flaw, read_box
from shoal.checkpoint.layout import (
    DTYPES,
    FORMAT,
    MANIFEST,
    REPLACED_NAME,
    STEP_NAME,
    Shape,
    file_checksum,
    read_header,
    size_bytes,
    unseal,
)
from shoal.core.errors import CheckpointError


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk; ``problem`` says why it must not be resumed from, None where nothing is wrong."""

    step: int
    path: Path
    problem: str | None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder. Raises CheckpointError: missing, torn or of another format."""
    try:
        manifest = unseal(path / MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing: the save was never completed") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise CheckpointError(
            f"{MANIFEST} is of format {found!r}, this Shoal reads {FORMAT}; use the Shoal that wrote it"
        )
    for name in manifest["files"]:
        if os.path.basename(name) != name:
            raise CheckpointError(f"{MANIFEST} names {name!r}, which lies outside its folder")
    return manifest


def problem_of(path: Path, step: int, verify: bool) -> str | None:
    """What is wrong with the checkpoint at ``path``; ``verify`` reads each file and holds it against its checksum."""
    try:
        manifest = read_manifest(path)
        if manifest["step"] != step:
            return f"{MANIFEST} is of step {manifest['step']}"
        for name, facts in manifest["files"].items():
            size = os.path.getsize(path / name)
            if size != facts["size"]:
                return f"{name} has {size} bytes, {facts['size']} were written"
            if verify and file_checksum(path / name) != facts["crc32"]:
                return f"{name} changed since it was written: its checksum differs"
    except CheckpointError as error:
        return str(error)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if manifest["values"].get("finite") is False:
        return "its weights are not finite"
    return None


def candidates(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything that may be a checkpoint, newest first; no file is opened.

    One that made way for another of its step comes after that one.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = STEP_NAME.fullmatch(path.name) or REPLACED_NAME.fullmatch(path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found, key=lambda entry: (-entry[0], entry[1].name))


def checkpoints(folder: Path, verify: bool = True) -> list[Found]:
    """All checkpoints in ``folder``, newest first. Without ``verify`` contents are not read, only sizes."""
    return [Found(step, path, problem_of(path, step, verify)) for step, path in candidates(Path(folder))]


def newest_good(folder: Path) -> tuple[Found | None, list[Found]]:
    """The newest checkpoint that verifies, and the newer ones that were skipped with their problems."""
    skipped = []
    for step, path in candidates(Path(folder)):
        found = Found(step, path, problem_of(path, step, verify=True))
        if found.problem is None:
            return found, skipped
        skipped.append(found)
    return None, skipped


class Reader:
    """Reads one checkpoint; holds its manifest only. Nothing is unpickled. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            manifest = read_manifest(self.path)
        except CheckpointError as error:
            raise CheckpointError(f"cannot read the checkpoint {self.path}: {error}") from None
        self.step: int = manifest["step"]
        self.values: dict[str, Any] = manifest["values"]
        self.ranks: int = manifest["ranks"]
        self._tensors: dict[str, Any] = manifest["tensors"]
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}

    def names(self) -> list[str]:
        """Sorted names of all tensors."""
        return sorted(self._tensors)

    def shape(self, name: str) -> Shape:
        """Full shape of a tensor, whatever pieces it was written in."""
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor as it was saved."""
        return DTYPES[self._entry(name)["dtype"]]

    def read(self, name: str) -> Tensor:
        """A new tensor on the CPU."""
        return self.read_region(name, (0,) * len(self.shape(name)), self.shape(name))

    def read_region(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """A region of a tensor, from whatever pieces it lies in: a new tensor on the CPU."""
        tensor = torch.empty(tuple(shape), dtype=self.dtype(name))
        self.read_into(name, tensor, offsets)
        return tensor

    @torch.no_grad()
    def read_into(self, name: str, tensor: Tensor, offsets: Sequence[int] | None = None) -> None:
        """Copy a saved tensor into one of the same shape and dtype, on any device; at ``offsets``: a region of it."""
        shape, dtype = self.shape(name), self.dtype(name)
        region = Box((0,) * tensor.ndim if offsets is None else tuple(offsets), tuple(tensor.shape))
        fits = len(region.offsets) == len(region.shape) == len(shape) and all(at >= 0 for at in region.offsets)
        fits = fits and (region.shape == shape if offsets is None else all(map(le, region.ends, shape)))
        if not fits or tensor.dtype != dtype:
            asked = tuple(tensor.shape) if offsets is None else f"the region {region} of shape {tuple(tensor.shape)}"
            raise CheckpointError(
                f"cannot read {name!r} of {self.path} into {asked} {tensor.dtype}: "
                f"it was saved as {shape} {dtype}; use the model it was written by"
            )
        pieces = [(piece, Box(tuple(piece["offsets"]), tuple(piece["shape"]))) for piece in self._entry(name)["pieces"]]
        if problem := flaw(region, [box for _, box in pieces]):
            raise CheckpointError(f"cannot read {name!r} of {self.path}: {problem}; take another checkpoint")
        for piece, box in pieces:
            if met := box.meet(region):
                self._read_piece(name, piece, met.seen_from(box.offsets), met.seen_from(region.offsets).of(tensor))

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.path} holds no tensor {name!r}; it holds {len(self._tensors)}: {self._some()}"
            )
        return self._tensors[name]

    def _some(self) -> str:
        names = self.names()
        return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")

    def _read_piece(self, name: str, piece: dict[str, Any], box: Box, target: Tensor) -> None:
        """Fill ``target`` with a region of a piece, whose file's header must agree with it."""
        held, dtype = tuple(piece["shape"]), target.dtype
        path = self.path / os.path.basename(piece["file"])
        try:
            if path.name not in self._headers:
                self._headers[path.name] = read_header(path)
            entries, body = self._headers[path.name]
            entry = entries.get(piece["key"])
            count = size_bytes(held, dtype)
            if entry is None or DTYPES.get(entry["dtype"]) != dtype or entry["shape"] != piece["shape"]:
                raise CheckpointError(
                    f"{path} does not hold {name!r} as its manifest says; run shoal checkpoint verify"
                )
            start, end = entry["data_offsets"]
            got = end - start
            if got == count:
                with open(path, "rb", buffering=0) as file:
                    if not read_box(file, body + start, held, box.offsets, target):
                        got = max(0, os.path.getsize(path) - body - start)
        except OSError as error:
            raise CheckpointError(f"cannot read {name!r} of {self.path}: {error}") from None
        if got != count:
            raise CheckpointError(f"{path} holds {got} bytes of {name!r}, {count} were asked; the file is torn")


def compare(reader: Reader, expected: Mapping[str, tuple[Shape, torch.dtype]], prefix: str = "") -> str | None:
    """How the saved tensors under ``prefix`` differ from those expected, the first by name; None where equal."""
    held = {name for name in reader.names() if name.startswith(prefix)}
    parts = []
    missing = [name.removeprefix(prefix) for name in expected if name not in held]
    unexpected = sorted(name.removeprefix(prefix) for name in held - set(expected))
    if missing:
        parts.append(f"it lacks {_first(missing)}")
    if unexpected:
        parts.append(f"it has {_first(unexpected)}, which the model has not")
    differing = []
    for name, (shape, dtype) in expected.items():
        if name in held and (reader.shape(name), reader.dtype(name)) != (tuple(shape), dtype):
            saved = f"{list(reader.shape(name))} {_plain(reader.dtype(name))}"
            differing.append(f"{name.removeprefix(prefix)} is {saved}, the model's is {list(shape)} {_plain(dtype)}")
    if differing:
        parts.append("; ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else ""))
    return "; ".join(parts) or None


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
