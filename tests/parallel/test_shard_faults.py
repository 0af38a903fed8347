"""Faults of sharded training that others met: what is counted, moved, reduced, refused."""

import gc
import time
from math import prod

import pytest
import torch
import torch.distributed as dist
from tests.harness import run_ranks
from tests.sharding import (
    adamw,
    gradients_of,
    mesh_of,
    micro_batches,
    plain,
    regions,
    run_window,
    sharded,
    train,
    whole,
)
from tests.small_jobs import error, mlp, mlp_rows, sgd, token_loss, token_rows
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.core.errors import ConfigError, ModelError
from shoal.engine.optimizer import NamedOptimizer
from shoal.engine.precision import Precision
from shoal.models.gpt import GPT
from shoal.parallel.shard.apply import apply
from shoal.parallel.shard.gradients import ShardedGradients
from shoal.parallel.shard.pieces import local
from shoal.parallel.shard.spec import ShardSettings, parts
from shoal.parallel.shard.units import own_units, parameters, shard_units
from shoal.plan.candidate import Candidate
from shoal.plan.mesh import Mesh
from shoal.plan.profile import Block, Profile, Weight
from shoal.plan.sharded import Sharded

pytestmark = pytest.mark.ranks

ROWS = token_rows([3, 11, 1, 9, 12, 2, 7, 5, 4, 10, 6, 8, 1, 2, 3, 12])
STEPS = [list(range(16)), list(range(3, 14)), list(range(1, 16))]


def gpt(width=16, layers=2, tied=True):
    torch.manual_seed(0)
    return GPT(37, width, layers, 4, 12, tied=tied)


class Vector(nn.Module):
    """One row of weights times what comes in."""

    def __init__(self, size=4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * x


@pytest.mark.parametrize("shape", [(2,), (2, 2), (3,)])
def test_the_norm_for_clipping_is_of_the_whole_gradient_on_every_rank(shape):
    """Each rank took the norm of its own shard, and clipped by its own value.

    https://github.com/pytorch/pytorch/issues/170862 https://github.com/pytorch/torchtitan/issues/766
    https://github.com/pytorch/pytorch/issues/72548
    """
    ranks = shape[0] * shape[-1] if len(shape) == 2 else shape[0]  # 3 ranks: 2 rows, 2 rows, none

    def body(rank):
        held = sharded(Vector(), shape)
        gradients = gradients_of(held)
        gradients.start_window()
        gradients.start_backward(True)
        held.model(torch.tensor([3.0, 4.0, 12.0, 0.0]) / ranks).sum().backward()
        gradients.finish()
        square = gradients.squared_norm(None)
        dist.all_reduce(square)
        gradients.assign([True])
        gradients.scale(6.5 / 13)
        return float(square.sqrt()), whole(held.model.weight.grad)

    for norm, clipped in run_ranks(body, ranks):
        assert abs(norm - 13) < 1e-6
        assert torch.allclose(clipped, torch.tensor([1.5, 2, 6, 0]), rtol=1e-6)


def test_a_gradient_that_is_not_finite_is_named_on_every_rank():
    """Only the rank whose shard has it would know; https://github.com/pytorch/pytorch/issues/170862"""

    def body(rank):
        held = sharded(gpt(), (2,))
        gradients = gradients_of(held)
        run_window(held.model, gradients, micro_batches(rank, 2, STEPS[0], 4), ROWS, token_loss)
        before = gradients.first_non_finite()
        if rank == 1:
            local(gradients._kept[id(held.model.positions.weight)])[-1, 3] = float("nan")
        return before, gradients.first_non_finite()

    assert run_ranks(body, 2) == [(None, "positions.weight")] * 2


@pytest.mark.parametrize("level", [1, 2, 3])
def test_gradients_are_reduced_as_often_as_the_level_says(level, monkeypatch):
    """Accumulation did not switch reduction off, since the switch of whole models does not exist in shards.

    https://github.com/huggingface/accelerate/pull/3762
    """
    counts = {"reduce_scatter": 0, "all_gather": 0}
    for kind in counts:
        name = f"{kind}_single"  # what FSDP2 of torch 2.13 calls
        real = getattr(dist, name)

        def counted(*args, kind=kind, real=real, **kwargs):
            counts[kind] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)

    def body(rank):
        held = sharded(gpt(layers=3).double(), (2,), level=level)
        train(held, ROWS, token_loss, STEPS[:1], 2)
        counts.update(reduce_scatter=0, all_gather=0)
        return train(held, ROWS, token_loss, STEPS[:1], 2).gradients[0], dict(counts)

    wanted = plain(gpt(layers=3).double(), ROWS, token_loss, STEPS[:1] * 2).gradients[1]
    blocks, micro = 3, 4
    units = blocks + 1  # and the root
    reduced = {1: units, 2: units * micro, 3: units * micro}[level]
    gathered = {1: units, 2: units, 3: (units + blocks) * micro}[level]
    for grads, counted in run_ranks(body, 2):
        assert counted == {"reduce_scatter": reduced, "all_gather": gathered}
        assert error(grads, wanted) < 1e-10


