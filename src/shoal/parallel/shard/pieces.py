"""Where a rank's shard lies in the whole tensor: what checkpoints read and write."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Piece(NamedTuple):
    """``tensor[local]`` of a rank's own part is ``whole[offsets[0] : offsets[0] + shape[0], ...]``."""

    local: tuple[slice, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def pieces(tensor: Tensor) -> list[Piece]:
    """The parts of the whole tensor that this rank holds: none where its shard is empty, all of it where it is whole.

    For a parameter, or any state of an optimizer that has its shape.
    """
    shape: tuple[int, ...] = tuple(tensor.shape)
    offsets: tuple[int, ...] = (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        held, placed = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        shape, offsets = tuple(held), tuple(placed)
        if 0 in shape:
            return []
    return [Piece(tuple(slice(0, size) for size in shape), offsets, shape)]


def is_first_copy(tensor: Tensor) -> bool:
    """Whether this rank's part is the first of equal ones: the one that counts in a norm and that is written."""
    if not isinstance(tensor, DTensor):
        return True
    place = tensor.device_mesh.get_coordinate() or ()
    return all(at == 0 for at, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate())


def local(tensor: Tensor) -> Tensor:
    """This rank's own part, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
