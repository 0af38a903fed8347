"""What one rank holds of each tensor, and which part of it this rank writes: decided without asking anyone.

Every rank names, with each part that it holds, all the ranks that hold the same part. Those see the same parts
under the same names, so each of them can work out alone who writes what.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from shoal.checkpoint.boxes import Box
from shoal.checkpoint.layout import Shape
from shoal.core.errors import CheckpointError

CUT_BYTES = 64 << 10  # a part smaller than this is written by one rank whole
CUTS = 8  # a part larger than 1/8 of what a rank should write is cut, so that the work comes out even

Holders = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A region of a tensor, held here (any strides, any device) and by all of ``holders``; None: by every rank."""

    tensor: Tensor
    offsets: Shape
    holders: Holders | None = None

    @property
    def box(self) -> Box:
        """Where it lies in the whole tensor."""
        return Box(self.offsets, tuple(self.tensor.shape))


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a tensor of ``shape``: parts that do not overlap; none and empty ones are fine."""

    shape: Shape
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, tensor: Tensor, holders: Holders | None = None) -> Self:
        """All of a tensor."""
        return cls(tuple(tensor.shape), (Part(tensor, (0,) * tensor.ndim, holders),))

    @classmethod
    def of(
        cls, shape: Iterable[int], parts: Iterable[tuple[Tensor, Sequence[int]]], holders: Holders | None = None
    ) -> Self:
        """Some regions, each with the offsets at which it begins in the whole tensor."""
        return cls(tuple(shape), tuple(Part(tensor, tuple(offsets), holders) for tensor, offsets in parts))


class Slab(NamedTuple):
    """Something to write: a region of a tensor and where it lies in the whole."""

    name: str
    tensor: Tensor
    offsets: Shape


def as_pieces(given: Mapping[str, Tensor | Piece]) -> dict[str, Piece]:
    """Every tensor that is given itself is held whole by every rank."""
    return {name: Piece.whole(held) if isinstance(held, Tensor) else held for name, held in given.items()}


def to_write(pieces: Mapping[str, Piece], rank: int, ranks: int) -> list[Slab]:
    """What ``rank`` writes: over all ranks every part once, bytes even among those that hold it.

    A pure function of names, shapes, dtypes and holders. Raises CheckpointError where a part is not as it says.
    """
    every = tuple(range(ranks))
    groups: dict[Holders, list[Slab]] = {}
    for name, piece in pieces.items():
        empty = not math.prod(piece.shape)  # remembered by its name and shape
        for part in piece.parts:
            holders = every if part.holders is None else part.holders
            _check(name, piece, part, rank, holders)
            if part.tensor.numel() or empty:
                groups.setdefault(holders, []).append(Slab(name, part.tensor.detach(), part.offsets))
    return [slab for holders, slabs in groups.items() for slab in _share(slabs, holders.index(rank), len(holders))]


def _share(slabs: list[Slab], place: int, holders: int) -> list[Slab]:
    """The largest first, each to whoever has the least so far; large ones in parts."""
    if holders == 1:
        return slabs
    sized = [(_bytes(slab), slab) for slab in slabs]
    limit = max(CUT_BYTES, sum(size for size, _ in sized) // (CUTS * holders))
    cut = [(size, slab) for size, slab in sized if size <= limit]
    cut += [(_bytes(part), part) for size, slab in sized if size > limit for part in _cut(slab, limit)]
    cut.sort(key=lambda entry: (-entry[0], entry[1].name, entry[1].offsets))
    loads = [(0, one) for one in range(holders)]
    mine = []
    for size, slab in cut:
        load, least = loads[0]
        if least == place:
            mine.append(slab)
        heapq.heapreplace(loads, (load + size, least))
    return mine


def _cut(slab: Slab, limit: int) -> Iterator[Slab]:
    """Parts of at most ``limit`` bytes, as far as rows of the first axis that has several allow."""
    axis = next((axis for axis, length in enumerate(slab.tensor.shape) if length > 1), None)
    if axis is None:
        yield slab
        return
    length = slab.tensor.shape[axis]
    rows = max(1, limit * length // _bytes(slab))
    for row in range(0, length, rows):
        offsets = (*slab.offsets[:axis], slab.offsets[axis] + row, *slab.offsets[axis + 1 :])
        yield Slab(slab.name, slab.tensor.narrow(axis, row, min(rows, length - row)), offsets)


def _bytes(slab: Slab) -> int:
    return slab.tensor.numel() * slab.tensor.element_size()


def _check(name: str, piece: Piece, part: Part, rank: int, holders: Holders) -> None:
    whole, dtype = Box.whole(piece.shape), piece.parts[0].tensor.dtype
    box, dimensions = part.box, len(piece.shape)
    if box != whole and not (
        len(part.offsets) == part.tensor.ndim == dimensions and (not box.size or whole.meet(box) == box)
    ):
        raise CheckpointError(
            f"cannot save {name!r}: a part of shape {list(part.tensor.shape)} at {list(part.offsets)} does not lie "
            f"in the whole of shape {list(piece.shape)}; give offsets and shape of the whole tensor"
        )
    if part.tensor.dtype != dtype:
        raise CheckpointError(
            f"cannot save {name!r}: it has parts of {dtype} and of {part.tensor.dtype}; store them as one dtype"
        )
    if rank not in holders:
        raise CheckpointError(
            f"cannot save {name!r}: rank {rank} has a part that only ranks {list(holders)} are said to hold; "
            "name every rank that holds the part"
        )
