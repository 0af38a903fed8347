"""Batch normalisation over one micro-batch of all data ranks together, as one device would see it."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.core.errors import ModelError
from shoal.parallel.shapes import shapes_only


class _Normalise(torch.autograd.Function):
    """(input - mean) / deviation over all ranks' rows, times ``weight`` plus ``bias``, [B, C, ...] to the same shape;
    and the mean, the variance and the number of rows, [C], [C] and [1]. Collective, backward too.

    Keeps its input and a few figures of each channel, as one device's kernel does. ``share``: of this rank's rows in
    the batch, 1 or 0 (padding). Gradient: Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, section 3.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, norm: GlobalBatchNorm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims, shape = _dims(input)
        wide, share = _wide(input), 0.0 if norm.padding else 1.0
        rows = wide.new_full((1,), share * input.numel() / input.shape[1])
        own_variance, own_mean = torch.var_mean(wide, dims, correction=0)
        total = torch.cat([own_mean * rows, rows])
        dist.all_reduce(total, group=norm.group)
        number = total[-1:]
        mean = total[:-1] / number
        squares = rows * (own_variance + (own_mean - mean) ** 2)  # Chan et al., 1979: about the mean of all
        dist.all_reduce(squares, group=norm.group)
        variance = squares / number
        inverse = torch.rsqrt(variance + norm.eps)
        normal = (wide - mean.view(shape)).mul_(inverse.view(shape))
        if weight is not None and bias is not None:
            normal.mul_(weight.view(shape)).add_(bias.view(shape))
        ctx.save_for_backward(input, weight, mean, inverse, number)
        ctx.group, ctx.share = norm.group, share
        ctx.mark_non_differentiable(mean, variance, number)
        return normal.to(input.dtype), mean, variance, number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight, mean, inverse, number = ctx.saved_tensors
        dims, shape = _dims(input)
        grad, wide = _wide(grads[0]), _wide(input)
        made = (wide - mean.view(shape)).mul_(grad)
        sums = torch.cat([grad.sum(dims), made.sum(dims) * inverse])
        by_bias, by_weight = sums.clone().chunk(2)
        dist.all_reduce(sums, group=ctx.group)
        ahead, along = (sums * (ctx.share / number)).chunk(2)
        torch.sub(wide, mean.view(shape), out=made)  # anew, so that no second tensor of its size is there
        made.mul_((along * inverse).view(shape)).add_(ahead.view(shape))
        torch.sub(grad, made, out=made)
        made.mul_((inverse if weight is None else inverse * weight).view(shape))
        if weight is None:
            return made.to(input.dtype), None, None, None
        return made.to(input.dtype), by_weight.to(weight.dtype), by_bias.to(weight.dtype), None


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _dims(tensor: Tensor) -> tuple[list[int], list[int]]:
    """All dimensions but the channels', and the shape in which a figure of each channel goes with all rows."""
    return [0, *range(2, tensor.dim())], [1, -1, *[1] * (tensor.dim() - 2)]


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
        normal, mean, variance, number = _Normalise.apply(
            input, self.weight if self.affine else None, self.bias if self.affine else None, self
        )
        self._track(mean, variance, number)
        return normal

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
