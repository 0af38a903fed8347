"""How a tensor lies over the ranks of a tensor group, and what reshaping does to it. Plain arithmetic, no torch."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple


class Split(NamedTuple):
    """Dimension ``dim`` is made of consecutive ``parts``; every rank holds its share of each, in order of rank.

    One part is the plain case. Packed projections have several: (query, key, value), each divided among the ranks.
    A part counts in blocks of ``unit`` entries that no rank has a piece of (3 heads of 12: (3,) in units of 12); the
    first ranks have one block more where the degree does not divide them. What is divided evenly has the unit 1.
    """

    dim: int
    parts: tuple[int, ...]
    unit: int = 1

    @property
    def size(self) -> int:
        """The whole dimension."""
        return sum(self.parts) * self.unit

    @property
    def lengths(self) -> tuple[int, ...]:
        """The parts in entries."""
        return tuple(part * self.unit for part in self.parts)

    def on(self, dim: int) -> Split:
        """The same on another dimension."""
        return self._replace(dim=dim)


class Seen(NamedTuple):
    """A tensor as rules see it: its whole shape, and how it is split (None: every rank has all of it)."""

    shape: tuple[int, ...]
    split: Split | None


class Refusal(Exception):
    """An operation cannot run on split tensors as they are. With the dimension in ``parts``, or in blocks of ``unit``
    entries, it could."""

    def __init__(self, reason: str, parts: tuple[int, ...] | None = None, unit: int | None = None) -> None:
        super().__init__(reason)
        self.parts, self.unit = parts, unit


def fits(parts: tuple[int, ...], degree: int) -> bool:
    """Whether every rank gets some of every part."""
    return all(part >= degree for part in parts)


def even(parts: tuple[int, ...], degree: int) -> bool:
    """Whether every rank gets as much."""
    return all(part % degree == 0 for part in parts)


def simplest(split: Split, degree: int) -> Split:
    """The split in units of 1 where it is an even one, so that equal splits are equal values."""
    return Split(split.dim, split.lengths) if even(split.parts, degree) else split


def share(part: int, degree: int, rank: int) -> tuple[int, int]:
    """(start, number) of the blocks of a part that a rank holds."""
    number, more = divmod(part, degree)
    return rank * number + min(rank, more), number + (rank < more)


def local_size(split: Split, degree: int, rank: int) -> int:
    """How many entries of the dimension a rank holds."""
    return sum(share(part, degree, rank)[1] for part in split.parts) * split.unit


def local_shape(shape: tuple[int, ...], split: Split | None, degree: int, rank: int) -> tuple[int, ...]:
    """One rank's shape."""
    if split is None:
        return shape
    return (*shape[: split.dim], local_size(split, degree, rank), *shape[split.dim + 1 :])


