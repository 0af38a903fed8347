"""Nested fields and contradictions, by the command and by the call: all faults at once, before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import call, shoal

import shoal as product
from shoal.core.errors import ConfigError

pytestmark = pytest.mark.ranks

JOB = """
from typing import ClassVar
import torch
from pydantic import BaseModel
from torch import nn
from torch.utils.data import TensorDataset
import shoal

class Optim(BaseModel):
    lr: float = 0.1
    momentum: float = 0.5

class Job(shoal.Job):
    defaults: ClassVar[dict] = {"global_batch": 4, "kernels": "default"}
    optim: Optim = Optim(momentum=0.25)
    width: int = 1

    def model(self):
        return nn.Linear(2, self.width)

    def data(self):
        return TensorDataset(torch.ones(8, 2), torch.ones(8, 1))

    def loss(self, output, targets):
        return nn.functional.mse_loss(output, targets)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.optim.lr, momentum=self.optim.momentum)
"""

BAD = {"optim.weigth_decay": "0.1", "gradient_acumulation": "4", "width": "wide"}
TEXTS = (
    "no field 'optim.weigth_decay' in Optim; known names: lr, momentum",
    "no field 'gradient_acumulation' in Job",
    "width = 'wide' (expected int)",
    "base_batch 8 without lr_scaling does nothing",
    "global batch 10 cannot be cut over 2 workers x micro-batch 4",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nested.py"
    path.write_text(JOB)
    return path


def test_the_command_lists_every_fault_of_fields_settings_and_workers_before_it_starts_any(file: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/774 https://github.com/ROCm/aorta/pull/247
    https://github.com/Azure/azureml-assets/pull/1331 https://github.com/axolotl-ai-cloud/axolotl/pull/1388"""
    words = [f"{name}={value}" for name, value in BAD.items()]
    options = ("--workers", 2, "--global-batch", 10, "--micro-batch", 4, "--base-batch", 8)
    result = shoal("train", file, *words, *options, cwd=file.parent)
    assert result.status == 1 and result.err.count("error: ") == 1
    for text in TEXTS:
        assert result.err.count(text) == 1, result.err
    assert not (file.parent / "runs").exists()


def test_the_call_lists_every_fault_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/Azure/azureml-assets/pull/1331"""
    monkeypatch.chdir(file.parent)
    with pytest.raises(ConfigError) as caught:
        product.train(str(file), fields=BAD, workers=2, global_batch=10, micro_batch=4, base_batch=8)
    assert all(str(caught.value).count(text) == 1 for text in TEXTS), caught.value
    with pytest.raises(ConfigError, match=r"train\(\) was given a job and fields"):
        product.train(product.Job(), fields={"width": 3})
    assert not (file.parent / "runs").exists()


def test_what_contradicts_the_world_that_is_there_is_listed_together(file: Path, monkeypatch) -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/pull/1388"""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(file.parent)
    with pytest.raises(ConfigError) as caught:
        product.train(str(file), workers=3, restarts=2, global_batch=10, micro_batch=4)
    lines = str(caught.value).splitlines()
    assert lines[0] == "--workers 3 in a world of 4 ranks; leave --workers out"
    assert lines[1] == "--restarts 2 in a world that others started; leave it out, and tell torchrun or SLURM"
    assert lines[2].startswith("global batch 10 cannot be cut over 4 workers x micro-batch 4")
    assert not (file.parent / "runs").exists()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError) as caught:
        product.train(str(file), workers=0, restarts=-1, global_batch=10, micro_batch=4)
    lines = str(caught.value).splitlines()
    for line, said in zip(lines, ("--workers 0", "--restarts -1", "global batch 10"), strict=True):
        assert line.startswith(said)


def test_one_nested_option_keeps_its_siblings_and_the_origins_are_said(file: Path) -> None:
    """Giving one nested option wiped its siblings from the file. https://github.com/modelscope/ms-swift/pull/9691"""
    options = ("--steps", 1, "--workers", 1, "--out", "run")
    result = shoal("train", file, "optim.lr=1e-5", *options, cwd=file.parent)
    assert result.status == 0, result.err
    assert "given: optim.lr=1e-05 --steps=1 --out=run\n" in result.out
    assert "from the job's file: optim.momentum=0.25 width=1 --global-batch=4 --kernels=default\n" in result.out
    assert "global batch 4 = 1 worker(s) x 1 micro-batch(es) of 4; 2 steps per epoch; 1 steps in all\n" in result.out
    record = json.loads((file.parent / "run" / "run.json").read_text())
    assert record["fields"] == {"optim": {"lr": 1e-5, "momentum": 0.25}, "width": 1}
    assert record["origins"]["fields"] == {"optim.lr": "given", "optim.momentum": "job", "width": "job"}
    code = (
        "import json, shoal; "
        "shoal.train('nested.py', fields={'optim': {'lr': 1e-5}}, workers=1, steps=1, sinks=(), out='called')"
    )
    called = call([sys.executable, "-c", code], file.parent)
    assert called.status == 0, called.err
    again = json.loads((file.parent / "called" / "run.json").read_text())
    assert again["fields"] == record["fields"] and again["origins"]["fields"] == record["origins"]["fields"]