def live_bytes():
    """Bytes of all tensors that live, each storage once.

    A thread of gloo lets go of a collective's tensors a moment after the wait for it has ended, and on a busy machine
    a long one: what falls is counted again.
    """
    counts = [_live_bytes()]
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        time.sleep(0.02)
        counts.append(_live_bytes())
        if counts[-1] < counts[-2]:
            until = time.monotonic() + 0.3
    return counts[-1]


def _live_bytes():
    gc.collect()
    found = {}
    for value in gc.get_objects():
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            for tensor in (value, value.grad if value.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def promise(model, level, ranks):
    """What planning says of a rank: each unit as a block, and the root."""
    units: dict[str, list[Weight]] = {}
    for parameter, unit in parts(parameters(model), own_units(model, shard_units(model))):
        made = Weight(parameter.name, prod(parameter.shape), parameter.shape[0], parameter.trains, 1, False, "")
        units.setdefault(unit, []).append(made)
    blocks = tuple(Block(unit, unit, bool(unit), (), (), tuple(held), 0, 0) for unit, held in units.items())
    candidate = Candidate(Mesh(shard=ranks), 1, 4, shard_level=level)
    return Sharded(Profile(name="gpt", blocks=blocks, model_flops=0), candidate, range(len(blocks)))


@pytest.mark.parametrize("level", [1, 2, 3])
def test_bytes_on_a_rank_are_the_promised_ones_and_fall_with_the_ranks(level):
    """Real use did not fall when ranks were added (whole copies alive), and whole gradients were missing in plans.

    https://github.com/deepspeedai/DeepSpeed/issues/4093
    https://github.com/pytorch/pytorch/issues/37030 https://github.com/huggingface/accelerate/pull/2531
    """

    def body(rank):
        ranks = dist.get_world_size()
        before = live_bytes()
        model = gpt(width=64, layers=4)
        told = promise(model, level, ranks)
        held = sharded(model, (ranks,), level=level)
        gradients, made = gradients_of(held), adamw(held.model)
        for _ in range(2):
            run_window(held.model, gradients, micro_batches(rank, ranks, STEPS[0], 4), ROWS, token_loss)
            gradients.assign([True] * len(gradients.parameters))
            made.step()
            gradients.start_window()
        between = live_bytes() - before
        micros = micro_batches(rank, ranks, STEPS[0], 16 // ranks // 4)
        gradients.start_backward(False)
        token_loss(held.model(ROWS[micros[0][0]][0][None]), ROWS[micros[0][0]][1][None]).sum.backward()
        return between, live_bytes() - before - between, told

    shares = []
    for ranks in (2, 4):
        found = run_ranks(body, ranks)
        for between, grown, told in found:
            assert abs(between - told.weights - told.optimizer) < 0.02 * between
            gathered, unsharded = sum(told.whole.values()), sum(told.made.values())
            if level == 1:  # after one of four micro-batches: whole weights, whole gradients
                assert unsharded == sum(p.nbytes for p in gpt(width=64, layers=4).parameters())
                assert abs(grown - unsharded - gathered) < 0.02 * grown
            else:
                extra = told.gradients + (gathered if level == 2 else 0)
                assert abs(grown - extra) < 0.02 * extra
        shares.append(max(between for between, *_ in found))
    assert abs(shares[0] / shares[1] - 2) < 0.04


def test_an_optimizer_over_other_parameters_than_the_shards_is_refused():
    """An optimizer built before wrapping, or after a forward, updated what nothing used: training ran, nothing moved.

    https://github.com/pytorch/pytorch/issues/149205 https://github.com/huggingface/accelerate/pull/3394
    """

    def body(rank):
        model = gpt()
        early = adamw(model)
        held = sharded(model, (2,), level=2)
        with pytest.raises(ModelError, match="not in the model"):
            NamedOptimizer(early, model)
        model(torch.zeros(1, 3, dtype=torch.long))
        late = adamw(model)
        with pytest.raises(ModelError, match=r"tokens.weight was given whole, as a forward had gathered it"):
            ShardedGradients(held, list(model.named_parameters()))
        held.release()
        with pytest.raises(ModelError, match="not in the model"):
            NamedOptimizer(late, model)
        before = whole(model.tokens.weight)
        train(held, ROWS, token_loss, STEPS[:1], 2)
        return bool((whole(model.tokens.weight) != before).all())

    assert run_ranks(body, 2) == [True, True]


def test_gradients_are_summed_in_float32_where_products_are_in_bfloat16():
    """Gradients were reduced in bfloat16: the error grew with the ranks.

    https://github.com/pytorch/pytorch/issues/106395 https://github.com/pytorch/pytorch/pull/123362
    """

    def body(rank):
        held = sharded(nn.Sequential(nn.Linear(1, 8, bias=False)), (8,))
        gradients = gradients_of(held)
        gradients.start_window()
        gradients.start_backward(True)
        with Precision("bf16", "cpu").forward():
            output = held.model(torch.full((1, 1), 256.0 if rank == 0 else 1.0))
        output.sum().backward()
        gradients.finish()
        gradients.assign([True])
        grad = whole(held.model[0].weight.grad)
        return output.dtype, grad.dtype, set(grad.flatten().tolist())

    assert run_ranks(body, 8) == [(torch.bfloat16, torch.float32, {263.0})] * 8


class Mixed(nn.Module):
    """A bfloat16 matrix, a float32 norm and a float32 adapter in one block."""

    def __init__(self, frozen):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"in": self.block(frozen)})["in"] for _ in range(2)])

    @staticmethod
    def block(frozen):
        block = nn.Module()
        block.base = nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(not frozen)
        block.norm, block.adapter = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)
        block.forward = lambda x: block.norm(block.base(x.bfloat16()).float() + block.adapter(x))
        return block

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x[:, :4]


