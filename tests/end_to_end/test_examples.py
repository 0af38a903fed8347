"""Each example runs, at a size that tells only that it works."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import EXAMPLES, Result, call, losses, rows, saved, shoal

pytestmark = pytest.mark.ranks

GPT = (
    "width=16", "layers=1", "context=16", "warmup=1", "eval_sequences=8", "sample_bytes=8", "--steps", 4,
    "--global-batch", 4, "--eval-every", 2, "--workers", 2,
)  # fmt: skip
VIT = ("width=16", "layers=1", "heads=2", "patch=4", "--epochs", 1, "--workers", 2, "--json")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    """All examples' commands, two at a time."""
    folder = tmp_path_factory.mktemp("examples")
    own = str(EXAMPLES / "own_loop.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", own]
    with ThreadPoolExecutor(2) as pool:
        running = {
            "gpt": pool.submit(shoal, "train", EXAMPLES / "gpt.py", *GPT, "--out", "gpt", cwd=folder, fresh=True),
            "vit": pool.submit(shoal, "train", EXAMPLES / "vit.py", *VIT, "--out", "vit", cwd=folder),
            "alone": pool.submit(call, [sys.executable, own, "--epochs", "1", "--out", "alone"], folder, fresh=True),
            "torchrun": pool.submit(call, [*torchrun, "--epochs", "1", "--out", "torchrun"], folder, fresh=True),
        }
    found = {name: future.result() for name, future in running.items()}
    for name, result in found.items():
        assert result.status == 0, f"{name}: {result.err}"
    return folder, found


def test_gpt_learns_from_text_and_ends_by_writing_some(results: tuple[Path, dict[str, Result]]) -> None:
    folder, found = results
    assert len(rows(folder / "gpt", "eval")) == 2
    assert 4 < rows(folder / "gpt", "eval")[-1]["loss"] < 6
    assert rows(folder / "gpt")[-1]["tokens"] > 0
    assert "def " in found["gpt"].out
    assert "Traceback" not in found["gpt"].err
    assert list((folder / "gpt" / "tensorboard").glob("events.*"))


def test_vit_reports_the_accuracy_on_held_out_images(results: tuple[Path, dict[str, Result]]) -> None:
    _, found = results
    summary = json.loads(found["vit"].out.splitlines()[-1])
    assert 0 < summary["metrics"]["accuracy"] <= 1
    assert summary["eval"] > 0


def test_own_loop_is_the_same_under_torchrun(results: tuple[Path, dict[str, Result]]) -> None:
    folder, found = results
    assert len(losses(folder / "alone")) == 32
    assert losses(folder / "torchrun") == pytest.approx(losses(folder / "alone"), rel=1e-5)
    for name in ("alone", "torchrun"):
        assert "step 32: loss" in found[name].out
        assert re.search(r"held out: \{'loss': 0\.\d+", found[name].out)
        assert saved(folder / name)[1]["step"] == 32


@pytest.mark.parametrize(
    ("example", "sizes", "mesh"),
    [
        ("hf_llama.py", ("layers=2", "width=16", "heads=2", "context=16"), "pipeline=2"),
        ("burgers.py", ("samples=32", "held_out=8", "width=8", "layers=2"), "shard=2"),
    ],
)
def test_examples_compute_the_same_under_a_mesh(
    tmp_path: Path, example: str, sizes: tuple[str, ...], mesh: str
) -> None:
    words = ("--mesh", mesh, "--steps", "2", "--global-batch", "8", "--json")
    result = shoal("verify", EXAMPLES / example, *sizes, *words, cwd=tmp_path)
    assert result.status == 0, result.err
    (found,) = json.loads(result.out.splitlines()[-1])["layouts"]
    assert found["status"] == "equal"
    assert found["split"][mesh.partition("=")[0]] > 0.9
