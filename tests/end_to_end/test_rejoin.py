"""A worker that was killed and started again reads on where its peers are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import Result, rows, shoal

pytestmark = pytest.mark.ranks

JOB = '''
import os, signal, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shoal


class Stream:
    """Numbers in two shards, each with a position of its own."""

    num_shards = 2

    def __init__(self, numbers):
        self.numbers, self.read = numbers, 0

    def shard(self, num_shards, index):
        return Stream(self.numbers[index::num_shards])

    def __iter__(self):
        for number in self.numbers[self.read :]:
            self.read += 1
            yield torch.tensor([float(number)]), torch.tensor(number)
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


class Job(shoal.Job):
    """Writes down which samples each rank takes; rank 1 kills itself once, in step 4."""

    stream: bool = False
    kill: bool = False
    name: str = ""

    def model(self):
        return nn.Linear(1, 1)

    def data(self):
        self.note("start")
        if self.stream:
            return Stream(list(range(80)))
        numbers = torch.arange(80)
        return torch.utils.data.TensorDataset(numbers[:, None].float(), numbers)

    def note(self, text):
        """Add a line to this rank's file; returns the number of lines."""
        path = Path(f"{self.name}.{dist.get_rank()}.txt")
        with path.open("a") as file:
            file.write(text + "\\n")
        return len(path.read_text().splitlines())

    def loss(self, output, targets):
        count = self.note(" ".join(str(number) for number in targets.tolist()))
        if self.kill and dist.get_rank() == 1 and count == 1 + 2 * 3 + 1 and not Path(f"{self.name}.killed").exists():
            Path(f"{self.name}.killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return shoal.Loss((output[:, 0] - targets / 80).square().sum(), len(targets))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-4)
'''

RUN = (
    "--workers", 2, "--global-batch", 8, "--micro-batch", 2, "--save-every", 1, "--epochs", 1, "--restarts", 1,
    "--kernels", "default",
)  # fmt: skip


def taken(folder: Path, name: str, rank: int) -> list[list[str]]:
    """The samples of each step that a rank took since it was started last; two micro-batches a step."""
    lines = (folder / f"{name}.{rank}.txt").read_text().splitlines()
    last = lines[len(lines) - lines[::-1].index("start") :]
    return [last[at : at + 2] for at in range(0, len(last), 2)]


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_a_worker_that_was_killed_reads_on_where_its_peers_are(tmp_path, kind):
    """It was one batch behind its peers, and hung at the end of the data.

    https://github.com/meta-pytorch/torchft/issues/309
    """
    (tmp_path / "reads.py").write_text(JOB)

    def run(name: str) -> Result:
        words = (f"stream={kind == 'stream'}", f"kill={name == 'killed'}", f"name={name}", "--out", f"{name}_run")
        return shoal("train", "reads.py", *words, *RUN, cwd=tmp_path, timeout_s=60)

    with ThreadPoolExecutor(2) as pool:
        clean, killed = pool.map(run, ("clean", "killed"))
    assert clean.status == 0, clean.err
    assert killed.status == 0, killed.err
    assert "was killed by signal 9 (SIGKILL)" in killed.err and "restart 1 of 1" in killed.err
    [at] = [row["step"] for row in rows(tmp_path / "killed_run", "run") if row["restart"] == 1]
    assert 1 <= at <= 3
    for rank in (0, 1):
        whole = taken(tmp_path, "clean", rank)
        assert len(whole) == 10
        assert taken(tmp_path, "killed", rank) == whole[at:]
    assert [row["step"] for row in rows(tmp_path / "killed_run")] == list(range(1, 11))
