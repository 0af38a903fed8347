"""Which sample when: a pure function of (seed, epoch, position). Nothing of the data set's size is stored."""

from __future__ import annotations

import numpy as np

from shoal.core.errors import DataError

_MASK = (1 << 64) - 1
_ROUNDS = 8


def mix(*values: int) -> int:
    """A 64-bit hash of integers (splitmix64's finaliser, chained); the same on every machine."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _scramble(values: np.ndarray, key: int) -> np.ndarray:
    """The finaliser of splitmix64 over uint64 arrays, keyed by addition (wraps around)."""
    mixed = values + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class Order:
    """A keyed permutation of ``range(size)`` for each epoch.

    A balanced Feistel network on the smallest even number of bits that holds the index space, walked
    along its cycles until it falls inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, method
    3). At most 4 applications are expected for an index.
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise DataError(f"an order over {size} samples was asked for; give a data set with at least 1 sample")
        self.size = size
        self.seed = seed
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_bits = np.uint64(half_bits)
        self._half_mask = np.uint64((1 << half_bits) - 1)

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Sample ids (int64) at positions ``start`` to ``stop`` of ``epoch``. Raises DataError outside."""
        if not 0 <= start <= stop <= self.size:
            raise DataError(
                f"positions {start} to {stop} of an epoch were asked for, but it has {self.size} samples; "
                f"ask within 0 to {self.size}"
            )
        keys = [mix(self.seed, epoch, turn) for turn in range(_ROUNDS)]
        values = self._permute(np.arange(start, stop, dtype=np.uint64), keys)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._permute(values[outside], keys)
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray, keys: list[int]) -> np.ndarray:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in keys:
            left, right = right, left ^ (_scramble(right, key) & self._half_mask)
        return (left << self._half_bits) | right


def cut(ids: np.ndarray, ranks: int, micro_batch: int) -> list[list[np.ndarray]]:
    """``result[j][r]``: rank r's ids of micro-batch j; every rank gets the same number of micro-batches.

    Micro-batch j of all ranks together is the next ``ranks * micro_batch`` ids, so the model sees the same
    set per micro-batch at any world size with the same product. A short last block is split evenly,
    earlier ranks more.
    """
    if ranks < 1 or micro_batch < 1:
        raise DataError(f"ids were to be cut over {ranks} ranks in micro-batches of {micro_batch}; give at least 1")
    block = ranks * micro_batch
    return [_split(ids[start : start + block], ranks) for start in range(0, len(ids), block)]


def _split(ids: np.ndarray, ranks: int) -> list[np.ndarray]:
    each, extra = divmod(len(ids), ranks)
    bounds = [each * rank + min(rank, extra) for rank in range(ranks + 1)]
    return [ids[low:high] for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
