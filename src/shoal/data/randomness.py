"""The randomness of user code that makes samples, kept apart from the model's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shoal.data.order import mix

State = tuple[Any, Any, Any]


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """The 64-bit seed of one sample in one epoch; the same whoever reads it."""
    return mix(seed, 1, epoch, sample)


def seed_all(value: int) -> None:
    """Seed torch's CPU generator, numpy's and Python's global ones. CUDA generators are left alone."""
    torch.default_generator.manual_seed(value)
    np.random.seed([value & 0xFFFFFFFF, value >> 32])
    random.seed(mix(value, 3))  # of the same seed it would draw what numpy draws: both are Mersenne twisters


def capture() -> State:
    """The three global random states."""
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def restore(state: State) -> None:
    """Put back what ``capture`` took."""
    torch.default_generator.set_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


@contextmanager
def undisturbed(default_dtype: torch.dtype | None = None) -> Iterator[None]:
    """User code may draw random numbers in here; the states are put back. Sets the default dtype too."""
    before, dtype = capture(), torch.get_default_dtype()
    try:
        if default_dtype is not None:
            torch.set_default_dtype(default_dtype)
        yield
    finally:
        torch.set_default_dtype(dtype)
        restore(before)
