"""The model's randomness is a pure function of where training stands, so nothing of it needs saving."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache

import torch

from shoal.data.randomness import seed_all as seed_globals


def key(*parts: int) -> int:
    """A 63-bit number from integers; equal on every machine."""
    text = ",".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@cache
def _seed_accelerator() -> Callable[[int], object] | None:
    """What seeds every device of the accelerator that is there, if one is: asked once, not at each micro-batch."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return getattr(module, "manual_seed_all", None) or module.manual_seed


def seed_all(*parts: int) -> None:
    """Seed torch on the CPU and on the accelerator that is there, numpy and random, from ``parts``.

    ``torch.manual_seed`` would queue a call, with the stack it came from, for every kind of device that is not there:
    a millisecond and some kilobytes that stay, for each micro-batch.
    """
    value = key(*parts)
    seed_globals(value)
    seed = _seed_accelerator()
    if seed is not None:
        seed(value)
