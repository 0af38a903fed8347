"""Saved and taken up under layouts in which ranks hold parts of the model: every tensor exactly equal."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shoal.checkpoint import Reader, Writer, export, newest_good
from shoal.checkpoint.layout import read_header
from shoal.core.errors import CheckpointError
from shoal.engine.average import WeightAverage
from shoal.engine.held import Held, Packed, Span
from shoal.engine.optimizer import NamedOptimizer
from shoal.engine.state import collect, model_tensors, restore
from shoal.engine.weights import load_weights
from shoal.plan.mesh import AXES, Mesh
from shoal.plan.ranks import coordinates

pytestmark = pytest.mark.ranks

MESHES = {
    str(mesh): mesh
    for mesh in (
        Mesh(replicate=4),
        Mesh(shard=4),
        Mesh(tensor=4),
        Mesh(replicate=2, shard=2),
        Mesh(shard=2, tensor=2),
        Mesh(replicate=2, tensor=2),
        Mesh(pipeline=2, tensor=2),
        Mesh(pipeline=2, shard=2),
        Mesh(pipeline=2, replicate=2),
    )
}
PARTS = {"qkv.weight": (0, (8, 8, 8)), "qkv.bias": (0, (8, 8, 8)), "out.weight": (1, (8,))}
TIED = {"head.weight": "embed.weight"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.few = nn.Parameter(torch.randn(2, 3))  # fewer rows than ranks
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("seen", torch.randint(99, ()))
        self.register_buffer("mask", torch.rand(5, 5) > 0.5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight


@cache
def trained(seed: int):
    """The whole model, after two steps on the gradients of nothing in particular."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    return model, optimizer, WeightAverage(model, 0.9)


def packed(mesh: Mesh, place: int) -> dict[str, Packed]:
    found = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in Net().state_dict().items()}
    for name, shape in shapes.items():
        for suffix, (dim, sizes) in PARTS.items():
            if mesh.tensor > 1 and name.endswith(suffix):
                spans, whole, own = [], 0, 0
                for size in sizes:
                    share = size // mesh.tensor
                    spans.append(Span(whole + place * share, own, share))
                    whole, own = whole + size, own + share
                found[name] = Packed(shape, dim, tuple(spans))
    return found