def local_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], split: Split | None, degree: int
) -> tuple[int, ...]:
    """The strides of the first rank's part of a tensor; dimensions around the split one move closer together."""
    if split is None or not strides[split.dim]:
        return strides
    whole, part = shape[split.dim] * strides[split.dim], local_size(split, degree, 0) * strides[split.dim]
    return tuple(stride // whole * part if stride >= whole else stride for stride in strides)


def viewable(shape: tuple[int, ...], strides: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a reshape to ``after`` needs no copy, as torch decides it (aten/src/ATen/TensorUtils.cpp, computeStride):
    dimensions that become one must lie one after the other."""
    if not shape or 0 in shape:
        return True
    at, base, old, new = len(after) - 1, strides[-1], 1, 1
    for dim in reversed(range(len(shape))):
        old *= shape[dim]
        if dim and (shape[dim - 1] == 1 or strides[dim - 1] == old * base):
            continue
        while at >= 0 and (new < old or after[at] == 1):
            new *= after[at]
            at -= 1
        if new != old:
            return False
        if dim:
            base, old, new = strides[dim - 1], 1, 1
    return at < 0


def spans(split: Split, degree: int, rank: int) -> list[tuple[int, int, int]]:
    """(offset in the whole dimension, offset in the rank's, length) of each piece that a rank holds."""
    found, whole, local = [], 0, 0
    for part in split.parts:
        start, number = share(part, degree, rank)
        found.append((whole + start * split.unit, local, number * split.unit))
        whole, local = whole + part * split.unit, local + number * split.unit
    return found


def reshaped(split: Split, before: tuple[int, ...], after: tuple[int, ...], degree: int) -> Split:
    """Where the split lies after a reshape. Raises Refusal where a rank's part would be no part of the new tensor."""
    for old, new in _groups(before, after):
        if split.dim in old:
            at = old.index(split.dim)
            outer, inner = math.prod(before[d] for d in old[:at]), math.prod(before[d] for d in old[at + 1 :])
            flat = simplest(Split(0, split.parts * outer, split.unit * inner), degree)
            return _placed(flat, [(d, after[d]) for d in new], degree)
    raise Refusal(f"{before} cannot be seen as {after}")


def _placed(flat: Split, dims: list[tuple[int, int]], degree: int) -> Split:
    """The split of one dimension, cut into ``dims`` (number, size)."""
    parts, unit = flat.parts, flat.unit
    for at, (dim, size) in enumerate(dims):
        rest = math.prod(size for _, size in dims[at + 1 :])
        if unit % rest == 0 and fits(parts, degree):
            return simplest(Split(dim, parts, unit // rest), degree)
        whole = all(part * unit % rest == 0 for part in parts)
        blocks = tuple(part * unit // rest if whole else part * unit / rest for part in parts)
        if whole and even(parts, degree) and all(block % degree == 0 for block in blocks):
            return Split(dim, tuple(map(int, blocks)))
        count, over = divmod(len(parts), size)
        chunk = parts[: max(count, 1)]
        if over or not count or parts != chunk * size or sum(chunk) * unit != rest:
            raise Refusal(
                f"{' + '.join(map(str, blocks))} (heads) cannot be divided among {degree}",
                (rest,) * size if len(parts) == 1 and size > 1 else None,
                rest if whole and fits(tuple(map(int, blocks)), degree) else None,
            )
        parts = chunk
    raise Refusal(f"{' + '.join(map(str, parts))} cannot be divided among {degree}")


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Consecutive dimensions of both shapes that hold the same elements."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new, left, right = [], [], 1, 1
        if i < len(before):
            old, left, i = [i], before[i], i + 1
        if j < len(after):
            new, right, j = [j], after[j], j + 1
        while left != right:
            if left < right and i < len(before):
                old, left, i = [*old, i], left * before[i], i + 1
            elif right < left and j < len(after):
                new, right, j = [*new, j], right * after[j], j + 1
            else:
                raise Refusal(f"{before} cannot be seen as {after}")
        found.append((old, new))
    return found


def cut(split: Split, sizes: tuple[int, ...]) -> list[Split]:
    """How consecutive pieces of a split dimension lie. Raises Refusal, with the parts that would do."""
    ends, wanted = set(itertools.accumulate(split.lengths)), list(itertools.accumulate(sizes))
    if not set(wanted) <= ends:
        bounds = [0, *sorted(ends | set(wanted))]
        better = tuple(high - low for low, high in itertools.pairwise(bounds))
        raise Refusal(f"pieces of {sizes} are taken of a dimension split as {split.lengths}", better)
    found: list[Split] = []
    at = 0
    for size in sizes:
        piece: list[int] = []
        while sum(piece) * split.unit < size:
            piece.append(split.parts[at])
            at += 1
        found.append(Split(split.dim, tuple(piece), split.unit))
    return found


def operands(value: Any) -> list[Seen]:
    """Every tensor among arguments, in order."""
    if isinstance(value, Seen):
        return [value]
    if isinstance(value, tuple):
        return [found for part in value for found in operands(part)]
    return []
