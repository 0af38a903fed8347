"""What a run must tell its user once."""

from __future__ import annotations

import pytest
import torch
from tests.harness import run_ranks
from torch.utils.data import TensorDataset

import shoal
from shoal.monitor.events import read_events

pytestmark = pytest.mark.ranks


def _train(out: str, mean: bool) -> list[str]:
    model = torch.nn.Linear(3, 1)
    x = torch.arange(24.0).view(8, 3)

    def loss(output, targets):
        squares = (output - targets) ** 2
        return squares.mean() if mean else shoal.Loss(squares.sum(), len(squares))

    run = shoal.prepare(
        model=model,
        data=TensorDataset(x, x.sum(1, keepdim=True)),
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        global_batch=4,
        epochs=2,
        out=out,
        sinks=(),
    )
    for window in run.windows():
        run.step(window)
    run.close()
    return [row["text"] for row in read_events(run.out, kind="note") if "scalar" in row["text"]]


def test_a_scalar_loss_is_said_to_be_a_mean_once_and_a_sum_is_not(tmp_path):
    def both(rank):
        return _train(str(tmp_path / "mean"), True), _train(str(tmp_path / "sum"), False)

    told, silent = run_ranks(both, 1, timeout_s=60)[0]
    assert len(told) == 1 and "weighted by their number" in told[0]
    assert silent == []
