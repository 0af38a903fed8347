"""Jobs that cannot be trained are refused by planning as by training; short data is planned all the same."""

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import ConfigError, DataError, ModelError
from shoal.job import Job
from shoal.launch.sketch import sketch_of
from small_jobs import Rows, job, sgd

pytestmark = pytest.mark.unit


class Buffers(nn.Module):
    """No parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def made(model: Any, samples: int = 8) -> Job:
    rows = Rows([(torch.zeros(4), torch.zeros(4))] * samples)
    return job(model=model, data=rows, loss=nn.functional.mse_loss, optimizer=sgd(1.0))


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (lambda: None, ConfigError, r"model\(\) returned NoneType; return an nn.Module"),
        (Buffers, ModelError, "Buffers has no parameters; give a model that has some to train"),
        (lambda: nn.Linear(4, 4).requires_grad_(False), ModelError, "no parameter of the model requires a gradient"),
        (lambda: nn.LazyLinear(4), ModelError, "parameter 'weight' has no shape yet; give lazy modules a batch"),
    ],
)
def test_what_cannot_be_trained_is_not_planned_or_rehearsed(model: Any, error: type[Exception], said: str) -> None:
    """Tracebacks, and a plan for a model that trains nothing."""
    with pytest.raises(error, match=said):
        sketch_of(made(model), {})
    with pytest.raises(error, match=said):
        shoal.rehearse(made(model), mesh="shard=2", global_batch=8, predict=False)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_short_data_is_traced_and_counted(samples: int) -> None:
    """One sample was refused for a batch that nobody asked for; the last of three did not count in an epoch."""
    found = sketch_of(made(lambda: nn.Linear(4, 4), samples), {})
    assert found.dataset_samples == samples and found.blueprint.samples == min(samples, 2)


def test_empty_data_is_refused() -> None:
    with pytest.raises(DataError, match="is empty; give at least 1 sample"):
        sketch_of(made(lambda: nn.Linear(4, 4), 0), {})
    empty = made(lambda: nn.Linear(4, 4))
    empty._given["data"] = Iterable()  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="Iterable is empty; give at least 1 sample"):
        sketch_of(empty, {})


class Iterable(torch.utils.data.IterableDataset):
    """Nothing."""

    def __iter__(self) -> Any:
        return iter(())
