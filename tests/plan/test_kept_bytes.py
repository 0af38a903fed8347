"""Bytes kept for backward: what a profile says against what autograd keeps in a real forward and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.harness import run_ranks
from tests.zoo.families import FAMILIES, GROUPED, hugging_face
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend "fake"
from torch.utils.data import default_collate

from shoal.blueprint.facts import Blueprint
from shoal.blueprint.positions import shared_positions
from shoal.blueprint.roles import roles
from shoal.blueprint.trace import Ending, trace
from shoal.core.errors import ConfigError
from shoal.engine.precision import Precision
from shoal.parallel.pipeline.units import unit_paths
from shoal.parallel.tensor.apply import apply
from shoal.plan.from_blueprint import profile

SAMPLES, BOUND = 4, 0.01
#: As it runs by default: experts' products by groups, which the zoo's float64 has no kernel for.
MIXTRAL = hugging_face("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4)
QUICK = ("gpt2", "MLP-Mixer", "mixtral, grouped")
CELLS = [(family, precision) for family in FAMILIES for precision in ("fp32", "bf16")]
#: Families in which no layer's positions can be shared out.
UNSHARED = ("mixtral", "resnet", "MLP", "MLP-Mixer")
DIVIDED = [
    (*cell, shared)
    for cell in CELLS
    for shared in (False, True)
    if cell[0] != "U-Net" and not (shared and cell[0] in UNSHARED)
]
#: One of each mechanism: a key-value head that is repeated, packed keys and values, another attention layer, an
#: autograd function of the model's own, positions gathered through views and anew, a mask that is left out where the
#: positions that the model numbers itself are one sequence.
MECHANISMS = [
    ("llama", "fp32", False), ("phi3", "fp32", False), ("nn.Transformer", "fp32", False), ("bloom", "fp32", False),
    ("gpt2", "bf16", False), ("gpt2", "fp32", True), ("phi", "fp32", True), ("whisper", "fp32", False),
]  # fmt: skip


def traced(family: str, precision: str) -> tuple[nn.Module, Any, Any, Blueprint]:
    """The model, a micro-batch's inputs and targets, and the blueprint with its loss."""
    torch.manual_seed(0)
    case = MIXTRAL if family == "mixtral, grouped" else FAMILIES[family]
    model = case.model().train()
    inputs, targets = default_collate(case.samples()[:SAMPLES])
    with Precision(precision, "cpu").forward():  # type: ignore[arg-type]
        return model, inputs, targets, trace(model, (), inputs, SAMPLES, Ending(case.loss, targets))


def counted(model: nn.Module, run: Callable[[], Any], held: list[Tensor]) -> int:
    """Bytes of the storages that autograd keeps while ``run()`` runs; parameters, buffers and ``held`` left out."""
    known = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers(), *held]}
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # a part of a tensor would be gathered first
            storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result is not None
    return sum(storage.nbytes() for storage in kept.values())


def said(blueprint: Blueprint, units: list[str], **divided: Any) -> float:
    """A micro-batch's kept bytes by the profile."""
    made = profile(blueprint, units, **divided)
    ops = [op for block in made.blocks for op in block.ops]
    return sum(op.kept_bytes * SAMPLES + op.kept_fixed_bytes for op in ops)


def check(family: str, precision: str) -> None:
    model, inputs, targets, blueprint = traced(family, precision)
    policy = Precision(precision, "cpu")  # type: ignore[arg-type]

    def run() -> Any:
        with policy.forward():
            return FAMILIES[family.partition(",")[0]].loss(model(**inputs), targets)

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


@pytest.mark.unit
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_by_groups_count_as_those_that_take_each_row_apart(precision):
    """A Mixtral could not be traced in float32: torch knows grouped products of bfloat16 alone.

    https://github.com/pytorch/pytorch/issues/172440
    """
    grouped, apart = (traced(family, precision)[3] for family in ("mixtral, grouped", "mixtral"))
    assert grouped.flops() == apart.flops()
    steps = []
    for blueprint in (grouped, apart):
        made = profile(blueprint, ["model.layers.0", "model.layers.1"])
        steps.append([sum(op.flops * (1 + op.backward) for op in block.ops) for block in made.blocks])
    assert steps[0] == steps[1]
    products = [op for op in grouped.operations if op.name == "_grouped_mm"]
    assert len(products) == 4 and all(any(touch.product_backward for touch in op.touches) for op in products)


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


