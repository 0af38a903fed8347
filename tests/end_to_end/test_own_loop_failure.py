"""A rank of an own loop that fails must not wait for the others, which may be anywhere."""

from __future__ import annotations

import sys

import pytest
from commands import call

pytestmark = pytest.mark.ranks

SCRIPT = """
import sys, torch, shoal
from torch.utils.data import TensorDataset

def collective(run):
    raise SystemExit("a collective call at exit")

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
x = torch.randn(64, 3)
run = shoal.prepare(
    model=model, data=TensorDataset(x, x.sum(1, keepdim=True)), loss=torch.nn.functional.mse_loss,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01), global_batch=8, steps=200, out=sys.argv[1], sinks=(),
)
for window in run.windows():
    if run.step(window).step == 5:
        run.saver.drain = collective
        raise ValueError("boom")
"""


def test_a_failed_own_loop_ends_without_a_collective_call(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)
    ended = call([sys.executable, str(script), str(tmp_path / "run")], tmp_path)
    assert ended.status == 1
    assert "ValueError: boom" in ended.err
    assert "a collective call at exit" not in ended.err
