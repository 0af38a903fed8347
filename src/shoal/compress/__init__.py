"""Gradient codecs, one file each."""

from __future__ import annotations

from collections.abc import Callable

from shoal.compress.bf16 import Bf16
from shoal.compress.codec import ERROR, Codec, Memory, Part, carries
from shoal.compress.int8 import Int8
from shoal.compress.powersgd import PowerSGD
from shoal.compress.topk import TopK
from shoal.plan.codec import Codec as Spec

__all__ = ["ERROR", "Codec", "Memory", "Part", "carries", "make"]

#: What makes each codec; its costs stand in plan/codec.py under the same name.
CODECS: dict[str, Callable[[Spec], Codec]] = {
    "bf16": Bf16,
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
}


def make(spec: Spec) -> Codec:
    """The codec that a plan names."""
    return CODECS[spec.name](spec)
