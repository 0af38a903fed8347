"""Rectangular regions of a tensor: where they meet, whether they fill a region once, and reading one from a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from shoal.checkpoint.layout import CHUNK_BYTES, Shape

GAP_BYTES = 64 << 10  # what lies between two wanted parts is read over up to this size: seeking costs more


class Box(NamedTuple):
    """A region: where it begins on each axis, and how long it is."""

    offsets: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Self:
        """All of a tensor of ``shape``."""
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """Elements in it."""
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """The region that both have in common; None where there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(length > 0 for length in shape) else None

    def seen_from(self, origin: Sequence[int]) -> Box:
        """The same region with offsets counted from ``origin``."""
        return Box(tuple(at - start for at, start in zip(self.offsets, origin, strict=True)), self.shape)

    def of(self, tensor: Tensor) -> Tensor:
        """This region of ``tensor``, as a view."""
        for axis, (start, length) in enumerate(zip(self.offsets, self.shape, strict=True)):
            if length != tensor.shape[axis]:
                tensor = tensor.narrow(axis, start, length)
        return tensor

    @property
    def ends(self) -> Shape:
        """Where it ends on each axis."""
        return tuple(map(sum, zip(self.offsets, self.shape, strict=True)))

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{end}' for start, end in zip(self.offsets, self.ends, strict=True))}]"


def flaw(region: Box, boxes: Iterable[Box]) -> str | None:
    """The first part of ``region`` that no box fills, or that several do; None where each is filled once."""
    inside = [met for box in boxes if (met := region.meet(box))]
    return _flaw(region, inside, 0) if region.size else None


def _flaw(region: Box, boxes: list[Box], axis: int) -> str | None:
    """As ``flaw``; on the axes before ``axis`` every box spans the whole region."""
    if not boxes:
        return f"nothing holds {region}"
    if axis == len(region.shape):
        return None if len(boxes) == 1 else f"{len(boxes)} pieces hold {region}"
    edges = {region.offsets[axis], region.ends[axis]}
    edges.update(box.offsets[axis] for box in boxes)
    edges.update(box.ends[axis] for box in boxes)
    waiting = sorted(boxes, key=lambda box: -box.offsets[axis])
    active: list[Box] = []
    for start, end in pairwise(sorted(edges)):
        active = [box for box in active if box.ends[axis] > start]
        while waiting and waiting[-1].offsets[axis] <= start:
            active.append(waiting.pop())
        slab = Box(
            (*region.offsets[:axis], start, *region.offsets[axis + 1 :]),
            (*region.shape[:axis], end - start, *region.shape[axis + 1 :]),
        )
        if found := _flaw(slab, active, axis + 1):
            return found
    return None


@torch.no_grad()
def read_box(file: Any, at: int, held: Shape, offsets: Shape, target: Tensor) -> bool:
    """Fill ``target`` with the region at ``offsets`` of a dense tensor of shape ``held`` that begins at byte ``at``.

    Little but the region is read, and never more than CHUNK_BYTES beside ``target``. False where the file ends
    before it.
    """
    if not target.numel():
        return True
    item = target.element_size()
    strides = [math.prod(held[axis + 1 :]) for axis in range(len(held))]
    first = sum(map(math.prod, zip(offsets, strides, strict=True)))
    spans = _spans(target.shape, strides)
    span = spans[0] * item
    if target.is_contiguous() and target.device.type == "cpu" and span == target.numel() * item:
        file.seek(at + first * item)
        return _filled(file, target.view(-1))
    split = [axis for axis, length in enumerate(target.shape) if length > 1]
    gap = max((strides[axis] - spans[axis + 1] for axis in split), default=0) * item
    if span <= CHUNK_BYTES and gap <= GAP_BYTES:
        part = torch.empty(spans[0], dtype=target.dtype)
        file.seek(at + first * item)
        filled = _filled(file, part)
        target.copy_(part.as_strided(target.shape, strides))
        return filled
    axis = split[0]
    rows = 1 if gap > GAP_BYTES else max(1, CHUNK_BYTES // (strides[axis] * item))
    for row in range(0, target.shape[axis], rows):
        part = target.narrow(axis, row, min(rows, target.shape[axis] - row))
        moved = (*offsets[:axis], offsets[axis] + row, *offsets[axis + 1 :])
        if not read_box(file, at, held, moved, part):
            return False
    return True


def _spans(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Elements from the first to the last of a region, counting from each axis inwards; 1 after the last axis."""
    spans = [1]
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        spans.append(spans[-1] + (length - 1) * stride)
    return spans[::-1]


def _filled(file: Any, target: Tensor) -> bool:
    """Read all of a dense CPU tensor; False where the file ends before."""
    rest = target.view(torch.uint8).numpy().data
    while rest and (count := file.readinto(rest)):
        rest = rest[count:]
    return not rest
