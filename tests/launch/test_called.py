"""``shoal.train`` called from scripts and sessions of every kind: it trains, or says what to do, and never hangs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.end_to_end.commands import Result, call, words

import shoal
from shoal.core.errors import LaunchError
from shoal.launch.spawn import check_sendable, fork_runs_torch

pytestmark = pytest.mark.ranks

JOB = """
import os
from typing import Any
import torch
from torch import nn
from torch.utils.data import TensorDataset
import shoal

print("begin", flush=True)
if os.environ.get("THREADED"):
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1)  # OpenMP has threads from here on

def stack(samples):
    return tuple(torch.stack(part) for part in zip(*samples))

class Job(shoal.Job):
    lr: float = 0.1
    collate_fn: Any = None
    twice: Any = lambda x: 2 * x

    def model(self):
        with open("workers", "a") as file:
            file.write(f"{os.getpid()}\\n")
        model = nn.Linear(3, 1, dtype=torch.float64)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 0.0)
        return model

    def data(self):
        x = torch.arange(24.0, dtype=torch.float64).reshape(8, 3) / 24
        return TensorDataset(x, self.twice(x.sum(1, keepdim=True)))

    def collate(self, samples):
        return (self.collate_fn or stack)(samples)

    def loss(self, output, targets):
        torch.ones(1 << 20).add_(1)  # would wait for ever in a fork that lacks OpenMP's threads
        return shoal.Loss(((output - targets) ** 2).sum(), len(targets))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def after(self, model, summary):
        torch.save(model.state_dict(), "rank0.pt")
"""
SETTINGS = (
    'workers=2, mesh="replicate=2", global_batch=8, steps=3, precision="fp64", kernels="default", sinks=(), out="run"'
)
CALL = f"""
found = shoal.train(Job(), {SETTINGS})
print("done", found["steps"], found["out"], flush=True)
"""
WITHOUT_FILE = {"exec": ["-c", "exec(open('text').read())"], "session": ["-"]}


def run(folder: Path, text: str, *command: str, threaded: bool = False) -> Result:
    """The script ``text``, by file name unless another command is given; OpenMP may use two threads."""
    (folder / "script.py").write_text(text)
    (folder / "text").write_text(text)
    more = {"THREADED": "1"} if threaded else {}
    return call(
        [sys.executable, *(command or ("script.py",))], folder, 90, text if command == ("-",) else None,
        OMP_NUM_THREADS="2", **more,
    )  # fmt: skip


def workers(folder: Path) -> int:
    """How many processes built the model."""
    path = folder / "workers"
    return len(set(path.read_text().split())) if path.exists() else 0


def oracle() -> dict[str, torch.Tensor]:
    """The same training in plain PyTorch, by one process."""
    x = torch.arange(24.0, dtype=torch.float64).reshape(8, 3) / 24
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.constant_(model.bias, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ((model(x) - 2 * x.sum(1, keepdim=True)) ** 2).mean().backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def assert_trained(folder: Path) -> None:
    """What the caller can take from the run's folder is rank 0's to the bit, and what one process computes."""
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    shoal.load_weights(model, folder / "run")
    first = torch.load(folder / "rank0.pt")
    for name, value in oracle().items():
        assert torch.equal(model.state_dict()[name], first[name])
        assert torch.allclose(first[name], value, rtol=1e-12, atol=1e-12)
    assert workers(folder) == 2


@pytest.mark.parametrize("threaded", [False, True])
def test_a_script_without_a_main_guard_trains_in_as_many_workers_as_asked(tmp_path: Path, threaded: bool) -> None:
    """Children ran the main script again, and started children; with threads running, forks hung for ever.

    https://github.com/pytorch/pytorch/issues/22585 https://github.com/fastai/fastai/issues/3665
    https://github.com/Lightning-AI/pytorch-lightning/issues/2092
    """
    result = run(tmp_path, JOB + CALL, threaded=threaded)
    assert result.status == 0, result.err
    assert result.out.count("done 3 run") == 1
    assert result.out.count("begin") == (3 if threaded else 1), "fresh workers load the file once each, forks never"
    assert_trained(tmp_path)
    assert (tmp_path / "run" / "run.json").read_text().count('"script.Job"') == 1


@pytest.mark.parametrize("way", WITHOUT_FILE)
def test_a_job_that_stands_in_no_file_is_trained_by_forks(tmp_path: Path, way: str) -> None:
    """Functions and data defined in cells were missing in children. https://github.com/fastai/fastai/issues/3665"""
    result = run(tmp_path, JOB + CALL, *WITHOUT_FILE[way])
    assert result.status == 0, result.err
    assert result.out.count("done 3 run") == 1 and result.out.count("begin") == 1
    assert_trained(tmp_path)


