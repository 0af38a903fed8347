"""Weights leave a run under the model's own names, and begin another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import Result, saved, shoal, write_job
from safetensors.torch import load_file
from torch import nn

from shoal.models.gpt import GPT

pytestmark = pytest.mark.ranks

LANGUAGE_JOB = '''
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.models.gpt import GPT


class Job(shoal.Job):
    """A tiny language model whose output shares its input's weights."""

    def model(self):
        return GPT(11, 8, 1, 2, 6, tied=True)

    def data(self):
        ids = torch.arange(8 * 7).reshape(8, 7) % 11
        return TensorDataset(ids[:, :-1], ids[:, 1:])

    def loss(self, output, targets):
        return shoal.Loss(F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def after(self, model, summary):
        model.eval()
        torch.set_num_threads(1)
        with torch.no_grad():
            torch.save(model(torch.arange(6)[None]), "language.pt")
'''


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are in the order that the job's own output was computed in."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TRAIN = ("--workers", 2, "--global-batch", 8, "--kernels", "default")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, of the MLP and of the language model, and their exports."""
    folder = tmp_path_factory.mktemp("weights")
    write_job(folder)
    (folder / "language.py").write_text(LANGUAGE_JOB)

    def make(words: tuple[object, ...]) -> Result:
        result = shoal("train", words[0], *TRAIN, *words[1:], cwd=folder)
        assert result.status == 0, result.err
        exported = shoal("checkpoint", "export", words[-1], "--to", f"{words[-1]}_exported", cwd=folder)
        assert exported.status == 0, exported.err
        assert exported.out.strip() == f"{words[-1]}_exported/model.safetensors"
        return result

    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                make,
                [
                    ("tiny.py", "marker=mlp.pt", "--steps", 8, "--save-every", 4, "--out", "mlp"),
                    ("language.py", "--steps", 5, "--out", "language"),
                ],
            )
        )
    return folder


def test_an_export_is_the_plain_model(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1))
    model.load_state_dict(load_file(folder / "mlp_exported" / "model.safetensors"))
    model.eval()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(model(x), torch.load(folder / "mlp.pt"))
    assert json.loads((folder / "mlp_exported" / "export.json").read_text())["step"] == 8


def test_an_export_writes_tied_weights_once(folder: Path) -> None:
    tensors = load_file(folder / "language_exported" / "model.safetensors")
    facts = json.loads((folder / "language_exported" / "export.json").read_text())
    assert facts["tied"] == {"head.weight": "tokens.weight"} and "head.weight" not in tensors
    model = GPT(11, 8, 1, 2, 6, tied=True)
    assert model.load_state_dict(tensors, strict=False).unexpected_keys == []
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(torch.arange(6)[None]), torch.load(folder / "language.pt"))


def test_list_and_verify_tell_good_checkpoints_from_broken_ones(folder: Path) -> None:
    listed = shoal("checkpoint", "list", "mlp", cwd=folder)
    assert listed.status == 0
    assert [line.split()[:2] for line in listed.out.splitlines()] == [["step", "8"], ["step", "4"]]
    verified = shoal("checkpoint", "verify", "language", cwd=folder)
    assert (verified.status, verified.out) == (0, "step 5  good\n")
    shard = folder / "mlp" / "checkpoints" / "step-4" / "shard-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    verified = shoal("checkpoint", "verify", "mlp", cwd=folder)
    assert verified.status == 1
    assert "step 8  good" in verified.out and "step 4  good" not in verified.out and shard.name in verified.out


def test_init_from_takes_the_weights_and_nothing_else(folder: Path) -> None:
    """With a rate of zero they stay what they were: from a run's folder and from an exported file alike."""
    words = ("train", "tiny.py", "lr=0", "--steps", 1, *TRAIN, "--init-from")
    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(shoal, *words, "mlp", "--out", "from_run", cwd=folder),
            pool.submit(shoal, *words, "mlp_exported/model.safetensors", "--out", "from_file", cwd=folder),
            pool.submit(shoal, *words, "language", "--out", "from_other", cwd=folder),
        ]
    weights = load_file(folder / "mlp_exported" / "model.safetensors")
    for run, out in zip(runs[:2], ("from_run", "from_file"), strict=True):
        assert run.result().status == 0, run.result().err
        tensors, values = saved(folder / out)
        assert values["step"] == 1
        for name, tensor in weights.items():
            assert torch.equal(tensors[f"model/{name}"], tensor)
    other = runs[2].result()
    assert other.status == 1 and "of another model" in other.err and "0.weight" in other.err
