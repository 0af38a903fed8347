"""The model's randomness is a pure function of where training stands, so nothing of it needs saving."""

from __future__ import annotations

import hashlib

import torch

from shoal.data.randomness import seed_all as seed_globals


def key(*parts: int) -> int:
    """A 63-bit number from integers; equal on every machine."""
    text = ",".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_all(*parts: int) -> None:
    """Seed torch, numpy and random from ``parts``."""
    value = key(*parts)
    torch.manual_seed(value)  # of every device
    seed_globals(value)
