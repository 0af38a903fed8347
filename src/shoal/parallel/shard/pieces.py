"""This rank's own part of a sharded tensor, and whether it is the first of equal ones."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def is_first_copy(tensor: Tensor) -> bool:
    """Whether this rank's part is the first of equal ones: the one that counts in a norm and that is written."""
    if not isinstance(tensor, DTensor):
        return True
    place = tensor.device_mesh.get_coordinate() or ()
    return all(at == 0 for at, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate())


def local(tensor: Tensor) -> Tensor:
    """This rank's own part, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
