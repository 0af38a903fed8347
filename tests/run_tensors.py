"""All that a run holds, for comparing two runs."""

from __future__ import annotations

from torch import Tensor

from shoal.engine.run import Run
from shoal.engine.state import model_tensors


def all_tensors(run: Run) -> dict[str, Tensor]:
    """Every tensor of the run's state by its name in a checkpoint, as this rank has it."""
    return {**model_tensors(run.model, run.held)[0], **run.optimizer.tensors(), **run.average.tensors()}
