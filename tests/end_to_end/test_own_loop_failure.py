"""A rank of an own loop that fails must not leave the others, or itself, waiting."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.ranks

SCRIPT = """
import sys, torch, shoal
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
x = torch.randn(64, 3)
run = shoal.prepare(
    model=model, data=TensorDataset(x, x.sum(1, keepdim=True)), loss=torch.nn.functional.mse_loss,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01), global_batch=8, steps=200, out=sys.argv[1], sinks=(),
)
for window in run.windows():
    report = run.step(window)
    if report.step == 5 and run.rank == 1:
        raise ValueError("boom on rank 1")
"""


def test_a_rank_that_raises_in_its_own_loop_ends_the_whole_world(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)
    start = time.monotonic()
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            script,
            tmp_path / "run",
        ],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert ended.returncode != 0
    assert "boom on rank 1" in ended.stderr
    assert time.monotonic() - start < 60
