"""Tensors that stand for shapes alone while a forward is recorded: nothing is sent for them."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class Shapes(FakeTensorMode):
    """The mode of such tensors. Fake tensors of any other mode are a run's own (a rehearsal's) and are sent."""


def shapes_only(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a recording."""
    return isinstance(tensor, FakeTensor) and isinstance(tensor.fake_mode, Shapes)