class Placing:
    """Tensors as a rank of the mesh holds them; written without the code that is tested."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.at = mesh, coordinates(mesh, rank)
        self.devices = init_device_mesh("cpu", tuple(mesh.degrees.values()), mesh_dim_names=AXES)
        self.rows = self.devices["replicate", "shard"] if mesh.replicate > 1 else self.devices["shard"]
        self.held = Held(
            mesh,
            rank,
            packed=packed(mesh, self.at.tensor),
            stages={"embed.weight": (0, 1)} if mesh.pipeline > 1 else {},
            tied=TIED if mesh.pipeline > 1 else {},
        )

    def here(self, name: str) -> bool:
        return self.mesh.pipeline == 1 or self.at.pipeline == int("blocks.1" in name or "head" in name)

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().clone()
        if not self.here(name):
            return tensor.to("meta")
        for suffix, (dim, sizes) in PARTS.items():
            if self.mesh.tensor > 1 and name.endswith(suffix) and tensor.ndim:
                tensor = torch.cat(
                    [part.chunk(self.mesh.tensor, dim)[self.at.tensor] for part in tensor.split(sizes, dim)], dim
                )
        if self.mesh.shard > 1 and tensor.ndim and "mask" not in name:
            placements = [Replicate(), Shard(0)][-self.rows.ndim :]
            return distribute_tensor(tensor, self.rows, placements, src_data_rank=None)
        return tensor

    def run(self, seed: int) -> SimpleNamespace:
        """What saving and loading see of a run of the model that ``trained(seed)`` gives."""
        whole, optimizer, average = trained(seed)
        model = Net()
        names = [name for name, _ in whole.named_parameters()]
        if self.mesh.pipeline > 1:
            names.append("head.weight")
        params = {}
        for name in names:
            holder, _, last = name.rpartition(".")
            params[name] = nn.Parameter(self.place(name, whole.get_parameter(name)))
            setattr(model.get_submodule(holder), last, params[name])
        if self.mesh.pipeline == 1:
            model.head.weight = model.embed.weight
        for name, buffer in whole.named_buffers():
            holder, _, last = name.rpartition(".")
            setattr(model.get_submodule(holder), last, self.place(name, buffer))
        named = NamedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
        averages = WeightAverage(model, 0.9)
        kept = dict(zip(averages._names, averages._average, strict=True))
        wholes = dict(zip(average._names, average._average, strict=True))
        for name, param in params.items():
            if not param.is_meta:
                state = optimizer.state[whole.get_parameter(name)]
                named.optimizer.state[param] = {key: self.place(name, value) for key, value in state.items()}
                kept[name].copy_(self.place(name, wholes[TIED.get(name, name)] + 1))
        still = SimpleNamespace(state=dict, load=lambda *given: None)
        return SimpleNamespace(
            model=model, optimizer=named, average=averages, held=self.held, schedule=still, scaler=still,
            reader_state=None, ranks=dist.get_world_size(), rank=dist.get_rank(), kernels={}, last_loss=None,
            windows_source=SimpleNamespace(identity="rows"),
            step_count=seed, settings=SimpleNamespace(seed=seed),
            layout=SimpleNamespace(data_rank=0, data_ranks=1, plan=SimpleNamespace(compress=None)), buckets=None,
        )  # fmt: skip


def everything(run) -> dict[str, torch.Tensor]:
    """All that a rank holds, by what it is to the rank itself."""
    found = {f"model/{name}": tensor for name, tensor in run.model.state_dict().items()}
    found.update(run.optimizer.tensors())
    found.update(run.average.tensors())
    own = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in found.items()}
    return {name: tensor.clone() for name, tensor in own.items() if not tensor.is_meta}


def save(run, folder) -> None:
    writer = Writer(folder, run.rank, run.ranks)
    dist.barrier()
    writer.begin(run.step_count, *collect(run, True))
    writer.wait()
    assert writer.error() is None, writer.error()
    dist.barrier()
    writer.commit()
    writer.wait()
    assert writer.error() is None, writer.error()
    dist.barrier()


def faults(placing: Placing, reader: Reader, expected: dict[str, torch.Tensor]) -> list[str]:
    """What of the checkpoint another run does not take up exactly as ``expected``. Collective."""
    run = placing.run(seed=4)
    kinds, before = [type(param) for param in run.model.parameters()], everything(run)
    restore(run, reader)
    found = everything(run)
    fresh = placing.run(seed=5).model
    load_weights(fresh, reader.path.parent, held=placing.held)
    alone = {f"model/{key}": tensor for key, tensor in fresh.state_dict().items() if not tensor.is_meta}
    own = {key: tensor.to_local() if isinstance(tensor, DTensor) else tensor for key, tensor in alone.items()}
    wrong = [key for key in before.keys() | found.keys() | expected.keys() if key not in expected or key not in before]
    wrong += [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)]
    wrong += [f"{key} alone" for key, tensor in own.items() if not torch.equal(tensor, expected[key])]
    wrong += [
        f"{key} was so before" for key, tensor in expected.items()
        if tensor.numel() and not ("norm" in key or "step" in key) and torch.equal(before[key], tensor)
    ]  # fmt: skip
    if kinds != [type(param) for param in run.model.parameters()] or run.step_count != 3:
        wrong.append("kinds of parameters, or the step")
    return wrong


@pytest.fixture(scope="module")
def taken_up(tmp_path_factory) -> tuple[Path, dict[tuple[str, str], list[str]]]:
    """A folder of runs by mesh; (saved under, taken up under) -> what was not exact on some rank.

    One world makes all meshes once.
    """
    folder = tmp_path_factory.mktemp("held")

    def work(rank):
        placings = {name: Placing(mesh, rank) for name, mesh in MESHES.items()}
        expected = {name: everything(placing.run(seed=3)) for name, placing in placings.items()}
        told = {}
        for here, placing in placings.items():
            save(placing.run(seed=3), folder / here / "checkpoints")
            reader = Reader(folder / here / "checkpoints" / "step-3")
            for there, other in placings.items():
                told[here, there] = faults(other, reader, expected[there])
        return told

    every = run_ranks(work, 4, timeout_s=120)
    return folder, {pair: sum((told[pair] for told in every), []) for pair in every[0]}


@pytest.mark.parametrize("here", MESHES)
def test_state_saved_under_one_mesh_is_taken_up_exactly_under_every_other(taken_up, tmp_path, here):
    """Weights, moments, averages, buffers and counters; packed, tied across stages, shards of few rows.

    https://github.com/pytorch/torchtitan/issues/2252 https://github.com/pytorch/torchtitan/issues/594
    https://github.com/foundation-model-stack/foundation-model-stack/pull/331
    """
    folder, wrong = taken_up
    assert {there: wrong[here, there] for there in MESHES} == {there: [] for there in MESHES}
    model, optimizer, average = trained(3)
    found, _ = newest_good(folder / here / "checkpoints")
    reader = Reader(found.path)
    named = NamedOptimizer(optimizer, model)
    whole = {**model_tensors(model)[0], **named.tensors()}
    whole.update({name: tensor + 1 for name, tensor in average.tensors().items()})
    assert reader.names() == sorted(whole)
    assert reader.values["tied"] == TIED
    assert reader.values["optimizer"]["groups"][0]["parameters"] == [name for name, _ in model.named_parameters()]
    assert reader.values["optimizer"]["state"] == named.values()["state"]
    for name, tensor in whole.items():
        assert torch.equal(reader.read(name), tensor), name
    path = export(folder / here, tmp_path / "out")
    copy = Net()
    load_weights(copy, path)
    assert all(torch.equal(a, b) for a, b in zip(copy.state_dict().values(), model.state_dict().values(), strict=True))

    def from_file(rank):
        for mesh in MESHES.values():
            placing = Placing(mesh, rank)
            expected, fresh = placing.run(seed=3).model.state_dict(), placing.run(seed=5).model
            load_weights(fresh, path, held=placing.held)
            for name, tensor in fresh.state_dict().items():
                if not tensor.is_meta:
                    own, other = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, expected[name]))
                    assert torch.equal(own, other), name

    if here == "shard=4":
        run_ranks(from_file, 4)


def sharded_run(rank: int, ranks: int, seed: int, steps: int):
    """Real steps of FSDP2; the first layer is frozen before the last of them."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    named = NamedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    for step in range(steps):
        model[0].requires_grad_(step < steps - 1)
        model(torch.randn(4, 5)).square().sum().backward()
        named.optimizer.step()
        named.optimizer.zero_grad()
    still = SimpleNamespace(state=dict, load=lambda *given: None)
    return SimpleNamespace(
        model=model, optimizer=named, average=WeightAverage(model, None), held=Held(Mesh(shard=ranks), rank),
        schedule=still, scaler=still, reader_state=None, ranks=ranks, rank=rank, kernels={}, last_loss=None,
        step_count=steps, settings=SimpleNamespace(seed=seed), windows_source=SimpleNamespace(identity="rows"),
        layout=SimpleNamespace(data_rank=0, data_ranks=1, plan=SimpleNamespace(compress=None)), buckets=None,
    )  # fmt: skip