@pytest.mark.parametrize("way", WITHOUT_FILE)
def test_where_forks_would_hang_a_job_in_no_file_is_refused_before_a_worker_starts(tmp_path: Path, way: str) -> None:
    """https://github.com/fastai/fastai/issues/3665 https://github.com/pytorch/pytorch/issues/22585"""
    result = run(tmp_path, JOB + CALL, *WITHOUT_FILE[way], threaded=True)
    assert result.status == 1
    last = result.err.splitlines()[-1]
    assert "LaunchError: workers have to be started as fresh processes, since this process has run torch" in last
    assert "Job stands in no file for them to load; put it in one, say job.py" in last
    assert workers(tmp_path) == 0 and result.seconds < 20


def test_a_process_that_has_joined_a_world_does_not_fork_workers_into_it(tmp_path: Path) -> None:
    alone = f"""
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{JOB}{CALL}"""
    result = run(tmp_path, alone, *WITHOUT_FILE["exec"])
    assert result.status == 1 and workers(tmp_path) == 0
    assert "since this process has joined a world of its own" in result.err.splitlines()[-1]


def test_what_fresh_workers_cannot_be_sent_is_named_before_one_starts(tmp_path: Path) -> None:
    """Lambdas and local functions failed to pickle, deep in multiprocessing.

    https://github.com/cloneofsimo/lora/issues/38 https://github.com/claritychallenge/clarity/issues/424
    """
    result = run(tmp_path, JOB + CALL.replace("Job()", "Job(collate_fn=lambda samples: stack(samples))"), threaded=True)
    assert result.status == 1 and workers(tmp_path) == 0 and result.seconds < 20
    last = result.err.splitlines()[-1]
    assert "LaunchError" in last and "Job.collate_fn = <function <lambda>" in last and "cannot be sent" in last
    local = """
def make():
    class Inner(Job):
        pass
    return Inner()
"""
    result = run(tmp_path, JOB + local + CALL.replace("Job()", "make()"), threaded=True)
    assert result.status == 1 and workers(tmp_path) == 0
    assert "Inner is not at the top level of" in result.err.splitlines()[-1]


@pytest.mark.parametrize("threaded", [False, True])
def test_functions_of_the_script_reach_workers_and_their_loaders(tmp_path: Path, threaded: bool) -> None:
    """https://github.com/cloneofsimo/lora/issues/38 https://github.com/claritychallenge/clarity/issues/424"""
    function = "stack" if threaded else "lambda samples: stack(samples)"
    text = JOB + CALL.replace("Job()", f"Job(collate_fn={function})").replace("steps=3", "steps=3, loader_workers=1")
    result = run(tmp_path, text, threaded=threaded)
    assert result.status == 0, result.err
    assert_trained(tmp_path)


def test_the_caller_is_told_that_its_own_model_was_not_trained(tmp_path: Path) -> None:
    """Training in other processes left the caller's model unchanged, in silence.

    https://github.com/Lightning-AI/pytorch-lightning/issues/2092
    """
    text = (
        JOB
        + f"""
mine = Job().model()
os.remove("workers")

class Own(Job):
    def model(self):
        super().model()
        return mine

found = shoal.train(Own(), {SETTINGS})
assert mine.weight.tolist() == [[0.5, 0.5, 0.5]]
shoal.load_weights(mine, found["out"])
assert torch.equal(mine.weight, torch.load("rank0.pt")["weight"])
print("done")
"""
    )
    result = run(tmp_path, text)
    assert result.status == 0, result.err
    assert result.err.count("model() returned an object that the caller made") == 1
    assert "shoal.load_weights(model, 'run')" in result.err
    assert_trained(tmp_path)
    built = run(tmp_path, (JOB + CALL).replace('out="run"', 'out="other"'))
    assert "the caller made" not in built.err, "a model that workers build is nobody's"


def test_the_command_takes_a_script_that_starts_its_run_itself(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/22585"""
    (tmp_path / "script.py").write_text(JOB + CALL)
    options = ("--workers", 1, "--global-batch", 8, "--steps", 2, "--out", "run", "--kernels", "default")
    result = call(words(["train", "script.py", *options]), tmp_path, 90, OMP_NUM_THREADS="2", THREADED="1")
    assert result.status == 0, result.err
    assert "done" not in result.out and "2 steps in" in result.out
    assert workers(tmp_path) == 1


def test_a_fork_of_a_process_with_a_thread_pool_is_found_out(tmp_path: Path) -> None:
    """Forks of a process in which OpenMP's threads had run waited for them."""
    code = """
import torch
from shoal.launch.spawn import fork_runs_torch
torch.set_num_threads(2)
first = fork_runs_torch(2)
torch.ones(1 << 20).add_(1)
print(first, fork_runs_torch(2), fork_runs_torch(1))
"""
    assert call([sys.executable, "-c", code], tmp_path).out.split() == ["True", "False", "True"]


def test_an_entry_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    """https://github.com/claritychallenge/clarity/issues/424"""
    with pytest.raises(LaunchError, match=r"since cuda does not.*but <function .*<lambda>.* cannot be sent to them"):
        check_sendable(lambda world: 0, "cuda does not")
    assert fork_runs_torch(1)
