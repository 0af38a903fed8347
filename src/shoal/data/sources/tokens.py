"""Text files through a tokenizer: tokens made once, in a memory-mapped file named by content."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from shoal.core.errors import DataError
from shoal.data.sources.text import existing, hash_files, position, samples_in, shifted

try:
    from tokenizers import Tokenizer
except ImportError:  # an optional package
    Tokenizer: Any = None


class TextTokens(Dataset):
    """Sample i: inputs [T] and targets [T] (int64): tokens from ``i * length`` on, and one further.

    ``tokenizer``: a ``tokenizers.Tokenizer`` or the path of its JSON file. ``cache``: a folder for the token
    file; one process writes it, others that ask for the same wait. Each file is one text, without special tokens.
    Raises DataError for a missing file, text that is not UTF-8, and text shorter than one sample.
    """

    def __init__(self, files: Sequence[Path], tokenizer: Any, length: int, cache: Path) -> None:
        self.files = existing(files)
        self.length = length
        tokenizer = _loaded(tokenizer)
        self.vocabulary: int = tokenizer.get_vocab_size()
        self._dtype = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32
        self._fingerprint = hash_files(self.files, "tokens " + tokenizer.to_str())
        self.path = Path(cache) / f"tokens-{self._fingerprint}.{np.dtype(self._dtype).name}"
        _write_once(self.path, self.files, tokenizer, self._dtype)
        total = self.path.stat().st_size // np.dtype(self._dtype).itemsize
        self._samples = samples_in(total, length, "tokens", self.files)
        self._tokens: np.ndarray | None = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._tokens is None:
            self._tokens = np.memmap(self.path, dtype=self._dtype, mode="r")
        start = position(index, self._samples) * self.length
        return shifted(self._tokens[start : start + self.length + 1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None}  # a process that gets this by pickle maps the file itself

    def fingerprint(self) -> str:
        """A hash of what the samples are: the files' contents in order, the tokenizer and the length."""
        return f"{self._fingerprint}-{self.length}"


def _loaded(tokenizer: Any) -> Any:
    if Tokenizer is None:
        raise DataError("text through a tokenizer was asked for, but tokenizers is not installed; install it")
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    if not Path(tokenizer).is_file():
        raise DataError(f"the tokenizer {tokenizer} was asked for, but there is no such file; correct the path")
    return Tokenizer.from_file(str(tokenizer))


def _write_once(path: Path, files: Sequence[Path], tokenizer: Any, dtype: Any) -> None:
    """Makes the token file unless it is there: whole under its name, or not at all. One process at a time."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go by the system if the writer dies
        if path.exists():
            return
        partial = path.with_suffix(".partial")
        with partial.open("wb") as out:
            for file in files:
                tokens = tokenizer.encode(_text(file), add_special_tokens=False).ids
                out.write(np.asarray(tokens, dtype=dtype).tobytes())
            out.flush()
            os.fsync(out.fileno())
        partial.replace(path)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} was asked for as text, but byte {error.start} is not UTF-8; convert it or leave it out"
        ) from None
