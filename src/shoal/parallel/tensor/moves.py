"""The collectives of tensor parallelism, each with its gradient, and the cutting of whole tensors into parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.blueprint.split import Split, spans


class Group:
    """The ranks that share a model's tensors. ``entered``: the last value that entered a region, and what it became,
    so that layers that read the same value (query, key, value; gate, up) send its gradient once. ``running``: how many
    modules with parts are within their forward. ``gathers``: parts that had to become whole, by function."""

    def __init__(self, ranks: dist.ProcessGroup | None, degree: int, rank: int) -> None:
        self.ranks, self.degree, self.rank = ranks, degree, rank
        self.entered: tuple[Tensor, int, Tensor] | None = None
        self.running = 0
        self.gathers: dict[str, int] = {}

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def sum(self, tensor: Tensor) -> Tensor:
        """Collective. Added up over the group, in place."""
        if not isinstance(tensor, FakeTensor):
            dist.all_reduce(tensor, group=self.ranks)
        return tensor


def part_of(tensor: Tensor, split: Split, group: Group) -> Tensor:
    """This rank's part of a tensor that all ranks have; a view where it can be."""
    taken = [tensor.narrow(split.dim, at, length) for at, _, length in spans(split, group.degree, group.rank)]
    return taken[0] if len(taken) == 1 else torch.cat(taken, split.dim)


def enter(tensor: Tensor, group: Group) -> Tensor:
    """Collective in backward. A value that all ranks have, used differently by each: their gradients are summed."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    last = group.entered
    if last is not None and last[0] is tensor and last[1] == tensor._version:
        return last[2]
    made = _Enter.apply(tensor, group)
    if isinstance(tensor, nn.Parameter):
        return made  # a norm's weight between two layers that read the same value
    group.entered = (tensor, tensor._version, made)
    return made


def total(tensor: Tensor, group: Group) -> Tensor:
    """Collective. Partial sums of a fresh ``tensor`` added up; the gradient goes to every rank's."""
    group.entered = None
    if tensor._is_view() or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return _Total.apply(tensor, group)


def gather(tensor: Tensor, split: Split, group: Group) -> Tensor:
    """Collective. The whole tensor of all ranks' parts; each keeps its part of the gradient, which all have alike."""
    return _Gather.apply(tensor, split, group)


def assembled(parts: list[Tensor], split: Split, degree: int) -> Tensor:
    """The whole tensor from every rank's part, in order of rank."""
    if len(split.parts) == 1:
        return torch.cat(parts, split.dim)
    cut = [part.split([size // degree for size in split.parts], split.dim) for part in parts]
    return torch.cat([cut[rank][at] for at in range(len(split.parts)) for rank in range(degree)], split.dim)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return ctx.group.sum(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(tensor)
        return group.sum(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: Split, group: Group) -> Tensor:
        ctx.split, ctx.group = split, group
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(group.degree)]
        if not isinstance(tensor, FakeTensor):
            dist.all_gather(parts, tensor, group=group.ranks)
        return assembled(parts, split, group.degree)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return part_of(grads[0], ctx.split, ctx.group), None, None
