"""Shoal trains PyTorch models on many devices: the same numbers in every layout, nothing lost."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.engine.lr_schedule import warmup_constant as warmup_constant
    from shoal.engine.lr_schedule import warmup_cosine as warmup_cosine
    from shoal.engine.lr_schedule import warmup_linear as warmup_linear
    from shoal.engine.run import Run as Run
    from shoal.engine.weights import load_weights as load_weights
    from shoal.job import Job as Job
    from shoal.job import Loss as Loss
    from shoal.launch.measure import measure as measure
    from shoal.launch.prepare import prepare as prepare
    from shoal.launch.train import train as train
    from shoal.verify import verify as verify

__version__ = "0.1.0"

_HOME = {
    "Job": "shoal.job",
    "Loss": "shoal.job",
    "Run": "shoal.engine.run",
    "load_weights": "shoal.engine.weights",
    "measure": "shoal.launch.measure",
    "prepare": "shoal.launch.prepare",
    "train": "shoal.launch.train",
    "warmup_constant": "shoal.engine.lr_schedule",
    "warmup_cosine": "shoal.engine.lr_schedule",
    "warmup_linear": "shoal.engine.lr_schedule",
}
_MODULES = {"checkpoint": "shoal.checkpoint", "plan": "shoal.plan", "verify": "shoal.verify"}
__all__ = [
    "Job",
    "Loss",
    "Run",
    "load_weights",
    "measure",
    "plan",
    "prepare",
    "train",
    "verify",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that ``import shoal`` needs no torch."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