def test_a_unit_of_two_dtypes_keeps_them_or_is_refused_by_name():
    """Mixed dtypes in one unit (a bfloat16 base, float32 adapters or norms) failed to flatten.

    https://github.com/huggingface/trl/issues/1723 https://github.com/axolotl-ai-cloud/axolotl/issues/1494
    https://github.com/huggingface/peft/issues/484
    """
    rows = mlp_rows(8)

    def loss(output, targets):
        return nn.functional.cross_entropy(output, targets, reduction="sum"), len(targets)

    def make(frozen):
        torch.manual_seed(0)
        return Mixed(frozen)

    def body(rank):
        model = make(True)
        dtypes = {name: param.dtype for name, param in model.named_parameters()}
        held = sharded(model, (2,))
        gradients, made = gradients_of(held), sgd(0.1)(model)
        for _ in range(2):
            gradients.start_window()
            gradients.start_backward(True)
            x, y = rows[rank]
            loss(model(x[None]), y[None])[0].backward()
            gradients.finish()
            gradients.assign([True] * len(gradients.parameters))
            made.step()
        assert {name: param.dtype for name, param in model.named_parameters()} == dtypes
        with pytest.raises(
            ModelError,
            match=r"blocks.0.norm.weight is float32 and blocks.0.base.weight is bfloat16, both train .*'blocks.0'",
        ):
            sharded(make(False), (2,))
        return {name: whole(param).float() for name, param in model.named_parameters()}

    single = make(True)
    made = sgd(0.1)(single)
    for _ in range(2):
        made.zero_grad()
        x, y = torch.stack([rows[0][0], rows[1][0]]), torch.stack([rows[0][1], rows[1][1]])
        loss(single(x), y)[0].backward()
        made.step()
    for found in run_ranks(body, 2):
        assert error(found, {name: param.detach().float() for name, param in single.named_parameters()}) < 1e-5


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList([mlp_block() for _ in range(2)])

    def encode(self, x):
        return self.first(x)

    def deep(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return self.deep(self.encode(x))


def mlp_block():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def test_calls_past_the_hooks_give_the_same_or_name_the_method():
    """model.forward(x), or a method of one's own, used shards as if they were whole weights.

    https://github.com/pytorch/pytorch/issues/114299
    """
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))

    def make():
        torch.manual_seed(0)
        return Encoder()

    single = make()
    wanted = single(x).detach(), single.deep(x).detach(), single.layers[0](x).detach()

    def body(rank):
        model = sharded(make(), (2,)).model
        found = model.forward(x).detach(), model.deep(x).detach(), model.layers[0].forward(x).detach()
        model.zero_grad()
        for unit in (model, *model.layers):
            unit.reshard()
        with pytest.raises(ModelError, match=r"encode\(\) was called outside the model's forward"):
            model.encode(x)
        return found

    for found in run_ranks(body, 2):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_optimizer_state_of_a_part_that_was_frozen_comes_back():
    """State of a parameter that trained first and was frozen later was dropped on loading.

    https://github.com/pytorch/pytorch/issues/192202
    """

    def window(held, gradients, made, ids):
        run_window(held.model, gradients, micro_batches(dist.get_rank(), 2, ids, 4), ROWS, token_loss)
        used = torch.tensor(gradients.used())
        dist.all_reduce(used)
        gradients.assign([value > 0 for value in used.tolist()])
        gradients.scale(0.1)
        made.step()

    def collected(tensors):  # this rank's pieces of each tensor, and the others'
        mine = [
            (name, part.offsets, part.tensor.shape, part.tensor.detach().clone())
            for name, tensor in tensors.items()
            for part in regions(name, tensor)
        ]
        every = [None, None]
        dist.all_gather_object(every, mine)
        return [part for rank in every for part in rank]

    def read_into(tensor, name, saved):
        full = torch.zeros(tensor.shape, dtype=tensor.dtype)
        for other, offsets, shape, value in saved:
            if other == name:
                full[tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))] = value
        for part in regions(name, tensor):
            place = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.tensor.shape, strict=True))
            part.tensor.copy_(full[place])
        return tensor

    def body(rank):
        held = sharded(gpt().double(), (2,))
        gradients, made = gradients_of(held), adamw(held.model)
        named = NamedOptimizer(made, held.model)
        for ids in STEPS:
            window(held, gradients, made, ids)
        held.model.blocks[1].requires_grad_(False)
        for ids in STEPS[:2]:
            window(held, gradients, made, ids)
        gradients.start_window()
        params = dict(held.model.named_parameters())
        saved = collected({**{f"model/{n}": p.data for n, p in params.items()}, **named.tensors()})
        values = named.values()

        again = sharded(gpt().double(), (2,))
        others = dict(again.model.named_parameters())
        with torch.no_grad():
            for name, param in others.items():
                read_into(param.data, f"model/{name}", saved)
        new_gradients, new = gradients_of(again), adamw(again.model)
        new_named = NamedOptimizer(new, again.model)

        def read(key, of, param):
            name = f"optimizer/{key}/{of}"
            like = torch.zeros_like(others[of].data) if key != "step" else torch.zeros(())
            return read_into(like, name, saved)

        new_named.load(values, read, {})
        for model, these, optimizer, grads in (
            (held.model, params, made, gradients),
            (again.model, others, new, new_gradients),
        ):
            for param in these.values():
                param.requires_grad_(True)
            for ids in STEPS[1:]:
                window(held if model is held.model else again, grads, optimizer, ids)
        moment = made.state[params["blocks.1.feed.0.weight"]]["exp_avg"]
        other = new.state[others["blocks.1.feed.0.weight"]]["exp_avg"]
        assert error({"m": whole(other)}, {"m": whole(moment)}) < 1e-10
        return error({n: whole(p) for n, p in others.items()}, {n: whole(p) for n, p in params.items()})

    assert max(run_ranks(body, 2)) < 1e-10


