"""Text files as one stream of bytes, cut into samples of equal length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shoal.core.errors import DataError

_CHUNK_BYTES = 4 << 20


class TextBytes(Dataset):
    """Sample i: inputs [T] and targets [T] (int64): bytes from ``i * length`` on, and one further.

    Files follow each other in the order given. Nothing is kept in memory but their sizes. Raises DataError
    for a missing file and for text shorter than one sample.
    """

    vocabulary = 256

    def __init__(self, files: Sequence[Path], length: int) -> None:
        self.files = existing(files)
        self.length = length
        self._ends = np.cumsum([path.stat().st_size for path in self.files])
        self._samples = samples_in(int(self._ends[-1]), length, "bytes", self.files)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = position(index, self._samples) * self.length
        return shifted(self._read(start, start + self.length + 1))

    def fingerprint(self) -> str:
        """A hash of what the samples are: the files' contents in order, and the length."""
        return hash_files(self.files, f"bytes {self.length}")

    def _read(self, start: int, stop: int) -> np.ndarray:
        number = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        while start < stop:
            begin = int(self._ends[number - 1]) if number else 0
            until = min(stop, int(self._ends[number]))
            if until > start:
                parts.append(_read_file(self.files[number], start - begin, until - start))
            start, number = until, number + 1
        return np.concatenate(parts)


def _read_file(path: Path, offset: int, count: int) -> np.ndarray:
    part = np.fromfile(path, dtype=np.uint8, count=count, offset=offset)
    if len(part) != count:
        raise DataError(
            f"{path}: {count} bytes at {offset} were asked for, {len(part)} found; the file has shrunk since "
            "the data set was made: start again with files that do not change"
        )
    return part


def existing(files: Sequence[Path]) -> list[Path]:
    """The paths. Raises DataError where none was given or one is not a file."""
    paths = [Path(path) for path in files]
    if not paths:
        raise DataError("text of no files was asked for; give at least one file")
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} was asked for as text, but there is no such file; correct the path")
    return paths


def samples_in(total: int, length: int, unit: str, files: Sequence[Path]) -> int:
    """Whole samples in ``total`` units, each with one more for its last target. Raises DataError for none."""
    if length < 1:
        raise DataError(f"samples of {length} {unit} were asked for; give at least 1")
    if total < length + 1:
        raise DataError(
            f"samples of {length} {unit} were asked for, but {len(files)} files hold {total} {unit}; "
            f"give a length below {total} or more text"
        )
    return (total - 1) // length


def shifted(values: np.ndarray) -> tuple[Tensor, Tensor]:
    """Inputs and targets (int64) of T values each, from T + 1 values."""
    whole = torch.from_numpy(values.astype(np.int64))
    return whole[:-1], whole[1:]


def position(index: int, samples: int) -> int:
    """``index``, or IndexError outside the data set (which ends a plain for loop over it)."""
    if not 0 <= index < samples:
        raise IndexError(f"sample {index} was asked for; there are {samples}")
    return index


def hash_files(files: Sequence[Path], more: str) -> str:
    """A hash (32 hex digits) of the files' sizes and contents, in order, and of ``more``."""
    digest = hashlib.blake2b(more.encode(), digest_size=16)
    for path in files:
        digest.update(f"\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
