"""Runs the real command in a process of its own, on a job small enough that starting it costs more than training.

Processes start warm (``tests.warm``) unless ``fresh`` is asked for or the interpreter is given options of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.warm import Command

from shoal.checkpoint.reader import Reader, newest_good

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

JOB = '''
import errno, os, signal, time
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.checkpoint.files import FileSystem


def fill_disk(step):
    """Rank 1's shard of ``step`` finds no space."""
    write = FileSystem.write

    def full(self, descriptor, data):
        if f"/step-{step}.partial/shard-00001" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, descriptor, data)

    FileSystem.write = full


def samples(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


class Job(shoal.Job):
    """A small MLP; ``fault`` says what goes wrong at rank 1's (or the only rank's) loss number ``at``."""

    width: int = 8
    lr: float = 1e-2
    dropout: float = 0.0
    size: int = 60
    warmup: int = 2
    held_out: int = 0
    fault: str = ""
    at: int = 4
    marker: str = ""
    slow: float = 0.0
    slow_eval: float = 0.0
    _calls: ClassVar[list] = []

    def model(self):
        return nn.Sequential(
            nn.Linear(4, self.width), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(self.width, 1)
        )

    def data(self):
        return samples(self.size, 1)

    def eval_data(self):
        return samples(self.held_out, 2) if self.held_out else None

    def optimizer(self, model):
        if self.fault == "full disk":
            fill_disk(self.at)
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def lr_schedule(self, optimizer, steps):
        return shoal.warmup_cosine(self.warmup, steps) if self.warmup else None

    def loss(self, output, targets):
        error = ((output - targets) ** 2).sum()
        if not torch.is_grad_enabled():
            if self.slow_eval:
                Path(self.marker).touch()
                time.sleep(self.slow_eval)
            return shoal.Loss(error, len(targets))
        time.sleep(self.slow)
        self._calls.append(1)
        return self.faulty(error, output, targets)

    def faulty(self, error, output, targets):
        if self.fault == "vector":
            return output - targets
        if self.fault == "negative":
            return shoal.Loss(error, -len(targets))
        if self.fault == "infinite":
            return shoal.Loss(error, float("inf"))
        if self.fault == "nan":
            return shoal.Loss(error * float("nan"), len(targets))
        if dist.get_rank() == dist.get_world_size() - 1 and len(self._calls) == self.at:
            if self.fault == "nan once":
                return shoal.Loss(error * float("nan"), len(targets))
            if self.fault == "mixed":
                dist.broadcast(torch.zeros(3), dist.get_rank())
            if self.fault == "raise":
                raise ValueError("the user's own mistake")
            if self.fault == "kill" and not Path(self.marker).exists():
                Path(self.marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return shoal.Loss(error, len(targets))

    def after(self, model, summary):
        if self.marker.endswith(".pt"):
            model.eval()
            torch.set_num_threads(1)
            with torch.no_grad():
                torch.save(model(samples(8, 3).tensors[0]), self.marker)
'''


@dataclass(frozen=True)
class Result:
    """What a command left: exit status, both streams, and how long it took."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def summary(self) -> dict[str, Any]:
        """The object that ``--json`` prints as the last line."""
        return json.loads(self.out.splitlines()[-1])


def write_job(folder: Path) -> Path:
    """The job's file in ``folder``."""
    path = folder / "tiny.py"
    path.write_text(JOB)
    return path


def words(args: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "shoal", *map(str, args)]


def environment() -> dict[str, str]:
    """Ours, without a world that a test before this one may have set up."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {**{name: value for name, value in os.environ.items() if name not in drop}, "CUDA_VISIBLE_DEVICES": ""}


def call(
    command: Sequence[str],
    cwd: Path,
    timeout_s: float = 60,
    given: str | None = None,
    fresh: bool = False,
    **variables: str,
) -> Result:
    """Run ``command`` to its end; ``given`` is its standard input, ``variables`` go into its environment."""
    started = time.monotonic()
    process = _start(command, cwd, subprocess.DEVNULL if given is None else subprocess.PIPE, fresh, variables)
    try:
        out, err = process.communicate(given, timeout_s)
    finally:
        process.kill()
    return Result(process.returncode, out, err, time.monotonic() - started)


def shoal(*args: object, cwd: Path, timeout_s: float = 60, fresh: bool = False) -> Result:
    """Run the ``shoal`` command to its end."""
    return call(words(args), cwd, timeout_s, fresh=fresh)


def start(*args: object, cwd: Path, fresh: bool = False) -> subprocess.Popen[str]:
    """Start the ``shoal`` command and go on."""
    return _start(words(args), cwd, None, fresh, {})


def _start(
    command: Sequence[str], cwd: Path, given: int | None, fresh: bool, variables: dict[str, str]
) -> subprocess.Popen[str]:
    pipe, env = subprocess.PIPE, {**environment(), **variables}
    warm = not fresh and command[0] == sys.executable and command[1] != "-X"
    kind = Command if warm else subprocess.Popen
    return kind(command, cwd=cwd, env=env, stdin=given, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str], timeout_s: float = 30) -> Result:
    """Wait for what ``start`` started; kills it when it takes too long."""
    started = time.monotonic()
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return Result(process.returncode, out, err, time.monotonic() - started)


def until(true: Callable[[], Any], timeout_s: float = 30, what: str = "it") -> None:
    """Wait until ``true()``."""
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, f"{what} did not happen in {timeout_s} s"
        time.sleep(0.02)


def rows(out: Path, kind: str = "step", rank: int = 0) -> list[dict[str, Any]]:
    """A rank's event rows of one kind; a line that is still being written is left out."""
    path = out / "events" / f"rank-{rank:05d}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def losses(out: Path, first: int = 1) -> list[float]:
    """The losses by step, from step ``first`` on; each step must stand there once."""
    found = [(row["step"], row["loss"]) for row in rows(out)]
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    return [loss for step, loss in found if step >= first]


def saved(out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors and values of the newest good checkpoint."""
    found, skipped = newest_good(out / "checkpoints")
    assert found and not skipped
    reader = Reader(found.path)
    return {name: reader.read(name) for name in reader.names()}, reader.values


def assert_same_bits(one: Path, other: Path) -> None:
    """Both runs ended with the same state to the last bit, and took the same steps with the same losses and rates."""
    (tensors, values), (tensors_other, values_other) = saved(one), saved(other)
    assert tensors.keys() == tensors_other.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, tensors_other[name]), name
    assert values == values_other
    keys = ("step", "epoch", "loss", "grad_norm", "lr", "count")
    assert [[row[key] for key in keys] for row in rows(one)] == [[row[key] for key in keys] for row in rows(other)]


def children(pid: int) -> list[int]:
    """The processes that ``pid`` has started and that live."""
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def processes_of(text: str) -> list[int]:
    """Live processes with ``text`` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if text in (path / "cmdline").read_text() and state != "Z" and int(path.name) != os.getpid():
                found.append(int(path.name))
        except OSError:
            continue
    return found