def test_shards_know_where_they_lie_uneven_and_empty_ones_too():
    def body(rank):
        held = sharded(nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2)), (4,), units=["0"])
        return [
            [(part.offsets, tuple(part.tensor.shape)) for part in regions(name, param) if part.tensor.numel()]
            for name, param in held.model.named_parameters()
        ]

    found = run_ranks(body, 4)
    assert [rank[0] for rank in found] == [
        [((0, 0), (2, 3))], [((2, 0), (2, 3))], [((4, 0), (2, 3))], [((6, 0), (1, 3))]
    ]  # fmt: skip
    assert [bool(rank[2]) for rank in found] == [True, True, False, False]  # two rows on four ranks


def test_what_cannot_be_sharded_is_refused():
    def body(rank):
        with pytest.raises(ConfigError, match=r"a mesh of axes \('data',\) was given; give \('shard',\)"):
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
            apply(mlp(), [], mesh, ShardSettings())
        with pytest.raises(ModelError, match=r"the unit 'blocks.7' was asked for, .* did you mean 'blocks.[01]'"):
            sharded(gpt(), (2,), units=["blocks.7"])
        turned = mlp()
        turned[0].weight.data = turned[0].weight.data.t().contiguous().t()
        with pytest.raises(ModelError, match=r"0.weight of shape \(16, 8\) is not contiguous"):
            sharded(turned, (2,))
        held = sharded(gpt(), (2,))
        gradients = gradients_of(held)
        run_window(held.model, gradients, [[0]], ROWS, token_loss)
        held.model.head.weight.grad = None
        with pytest.raises(ModelError, match="the gradient of tokens.weight was not reduced"):
            gradients.finish()
        del torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params
        with pytest.raises(ConfigError, match=r"cannot reduce gradients .* install torch 2.13 or newer"):
            apply(mlp(), [], mesh_of((2,)), ShardSettings())

    run_ranks(body, 2)


def test_offloaded_shards_train_the_same():
    def body(rank):
        return train(sharded(gpt().double(), (2,), cpu_offload=True), ROWS, token_loss, STEPS, 4)

    wanted = plain(gpt().double(), ROWS, token_loss, STEPS)
    for found in run_ranks(body, 2):
        assert error(found.weights, wanted.weights) < 1e-10
