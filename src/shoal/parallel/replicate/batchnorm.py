"""Batch normalisation over one micro-batch of all data ranks together, as one device would see it."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.core.errors import ModelError
from shoal.parallel.shapes import shapes_only


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduced gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm with statistics over all ranks' rows. ``padding``: this rank's rows are not part of the batch."""

    group: dist.ProcessGroup | None = None
    padding: bool = False

    def _check_input_dim(self, input: Tensor) -> None:
        return None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (B, C, ...) over all dimensions but C, and over the ranks. Collective in training mode."""
        if not (self.training or self.running_mean is None) or shapes_only(input):
            return super().forward(input)
        dims = [0, *range(2, input.dim())]
        weight = 0.0 if self.padding else 1.0
        wide = input.double() if input.dtype == torch.float64 else input.float()
        count = wide.new_full((1,), weight * input.numel() / input.shape[1])
        sums = _SumOverRanks.apply(torch.cat([wide.sum(dims) * weight, count]), self.group)
        total, number = sums[:-1], sums[-1]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        mean = total / number
        centred = wide - mean.view(shape)
        squares = _SumOverRanks.apply((centred * centred).sum(dims) * weight, self.group)
        variance = squares / number
        self._track(mean.detach(), variance.detach(), number.detach())
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor, number: Tensor) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            rate = 1.0 / float(self.num_batches_tracked or 1) if self.momentum is None else self.momentum
            unbiased = variance * number / (number - 1).clamp(min=1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


def globalise(model: nn.Module, group: dist.ProcessGroup | None) -> list[GlobalBatchNorm]:
    """Let every BatchNorm inside ``model`` see all ranks' rows; the modules themselves stay, whoever holds them.

    Returns them, so that the caller can mark padding. Raises ModelError for one with a forward of its own.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            if not isinstance(module, GlobalBatchNorm):
                module.__class__ = _global_class(type(module), name)
            changed = cast(GlobalBatchNorm, module)
            changed.group = group
            found.append(changed)
    return found


def _global_class(kind: type[_BatchNorm], name: str) -> type[_BatchNorm]:
    """``kind`` with the forward over all ranks."""
    if kind.__module__.startswith("torch.nn."):
        return GlobalBatchNorm
    own = next(cls for cls in kind.__mro__ if "forward" in vars(cls))
    if not own.__module__.startswith("torch.nn."):
        raise ModelError(
            f"{name!r} is a {kind.__name__}, a BatchNorm with a forward of its own, whose statistics would be of each "
            "worker's rows alone; use torch's BatchNorm, a norm without batch statistics, or --workers 1"
        )
    return type(kind.__name__, (GlobalBatchNorm, kind), {"__module__": kind.__module__})
