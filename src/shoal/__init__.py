"""Shoal trains PyTorch models on many devices: the same numbers in every layout, nothing lost."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.engine.run import Run as Run
    from shoal.job import Job as Job
    from shoal.job import Loss as Loss
    from shoal.launch.prepare import prepare as prepare
    from shoal.launch.train import train as train

__version__ = "0.1.0"

_HOME = {
    "Job": "shoal.job",
    "Loss": "shoal.job",
    "Run": "shoal.engine.run",
    "prepare": "shoal.launch.prepare",
    "train": "shoal.launch.train",
    "checkpoint": "shoal.checkpoint",
}
__all__ = ["Job", "Loss", "Run", "prepare", "train"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that ``import shoal`` needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    module = import_module(_HOME[name])
    return module if _HOME[name].rpartition(".")[2] == name else getattr(module, name)
