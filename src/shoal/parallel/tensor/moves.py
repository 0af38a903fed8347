"""The collectives of tensor parallelism, each with its gradient, and the cutting of whole tensors into parts.

A whole tensor is alike on all ranks, and so is its gradient; a part's gradient is the same part of the whole one. Each
function here keeps that: what all ranks have and each uses differently comes back summed (``enter``), what each has
of a whole comes back cut (``gather``), and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.blueprint.split import Split, local_size, spans
from shoal.parallel.shapes import shapes_only


class Group:
    """The ranks that share a model's tensors. ``entered``: the last value that entered a region, and what it became,
    so that layers that read the same value (query, key, value; gate, up) send its gradient once, and gather it once.
    ``running``: how many modules with parts are within their forward. ``gathers``: parts that had to become whole where
    no layer begins, by function."""

    def __init__(self, ranks: dist.ProcessGroup | None, degree: int, rank: int) -> None:
        self.ranks, self.degree, self.rank = ranks, degree, rank
        self.entered: tuple[Tensor, tuple[int, bool], Tensor] | None = None
        self.running = 0
        self.gathers: dict[str, int] = {}

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    def sum(self, tensor: Tensor) -> Tensor:
        """Collective. Added up over the group, in place."""
        if not shapes_only(tensor):
            dist.all_reduce(tensor, group=self.ranks)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Collective. The largest over the group, in place."""
        if not shapes_only(tensor):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.ranks)
        return tensor

    def gathered(self, part: Tensor, split: Split) -> Tensor:
        """Collective. The whole tensor of all ranks' parts."""
        sizes = [local_size(split, self.degree, rank) for rank in range(self.degree)]
        part = _padded(part, split.dim, max(sizes)).contiguous()
        every = part.new_empty((self.degree, *part.shape))
        if not shapes_only(part):
            dist.all_gather_into_tensor(every.flatten(0, 1), part, group=self.ranks)
        return assembled([p.narrow(split.dim, 0, s) for p, s in zip(every, sizes, strict=True)], split, self.degree)

    def scattered_sum(self, tensor: Tensor, split: Split) -> Tensor:
        """Collective. This rank's part of the sum of all ranks' tensors."""
        parts = [taken(tensor, split, self.degree, rank) for rank in range(self.degree)]
        own = parts[self.rank].shape
        longest = max(part.shape[split.dim] for part in parts)
        every = torch.stack([_padded(part, split.dim, longest) for part in parts])
        made = torch.empty_like(every[0])
        if not shapes_only(tensor):
            dist.reduce_scatter_tensor(made, every.flatten(0, 1), group=self.ranks)
        return made if own == made.shape else made.narrow(split.dim, 0, own[split.dim]).clone()


def _padded(part: Tensor, dim: int, size: int) -> Tensor:
    """Ranks with less than the others send zeros behind it: collectives move equal sizes."""
    short = size - part.shape[dim]
    return F.pad(part, (0, 0) * (part.dim() - 1 - dim) + (0, short)) if short else part


def taken(tensor: Tensor, split: Split, degree: int, rank: int) -> Tensor:
    """A rank's part of a whole tensor; a view where it can be."""
    if len(split.parts) > 1 and len(set(split.parts)) == 1:
        ((at, _, length), *_) = spans(split, degree, rank)
        cut = tensor.unflatten(split.dim, (len(split.parts), -1))
        return cut.narrow(split.dim + 1, at, length).flatten(split.dim, split.dim + 1)
    found = [tensor.narrow(split.dim, at, length) for at, _, length in spans(split, degree, rank)]
    return found[0] if len(found) == 1 else torch.cat(found, split.dim)


def part_of(tensor: Tensor, split: Split, group: Group) -> Tensor:
    """This rank's part of a tensor that all ranks have; a view where it can be."""
    return taken(tensor, split, group.degree, group.rank)


def assembled(parts: list[Tensor], split: Split, degree: int) -> Tensor:
    """The whole tensor from every rank's part, in order of rank."""
    if len(split.parts) == 1:
        return torch.cat(parts, split.dim)
    cut = [
        part.split([length for _, _, length in spans(split, degree, rank)], split.dim)
        for rank, part in enumerate(parts)
    ]
    return torch.cat([cut[rank][at] for at in range(len(split.parts)) for rank in range(degree)], split.dim)


def enter(tensor: Tensor, group: Group) -> Tensor:
    """Collective in backward. A value that all ranks have, used differently by each: their gradients are summed."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    if isinstance(tensor, nn.Parameter):
        return _Enter.apply(tensor, group)  # a norm's weight between two layers that read the same value
    return _once(tensor, group, lambda: _Enter.apply(tensor, group))


def enter_whole(part: Tensor, split: Split, group: Group) -> Tensor:
    """Collective. The whole of all ranks' parts, which each uses differently: a rank gets its part of the summed
    gradients."""
    return _once(part, group, lambda: _EnterWhole.apply(part, split, group))


def _once(tensor: Tensor, group: Group, make: Callable[[], Tensor]) -> Tensor:
    last, state = group.entered, (tensor._version, torch.is_grad_enabled())
    if last is not None and last[0] is tensor and last[1] == state:
        return last[2]
    made = make()
    group.entered = (tensor, state, made)
    return made


def total(tensor: Tensor, group: Group) -> Tensor:
    """Collective. Partial sums of a fresh ``tensor`` added up; the gradient goes to every rank's."""
    group.entered = None
    if tensor._is_view() or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return _Total.apply(tensor, group)


def total_part(tensor: Tensor, split: Split, group: Group) -> Tensor:
    """Collective. Partial sums added up, of which a rank keeps its part; the whole gradient goes to every rank's."""
    group.entered = None
    return _TotalPart.apply(tensor, split, group)


def gather(tensor: Tensor, split: Split, group: Group) -> Tensor:
    """Collective. The whole tensor of all ranks' parts; each keeps its part of the gradient, which all have alike."""
    return _Gather.apply(tensor, split, group)


def take(tensor: Tensor, split: Split, group: Group) -> Tensor:
    """Collective in backward. This rank's part of a value that all have; its gradient is made of all ranks' parts."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return part_of(tensor, split, group)
    return _Take.apply(tensor, split, group)


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


class _Split(torch.autograd.Function):
    """What the moves to and from parts have in common: a tensor, its split, the group."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.split, ctx.group = inputs

    @staticmethod
    def gathered(ctx: Any, grad: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return ctx.group.gathered(grad, ctx.split), None, None


class _Gather(_Split):
    @staticmethod
    def forward(tensor: Tensor, split: Split, group: Group) -> Tensor:
        return group.gathered(tensor, split)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return part_of(grads[0], ctx.split, ctx.group), None, None


class _EnterWhole(_Gather):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return ctx.group.scattered_sum(grads[0], ctx.split), None, None


class _TotalPart(_Split):
    @staticmethod
    def forward(tensor: Tensor, split: Split, group: Group) -> Tensor:
        return group.scattered_sum(tensor, split)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Split.gathered(ctx, grads[0])


class _Take(_Split):
    @staticmethod
    def forward(tensor: Tensor, split: Split, group: Group) -> Tensor:
        return part_of(tensor, split, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Split.gathered(ctx, grads[0])
