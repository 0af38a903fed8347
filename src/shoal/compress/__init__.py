"""Gradient codecs, one file each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.compress.bf16 import Bf16
from shoal.compress.codec import ERROR, Codec, Memory, Part
from shoal.compress.int8 import Int8
from shoal.compress.powersgd import PowerSGD
from shoal.compress.topk import TopK
from shoal.plan.codec import Codec as Spec
from shoal.plan.codec import matrix

__all__ = ["ERROR", "Codec", "Memory", "Part", "carries", "make"]

#: What makes each codec; its costs stand in plan/codec.py under the same name.
CODECS: dict[str, Callable[[Spec], Codec]] = {
    "bf16": lambda spec: Bf16(),
    "int8": lambda spec: Int8(),
    "topk": TopK,
    "powersgd": PowerSGD,
}


def carries(spec: Spec, param: Tensor) -> bool:
    """Whether a parameter's gradient travels in the codec: a large enough matrix of float32 or float64."""
    return param.dtype in (torch.float32, torch.float64) and spec.carries(matrix(param.shape))


def make(spec: Spec) -> Codec:
    """The codec that a plan names."""
    return CODECS[spec.name](spec)
