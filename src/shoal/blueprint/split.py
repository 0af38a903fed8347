"""How a tensor lies over the ranks of a tensor group, and what reshaping does to it. Plain arithmetic, no torch."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple


class Split(NamedTuple):
    """Dimension ``dim`` is made of consecutive ``parts``; every rank holds its share of each, in order of rank.

    One part is the plain case. Packed projections have several: (query, key, value), each divided among the ranks.
    """

    dim: int
    parts: tuple[int, ...]

    @property
    def size(self) -> int:
        """The whole dimension."""
        return sum(self.parts)


class Seen(NamedTuple):
    """A tensor as rules see it: its whole shape, and how it is split (None: every rank has all of it)."""

    shape: tuple[int, ...]
    split: Split | None


class Refusal(Exception):
    """An operation cannot run on split tensors as they are. ``parts``: of the dimension, with which it could."""

    def __init__(self, reason: str, parts: tuple[int, ...] | None = None) -> None:
        super().__init__(reason)
        self.parts = parts


def fits(parts: tuple[int, ...], degree: int) -> bool:
    """Whether every part can be divided evenly."""
    return all(part % degree == 0 for part in parts)


def local_shape(shape: tuple[int, ...], split: Split | None, degree: int) -> tuple[int, ...]:
    """One rank's shape."""
    if split is None:
        return shape
    return (*shape[: split.dim], split.size // degree, *shape[split.dim + 1 :])


def spans(split: Split, degree: int, rank: int) -> list[tuple[int, int, int]]:
    """(offset in the whole dimension, offset in the rank's, length) of each piece that a rank holds."""
    found, whole, local = [], 0, 0
    for part in split.parts:
        share = part // degree
        found.append((whole + rank * share, local, share))
        whole, local = whole + part, local + share
    return found


def reshaped(split: Split, before: tuple[int, ...], after: tuple[int, ...], degree: int) -> Split:
    """Where the split lies after a reshape. Raises Refusal where a rank's part would be no part of the new tensor."""
    for old, new in _groups(before, after):
        if split.dim in old:
            at = old.index(split.dim)
            outer, inner = math.prod(before[d] for d in old[:at]), math.prod(before[d] for d in old[at + 1 :])
            flat = tuple(part * inner for part in split.parts) * outer
            return _placed(flat, [(d, after[d]) for d in new], degree)
    raise Refusal(f"{before} cannot be seen as {after}")


def _placed(parts: tuple[int, ...], dims: list[tuple[int, int]], degree: int) -> Split:
    """The split of a dimension with these parts, cut into ``dims`` (number, size)."""
    for at, (dim, size) in enumerate(dims):
        rest = math.prod(size for _, size in dims[at + 1 :])
        if all(part % rest == 0 for part in parts) and fits(tuple(part // rest for part in parts), degree):
            return Split(dim, tuple(part // rest for part in parts))
        count, over = divmod(len(parts), size)
        chunk = parts[: max(count, 1)]
        if over or not count or parts != chunk * size or sum(chunk) != rest:
            sizes = tuple(part // rest if part % rest == 0 else part / rest for part in parts)
            hint = (rest,) * size if len(parts) == 1 and size > 1 else None
            raise Refusal(f"{' + '.join(map(str, sizes))} (heads) cannot be divided among {degree}", hint)
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


def cut(parts: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The parts in each of consecutive pieces of a split dimension. Raises Refusal, with the parts that would do."""
    ends, wanted = set(itertools.accumulate(parts)), list(itertools.accumulate(sizes))
    if not set(wanted) <= ends:
        bounds = [0, *sorted(ends | set(wanted))]
        better = tuple(high - low for low, high in itertools.pairwise(bounds))
        raise Refusal(f"pieces of {sizes} are taken of a dimension split as {parts}", better)
    found: list[tuple[int, ...]] = []
    at = 0
    for size in sizes:
        piece: list[int] = []
        while sum(piece) < size:
            piece.append(parts[at])
            at += 1
        found.append(tuple(piece))
    return found


def operands(value: Any) -> list[Seen]:
    """Every tensor among arguments, in order."""
    if isinstance(value, Seen):
        return [value]
    if isinstance(value, tuple):
        return [found for part in value for found in operands(part)]
    return []
