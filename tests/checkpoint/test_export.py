"""Exported weights: the asked dtype, the model's own names, tied tensors once."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from saving import save, state, writers
from torch import nn

from shoal.checkpoint import export, list_checkpoints, verify_checkpoints
from shoal.checkpoint.files import FileSystem
from shoal.core.errors import CheckpointError

pytestmark = pytest.mark.unit


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 37, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids))))


def saved(run, tensors, ranks: int = 2, step: int = 3, **values):
    save(writers(run / "checkpoints", ranks), step, tensors, **values)
    return run


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64", torch.bfloat16])
def test_export_has_the_dtype_that_was_asked(tmp_path, dtype):
    """https://github.com/instructlab/training/issues/477"""
    tensors = {"model/master": torch.randn(9, 5), "model/scale": torch.randn(3).bfloat16(), "model/n": torch.tensor(7)}
    path = export(saved(tmp_path, tensors), tmp_path / "to", dtype=dtype)
    real = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(dtype, torch.bfloat16)
    found = load_file(path)
    assert {name: tensor.dtype for name, tensor in found.items()} == {"master": real, "scale": real, "n": torch.int64}
    for name, tensor in found.items():
        own = tensors[f"model/{name}"]
        assert torch.equal(tensor, own.to(real) if own.is_floating_point() else own)
    facts = json.loads((tmp_path / "to" / "export.json").read_text())
    assert facts["dtype"] == str(real).removeprefix("torch.") and facts["step"] == 3


def test_export_without_dtype_keeps_each_tensors_own(tmp_path):
    """https://github.com/huggingface/transformers/issues/33780"""
    path = export(saved(tmp_path, state(2.0)), tmp_path / "to")
    found = load_file(path)
    own = {name.removeprefix("model/"): t for name, t in state(2.0).items() if name.startswith("model/")}
    assert found.keys() == own.keys()
    assert all(found[name].dtype == own[name].dtype and torch.equal(found[name], own[name]) for name in own)
    assert json.loads((tmp_path / "to" / "export.json").read_text())["dtype"] == ["bfloat16", "float32"]


@pytest.mark.parametrize("tied", [True, False])
def test_export_reloads_into_the_plain_model_with_equal_logits(tmp_path, tied):
    """https://github.com/huggingface/accelerate/issues/2155"""
    torch.manual_seed(0)
    model = Tied(tied)
    tensors = {f"model/{name}": tensor.detach() for name, tensor in model.named_parameters()}  # tied ones once
    links = {"head.weight": "embed.weight"} if tied else {}
    path = export(saved(tmp_path, tensors, tied=links), tmp_path / "to")
    found = load_file(path)
    with safe_open(path, "pt") as file:
        recorded = json.loads(file.metadata().get("tied", "{}"))
    assert recorded == links and set(found) == {name.removeprefix("model/") for name in tensors}
    assert json.loads((tmp_path / "to" / "export.json").read_text())["tied"] == links
    torch.manual_seed(1)
    plain = Tied(tied)
    whole = {**found, **{other: found[first] for other, first in recorded.items()}}
    plain.load_state_dict(whole)
    assert all(whole[name].shape == tensor.shape for name, tensor in model.state_dict().items())
    ids = torch.arange(37)
    assert torch.equal(plain(ids), model(ids))
    assert (plain.head.weight is plain.embed.weight) == tied


def test_averaged_weights_take_the_place_of_the_trained(tmp_path):
    tensors = {"model/w": torch.ones(3), "model/count": torch.tensor(4), "ema/w": torch.full((3,), 0.5)}
    run = saved(tmp_path, tensors)
    assert torch.equal(load_file(export(run, tmp_path / "a"))["w"], torch.ones(3))
    found = load_file(export(run, tmp_path / "b", ema=True))
    assert torch.equal(found["w"], torch.full((3,), 0.5)) and found["count"] == 4


def test_export_takes_the_newest_good_or_the_step_asked(tmp_path):
    group = writers(tmp_path / "checkpoints", 1)
    for step in (1, 2):
        save(group, step, {"model/w": torch.tensor([float(step)])})
    assert load_file(export(tmp_path, tmp_path / "to", step=1))["w"] == 1
    shard = next((tmp_path / "checkpoints" / "step-2").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    assert load_file(export(tmp_path, tmp_path / "to"))["w"] == 1
    assert [found.problem is None for found in list_checkpoints(tmp_path)] == [True, True]
    assert [found.problem is None for found in verify_checkpoints(tmp_path)] == [False, True]
    with pytest.raises(CheckpointError, match="cannot export step 2 .*its checksum differs"):
        export(tmp_path, tmp_path / "to", step=2)
    with pytest.raises(CheckpointError, match="cannot export step 8 .*no such checkpoint; saved: 2, 1"):
        export(tmp_path, tmp_path / "to", step=8)


def test_what_cannot_be_exported_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="holds no run: it has no folder 'checkpoints'"):
        list_checkpoints(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no good checkpoint to export: none was saved"):
        export(tmp_path, tmp_path / "to")
    saved(tmp_path, {"optimizer/x": torch.ones(1)}, ranks=1, step=1)
    with pytest.raises(CheckpointError, match="holds no weights to export"):
        export(tmp_path, tmp_path / "to")
    saved(tmp_path, {"model/x": torch.ones(1)}, ranks=1, step=2)
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        export(tmp_path, tmp_path / "to", ema=True)
    with pytest.raises(CheckpointError, match="cannot export as 'bf61': did you mean 'bf16'"):
        export(tmp_path, tmp_path / "to", dtype="bf61")


def test_failed_export_leaves_the_earlier_file(tmp_path):
    class Full(FileSystem):
        def write(self, descriptor: int, data: bytes | memoryview) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = saved(tmp_path, {"model/x": torch.ones(1)})
    before = export(run, tmp_path / "to").read_bytes()
    with pytest.raises(CheckpointError, match=r"cannot export to .*No space left.*needs \d+ bytes"):
        export(run, tmp_path / "to", files=Full())
    assert (tmp_path / "to" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["export.json", "model.safetensors"]
