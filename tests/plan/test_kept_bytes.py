"""Bytes kept for backward: what a profile says against what autograd keeps in a real forward and loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.harness import run_ranks
from tests.zoo.families import FAMILIES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import default_collate

from shoal.blueprint.facts import Blueprint
from shoal.blueprint.roles import roles
from shoal.blueprint.trace import Ending, trace
from shoal.engine.precision import Precision
from shoal.parallel.pipeline.units import unit_paths
from shoal.parallel.tensor.apply import apply
from shoal.plan.from_blueprint import profile

SAMPLES, BOUND = 4, 0.01
QUICK = ("gpt2", "MLP-Mixer")
DIVIDED = ("olmo", "phi", "mixtral", "gpt_neox", "opt", "bert", "distilbert", "t5", "vit", "MLP", "MLP-Mixer")
CELLS = [(family, precision) for family in FAMILIES for precision in ("fp32", "bf16")]


def traced(family: str, precision: str) -> tuple[nn.Module, Any, Any, Blueprint]:
    """The model, a micro-batch's inputs and targets, and the blueprint with its loss."""
    torch.manual_seed(0)
    case = FAMILIES[family]
    model = case.model().train()
    inputs, targets = default_collate(case.samples()[:SAMPLES])
    with Precision(precision, "cpu").forward():  # type: ignore[arg-type]
        return model, inputs, targets, trace(model, (), inputs, SAMPLES, Ending(case.loss, targets))


def counted(model: nn.Module, run: Callable[[], Any], held: list[Tensor]) -> int:
    """Bytes of the storages that autograd keeps while ``run()`` runs; parameters, buffers and ``held`` left out."""
    known = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers(), *held]}
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result is not None
    return sum(storage.nbytes() for storage in kept.values())


def said(blueprint: Blueprint, units: list[str], tensor: int = 1) -> float:
    """A micro-batch's kept bytes by the profile."""
    made = profile(blueprint, units, tensor=tensor)
    ops = [op for block in made.blocks for op in block.ops]
    return sum(op.kept_bytes * SAMPLES + op.kept_fixed_bytes for op in ops)


def check(family: str, precision: str) -> None:
    model, inputs, targets, blueprint = traced(family, precision)
    policy = Precision(precision, "cpu")  # type: ignore[arg-type]

    def run() -> Any:
        with policy.forward():
            return FAMILIES[family].loss(model(**inputs), targets)

    found, real = said(blueprint, unit_paths(model)), counted(model, run, [])
    print(f"[{family} {precision}: {found:.0f} bytes said, {real} kept, {found / real - 1:+.3%}]", end=" ")
    assert abs(found / real - 1) < BOUND


@pytest.mark.unit
@pytest.mark.parametrize("family", QUICK)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kept_bytes_are_those_of_a_real_forward_and_loss(family, precision):
    """An estimate that leaves out activations, or that knows one architecture's, lets the run fail.

    https://github.com/deepspeedai/DeepSpeed/issues/2302
    """
    check(family, precision)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "precision"), CELLS)
def test_kept_bytes_of_every_family(family, precision):
    check(family, precision)


def on_tensor_ranks(family: str) -> None:
    """Two ranks of a tensor group, each with its part of the model."""
    _, _, _, blueprint = traced(family, "fp32")
    units = unit_paths(FAMILIES[family].model())

    def rank(number: int) -> int:
        model, inputs, targets, found = traced(family, "fp32")
        apply(model, found, roles(found, 2), init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
        return counted(model, lambda: FAMILIES[family].loss(model(**inputs), targets), [])

    found = said(blueprint, units, tensor=2)
    for real in run_ranks(rank, 2, timeout_s=120):
        print(f"[{family}, tensor=2: {found:.0f} said, {real} kept, {found / real - 1:+.2%}]", end=" ")
        assert abs(found / real - 1) < BOUND, (found, real)


@pytest.mark.ranks
def test_kept_bytes_on_a_tensor_rank():
    on_tensor_ranks("gpt2")


@pytest.mark.nightly
@pytest.mark.parametrize("family", DIVIDED)
def test_kept_bytes_on_a_tensor_rank_of_a_family(family):
    on_tensor_ranks(family)


class Attending(nn.Module):
    """A norm, an attention with dropout and a product; [B, T, 32] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.unit
def test_a_gpu_keeps_what_its_kernels_are_stated_to_keep():
    """Flash attention removes the 5as/h of eager attention and leaves a logsumexp; norms and dropout masks are smaller.

    Korthikanti et al., https://arxiv.org/abs/2205.05198
    """
    model, batch, length = Attending().train(), 2, 64
    x = torch.zeros(batch, length, 32)
    blueprint = trace(model, (x,), {}, batch, Ending(lambda y, _: y.square().sum(), x))
    tokens, heads = batch * length, 4
    kept = {}
    for kernels in ("cpu", "cuda-flash", "cuda-math"):
        made = profile(blueprint, ["norm", "qkv", "out", "drop"], kernels=kernels)
        ops = {op.name: op.kept_bytes * batch for block in made.blocks for op in block.ops}
        kept[kernels] = ops
        held = sum(block.holding.kept[0] for block in made.blocks if block.holding) * batch
        every = sum(op.kept_bytes for block in made.blocks for op in block.ops) * batch
        assert held == pytest.approx(every, rel=0.01), "the timeline keeps the same"
    assert kept["cuda-flash"]["dropout"] == tokens * 32 < kept["cpu"]["dropout"]
    assert kept["cuda-flash"]["rms_norm"] == tokens * 32 * 4 + tokens * 4
    flash, maths = (kept[k]["scaled_dot_product_attention"] for k in ("cuda-flash", "cuda-math"))
    assert flash == tokens * (96 + 32) * 4 + 4 * heads * tokens
    assert maths == tokens * (96 + 32) * 4 + 4 * heads * length * tokens
