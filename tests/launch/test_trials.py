"""Plans that are run for a few steps on the workers that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cluster.facts import Cluster, Device, Link
from shoal.launch.planning import Extras, more, plan

pytestmark = pytest.mark.ranks

JOB = """
from typing import ClassVar
import torch, shoal

class Job(shoal.Job):
    defaults: ClassVar[dict] = {"global_batch": 8, "micro_batch": 1, "epochs": 1, "save_every": 1, "clip": 1.0}
    width: int = 64

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, self.width), torch.nn.GELU(), torch.nn.Linear(self.width, 1))

    def data(self):
        return torch.utils.data.TensorDataset(torch.ones(16, 8), torch.ones(16, 1))

    def loss(self, output, targets):
        return shoal.Loss(((output - targets) ** 2).sum(), len(targets))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""


def here(peak: float = 1e11) -> Cluster:
    """Two workers, said to have been measured."""
    device = Device(
        name="cpu", kernels="cpu", memory_bytes=int(8e9), flops_per_s={"fp32": peak}, matmul_share=0.9,
        attention_share=0.5, memory_bytes_per_s=1e10, memory_share=0.9, launch_s=1e-5,
    )  # fmt: skip
    link = Link(bytes_per_s=1e9, base_s=1e-5, latency_s=1e-6)
    return Cluster(name="here", device=device, devices_per_node=2, inside=link)


def test_the_best_plans_run_here_and_are_ranked_by_what_was_measured(tmp_path: Path) -> None:
    """The job's own micro-batch and two steps of data stood in the way; sequence parallelism was proposed for a model
    without sequences, which the run then refused."""
    (tmp_path / "tried.py").write_text(JOB)
    planned = plan(str(tmp_path / "tried.py"), fields=["width=32"], cluster=here())
    assert len(planned.best) >= 3 and not any(found.candidate.sequence_parallel for found in planned.best)
    told = more(planned, Extras(trials=2), str(tmp_path / "tried.py"), ["width=32"]).lines
    assert [line.partition(" ")[0] for line in told] == ["", "ran", "ran", "ranked"]
    assert told[-1].count("(measured)") == 2 and told[-1].count("(corrected)") == len(planned.best) - 2