def test_all_that_torchs_own_shards_hold_comes_back_frozen_ones_moments_too(tmp_path):
    """State of a parameter that trained first and was frozen later was dropped on load.

    https://github.com/pytorch/pytorch/issues/192202
    """

    def work(rank):
        run = sharded_run(rank, 3, seed=0, steps=3)
        save(run, tmp_path / "checkpoints")
        reader = Reader(tmp_path / "checkpoints" / "step-3")
        assert reader.read("optimizer/step/0.weight") == 2 and reader.read("optimizer/step/2.weight") == 3
        for name, tensor in {**model_tensors(run.model)[0], **run.optimizer.tensors()}.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(reader.read(name), whole), name
        fresh = sharded_run(rank, 3, seed=1, steps=0)
        restore(fresh, reader)
        expected, found = everything(run), everything(fresh)
        assert found.keys() == expected.keys() and "optimizer/exp_avg/0.weight" in found
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        return sum(path.stat().st_size - read_header(path)[1] for path in reader.path.glob("*.safetensors"))

    values = 3 * (5 * 7 + 7 + 7 * 2 + 2) + 4
    assert run_ranks(work, 3) == [4 * values] * 3


def test_state_whose_place_is_unknown_is_refused_by_name():
    def work(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        held = Held(Mesh(shard=2), rank)
        param = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])
        with pytest.raises(CheckpointError, match=r"'row' of w: it has shape \[4\], this rank's part .* has \[4, 6\]"):
            held.state("row", "w", param, torch.zeros(4))
        partial = DTensor.from_local(torch.zeros(4, 6), mesh, [Partial()])
        with pytest.raises(CheckpointError, match=r"where this rank's part of w lies: it is placed as \(Partial"):
            held.piece("w", partial)
        unnamed = distribute_tensor(torch.zeros(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(CheckpointError, match=r"on a mesh of dimensions \(\); use Shard and Replicate"):
            held.piece("w", unnamed)
        uneven = DTensor.from_local(torch.zeros(1 + 2 * rank, 6), mesh, [Shard(0)], shape=(4, 6), stride=(6, 1))
        with pytest.raises(
            CheckpointError, match=r"has shape \[[13], 6\], its placements .* give \[2, 6\] of \[4, 6\]"
        ):
            held.piece("w", uneven)

    run_ranks(work, 2)
    held = Held(Mesh(tensor=2), 0, packed={"w": Packed((8, 3), 0, (Span(0, 0, 4),))})
    with pytest.raises(CheckpointError, match=r"of w has shape \[3, 3\], its spans make \[4, 3\] of \[8, 3\]"):
        held.piece("w", torch.zeros(3, 3))
    assert held.state("row", "v", torch.zeros(4, 6), torch.zeros(4)).parts[0].holders == (0, 1)


def test_key_value_heads_that_ranks_share_are_written_by_one_of_them():
    """Two key heads over four tensor ranks: the spans name who else holds them."""
    mesh = Mesh(replicate=2, tensor=4)
    for rank in range(8):
        place = rank % 4
        first = place // 2 * 2
        spans = Span(2 * place, 0, 2), Span(8 + first, 2, 2, (first, first + 1))
        held = Held(mesh, rank, packed={"qkv": Packed((12, 3), 0, spans)})
        query, key = held.piece("qkv", torch.zeros(4, 3)).parts
        assert query.box.offsets == (2 * place, 0) and query.holders == (place, place + 4)
        assert key.box.offsets == (8 + first, 0) and key.holders == (first, first + 1, first + 4, first + 5)