@contextmanager
def fake_ranks(number: int) -> Iterator[DeviceMesh]:
    """A tensor group of which the first rank is here."""
    dist.init_process_group("fake", rank=0, world_size=number, store=dist.HashStore())
    try:
        yield init_device_mesh("cpu", (number,), mesh_dim_names=("tensor",))
    finally:
        dist.destroy_process_group()


def check_divided(family: str, precision: str, sequence_parallel: bool, degree: int = 2) -> None:
    model, inputs, targets, blueprint = traced(family, precision)
    policy, found = Precision(precision, "cpu"), roles(blueprint, degree)  # type: ignore[arg-type]
    foretold = said(blueprint, unit_paths(model), tensor=degree, sequence_parallel=sequence_parallel)
    positions = shared_positions(blueprint, found).layers if sequence_parallel else {}

    def run() -> Any:
        with policy.forward():
            return FAMILIES[family].loss(model(**inputs), targets)

    with fake_ranks(degree) as mesh:
        apply(model, blueprint, found, mesh, positions)
        real = counted(model, run, [])
    print(f"[{family} {precision} {sequence_parallel}: {foretold:.0f} said, {real} kept, {foretold / real - 1:+.2%}]")
    assert abs(foretold / real - 1) < BOUND, (foretold, real)


@pytest.mark.unit
@pytest.mark.parametrize(("family", "precision", "sequence_parallel"), MECHANISMS)
def test_what_runs_on_parts_keeps_what_the_profile_says(family, precision, sequence_parallel):
    check_divided(family, precision, sequence_parallel)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "precision", "sequence_parallel"), DIVIDED)
def test_kept_bytes_on_a_tensor_rank_of_every_family(family, precision, sequence_parallel):
    check_divided(family, precision, sequence_parallel)


@pytest.mark.nightly
@pytest.mark.parametrize("family", UNSHARED)
def test_positions_that_cannot_be_shared_out_are_refused(family):
    with pytest.raises(ConfigError, match="positions of no layer's output can be shared out over tensor=2"):
        check_divided(family, "fp32", True)


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


class Masked(nn.Module):
    """Attention with a mask made for every sample, from shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mask = torch.zeros(x.shape[0], 1, x.shape[1], x.shape[1]).masked_fill(later, -1e9)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)


@pytest.mark.unit
def test_a_mask_made_for_every_sample_grows_with_the_micro_batch():
    model, traced_with, run_with = Masked().train(), 2, 6
    few, x = (torch.zeros(samples, 16, 8) for samples in (traced_with, run_with))
    blueprint = trace(model, (few,), {}, traced_with, Ending(lambda y, _: y.square().sum(), None))
    ops = [op for block in profile(blueprint, ["qkv"]).blocks for op in block.ops]
    foretold = sum(op.kept_bytes * run_with + op.kept_fixed_bytes for op in ops)
    assert foretold == counted(model, lambda: model(x).square().sum(), [])


class Feed(nn.Module):
    """A column and a row layer, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x).relu())).relu()


@pytest.mark.unit
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tensor_rank_keeps_its_part_of_a_mask_and_a_row_layers_output_in_its_own_type(precision):
    """The mask is drawn for all ranks, and a bias in float32 must not widen what it is added to."""
    model, x = Feed().train(), torch.zeros(SAMPLES, 8, 16)
    policy = Precision(precision, "cpu")
    with policy.forward():
        blueprint = trace(model, (x,), {}, SAMPLES, Ending(lambda y, _: y.float().sum(), None))
    foretold = said(blueprint, ["up", "drop", "down"], tensor=2)

    def run() -> Any:
        with policy.forward():
            return model(x).float().sum()

    with fake_ranks(2) as mesh:
        apply(model, blueprint, roles(blueprint, 2), mesh)
        assert counted(model, run, []) == foretold
