"""Grouped products (experts' layers) on tensors without data, and their FLOPs: torch has a rule for bfloat16 alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

GROUPED = torch.ops.aten._grouped_mm
#: What its kernel computes in where torch's own rule for tensors without data refuses it.
_OTHERS = (torch.float32, torch.float16)


def _given(
    mode: FakeTensorMode, func: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None,
    out_dtype: Any = None,
) -> Tensor:  # fmt: skip
    """Rows [M, K] by groups with weights [G, K, N] -> [M, N], and the products of its backward: [K, M] by [M, N] with
    M in G groups -> [G, K, N]."""
    if a.dtype not in _OTHERS:
        return NotImplemented  # torch's own rule
    if a.dim() == b.dim():
        groups = a.shape[0] if offs is None else offs.shape[0]
        shape = (groups, a.shape[-2], b.shape[-1])
    else:
        shape = (a.shape[-2], b.shape[-1])
    with mode:
        return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


if GROUPED.default not in op_implementations_dict:
    register_op_impl(GROUPED.default)(_given)


def formula(func: Any) -> Callable[..., int] | None:
    """FLOPs of an operator that computes products, as torch.utils.flop_counter has them (arguments, ``out_val``); None
    for any other."""
    packet = func._overloadpacket
    return flop_registry.get(packet) or (_flops if packet is GROUPED else None)


def _flops(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Every row of a group is multiplied by that group's weights alone."""
    if a.dim() == b.dim() == 2:
        return 2 * a.numel() * b.shape[-1]
    return 2 * out_val.numel() * a.shape[-1]
