"""Models divided over a tensor group compute what one process computes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.harness import RankFailed, run_ranks
from tests.tensor_cases import FAMILIES, OWN, SIZES, WITHOUT_POSITIONS, cross_entropy, family, ids, llama
from tests.tensor_training import Case, built, error, found_roles, full_tensor, hold, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from shoal.blueprint.roles import roles
from shoal.blueprint.trace import trace
from shoal.core.errors import ModelError
from shoal.models import GPT
from shoal.parallel.replicate.buckets import GradientBuckets
from shoal.parallel.tensor.apply import Layout, apply
from shoal.parallel.tensor.moves import part_of
from shoal.parallel.tensor.part import plain

pytestmark = pytest.mark.ranks


def part(layout: Layout, name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor shaped as the whole parameter."""
    split = layout.split(name)
    return whole if split is None else part_of(whole, split, layout.group)


def tensor_mesh(degree: int) -> DeviceMesh:
    return init_device_mesh("cpu", (degree,), mesh_dim_names=("tensor",))


def divided(case: Case, degree: int, overrides: dict[str, str] | None = None) -> tuple[nn.Module, Layout]:
    blueprint, found = found_roles(case, degree, overrides)
    model = built(case)
    return model, apply(model, blueprint, found, tensor_mesh(degree))


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", [*OWN, *WITHOUT_POSITIONS])
def test_our_models_train_as_on_one_process(name, degree):
    _, share, gathers = hold({**OWN, **WITHOUT_POSITIONS}[name], degree)
    assert share > 0.85
    assert not gathers


#: Share of the weights' bytes that must be divided over 2 ranks, where not most of them.
LESS = {"falcon of one key-value head": 0.75, "bert": 0.85, "distilbert": 0.85, "whisper": 0.85}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_models_that_nobody_rewrote_train_as_on_one_process(name, capsys):
    pytest.importorskip("transformers")
    _, share, gathers = hold(family(name), 2)
    with capsys.disabled():
        print(f" [{name}: {share:.1%} of the weight bytes divided]", end="")
    assert share > LESS.get(name, 0.9)
    assert not gathers


@pytest.mark.parametrize("name", ["llama", "llama eager", "qwen3", "gpt2", "bloom"])
def test_key_value_heads_fewer_than_the_degree_are_exact(name):
    """Two key-value heads on four ranks: computed whole on each, their gradients summed.

    https://github.com/pytorch/torchtitan/issues/2574 https://github.com/pytorch/torchtitan/pull/2577
    """
    pytest.importorskip("transformers")
    _, share, gathers = hold(family(name), 4)
    assert share > 0.85
    assert not gathers


@pytest.mark.parametrize(
    ("case", "degree"),
    [
        (Case(lambda: GPT(61, 36, 2, 3, 16, dropout=0.1, tied=True), lambda: ids(vocabulary=61), cross_entropy), 2),
        pytest.param(OWN["vit"], 3, marks=pytest.mark.nightly),
        pytest.param(OWN["torch's transformer"], 3, marks=pytest.mark.nightly),
    ],
    ids=["three heads on two", "vit on three", "torch's transformer on three"],
)
def test_a_degree_that_does_not_divide_splits_whole_heads_exactly(case, degree):
    """https://github.com/pytorch/torchtitan/issues/2574"""
    _, share, gathers = hold(case, degree)
    assert share > 0.85
    assert not gathers


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.nightly)])
def test_key_value_heads_that_do_not_divide_are_exact(attention):
    """Six query heads of three key heads on two ranks."""
    pytest.importorskip("transformers")
    sizes = SIZES | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    _, share, gathers = hold(llama(**sizes, attn_implementation=attention), 2)
    assert share > 0.85
    assert not gathers


@pytest.mark.parametrize("degree", [2, 4])
def test_a_row_layers_bias_is_added_once(degree):
    """https://github.com/huggingface/text-generation-inference/issues/1036
    https://github.com/Wenyueh/MinivLLM/issues/80
    """

    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()
        nn.init.constant_(model[2].bias, 100.0)
        return model

    def rank(rank):
        torch.manual_seed(0)
        wanted, model = make(), None
        model = copy.deepcopy(wanted)
        x = torch.ones(3, 4, dtype=torch.float64)
        blueprint = trace(model, (x,), {})
        layout = apply(model, blueprint, roles(blueprint, degree), tensor_mesh(degree))
        assert layout.split("2.weight") is not None
        torch.testing.assert_close(model(x), wanted(x), rtol=1e-12, atol=0)

    run_ranks(rank, degree)


@pytest.mark.parametrize(
    "overrides",
    [
        {"blocks.0.feed.0.weight": "row", "blocks.1.attention.qkv.weight": "column", "head.weight": "row"},
        {"blocks.*.out.weight": "replicated", "blocks.*.2.weight": "column", "tokens.weight": "replicated"},
    ],
)
def test_any_roles_are_exact_even_where_values_must_be_gathered(overrides):
    _, _, gathers = hold(OWN["gpt"], 2, overrides)
    assert gathers


def test_initial_weights_do_not_depend_on_the_layout():
    """https://github.com/pytorch/pytorch/issues/168058"""
    wanted = dict(built(OWN["gpt tied with dropout"]).named_parameters())

    def rank(degree):
        model, layout = divided(OWN["gpt tied with dropout"], degree)
        for name, parameter in model.named_parameters():
            assert torch.equal(full_tensor(layout, name), wanted[name]), name
            assert parameter.numel() == wanted[name].numel() // (degree if layout.split(name) else 1)

    for degree in (2, 4):
        run_ranks(lambda rank_, degree=degree: rank(degree), degree)


def test_recomputed_blocks_are_exact():
    """Checkpointed blocks run again inside the backward, with values of their own."""

    class Recomputed(GPT):
        def forward(self, ids):
            x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    _, _, gathers = hold(Case(lambda: Recomputed(64, 32, 2, 4, 16), ids, cross_entropy), 2)
    assert not gathers


def test_recomputed_blocks_with_autograd_functions_of_their_own_are_exact():
    pytest.importorskip("transformers")

    def recomputing():
        model = family("bloom").model()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    hold(family("bloom")._replace(model=recomputing), 2)


def test_a_tied_table_stays_one_parameter_through_saving_and_resuming():
    """https://github.com/pytorch/torchtitan/issues/2252 https://github.com/pytorch/torchtitan/issues/594
    https://github.com/foundation-model-stack/foundation-model-stack/pull/331
    """
    case = Case(lambda: GPT(64, 32, 2, 4, 16, tied=True), ids, cross_entropy)
    model = built(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            case.loss(model(**case.inputs())).backward()
            optimizer.step()

    steps(model, optimizer, 5)
    wanted = dict(model.named_parameters())

    def started(weights):
        made = built(case)
        blueprint = trace(made, (), case.inputs())
        layout = apply(made, blueprint, roles(blueprint, 2), tensor_mesh(2))
        with torch.no_grad():
            for name, whole in weights.items():
                made.get_parameter(name).copy_(part(layout, name, whole))
        return made, layout, torch.optim.AdamW(made.parameters(), lr=1e-3)

    def rank(rank):
        made, layout, optimizer = started({n: p.detach() for n, p in built(case).named_parameters()})
        steps(made, optimizer, 3)
        saved = {n: full_tensor(layout, n) for n, _ in made.named_parameters()}
        moments = {
            n: {
                k: full_tensor(layout, n, v) if v.dim() else v for k, v in optimizer.state[p].items()
            }
            for n, p in made.named_parameters()
        }  # fmt: skip
        made, layout, optimizer = started(saved)
        for name, parameter in made.named_parameters():
            optimizer.state[parameter] = {
                k: part(layout, name, v).clone() if v.dim() else v for k, v in moments[name].items()
            }
        steps(made, optimizer, 2)
        assert made.head.weight is made.tokens.weight
        assert layout.split("head.weight") is not None
        return error({n: full_tensor(layout, n) for n, _ in made.named_parameters()}, wanted)

    assert max(run_ranks(rank, 2))[0] < 1e-10


def test_norms_count_every_gradient_once_whatever_is_divided():
    """Two replicas of two tensor ranks, only the feed-forward layers divided.

    https://github.com/pytorch/pytorch/issues/180346 https://github.com/meta-pytorch/torchtune/issues/2420
    https://github.com/huggingface/transformers/pull/36132
    """
    case = OWN["gpt"]
    model = built(case)
    (2 * case.loss(model(**case.inputs()))).backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))

    def rank(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
        whole = built(case)
        blueprint = trace(whole, (), case.inputs())
        others = {"*attention*": "replicated", "tokens.weight": "replicated", "head.weight": "replicated"}
        layout = apply(whole, blueprint, roles(blueprint, 2, others), mesh["tensor"])
        assert layout.split("blocks.0.feed.0.weight") and not layout.split("blocks.0.attention.qkv.weight")
        held = list(whole.named_parameters())
        alike = frozenset(name for name, _ in held if layout.group.rank and layout.split(name) is None)
        buckets = GradientBuckets(held, 1 << 20, mesh["replicate"].get_group(), uncounted=alike)
        buckets.start_window()
        buckets.start_backward(True)
        case.loss(whole(**case.inputs())).backward()
        buckets.finish()
        squared = buckets.squared_norm(None)
        dist.all_reduce(squared)
        found = float(squared.sqrt())
        buckets.assign([True] * len(held))
        for parameter in whole.parameters():
            parameter.grad *= 0.5
        full = {n: full_tensor(layout, n, p.grad) for n, p in whole.named_parameters()}
        return found, error(full, {n: g / 2 for n, g in wanted.items()})[0]

    results = run_ranks(rank, 4)
    assert len({found for found, _ in results}) == 1
    assert results[0][0] == pytest.approx(norm, rel=1e-12)
    assert max(worst for _, worst in results) < 1e-10


def test_evaluation_and_copies_of_a_divided_model_are_whole():
    wanted = built(OWN["gpt"]).eval()(**ids())

    def rank(rank):
        model, _ = divided(OWN["gpt"], 2)
        with torch.no_grad():
            found = copy.deepcopy(model).eval()(**ids())
        assert found.shape == wanted.shape
        assert type(plain(found)) is torch.Tensor
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
        assert sorted(model.state_dict()) == sorted(built(OWN["gpt"]).state_dict())

    run_ranks(rank, 2)


def test_overwriting_values_across_ranks_is_refused():
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            hidden = self.up(x) * 1
            if x.sum() > 0:
                hidden[..., 0] = 0
            return self.down(hidden)

    def rank(rank):
        model = Overwriting()
        with torch.no_grad():
            blueprint = trace(nn.Sequential(model.up, model.down), (torch.ones(2, 8),), {})
        found = roles(blueprint, 2)
        renamed = {("up" if n[0] == "0" else "down") + n[1:]: role for n, role in found.role.items()}
        operations = [o._replace(
            module="up" if o.module == "0" else "down",
            parameters=tuple(("up" if n[0] == "0" else "down") + n[1:] for n in o.parameters),
        ) for o in blueprint.operations]  # fmt: skip
        blueprint = blueprint.model_copy(update={"operations": tuple(operations)})
        apply(model, blueprint, found._replace(role=renamed), tensor_mesh(2))
        model(torch.ones(2, 8))

    with pytest.raises(RankFailed, match="setitem overwrites values that are divided among the ranks"):
        run_ranks(rank, 2)


def test_roles_for_another_model_or_mesh_are_refused():
    def rank(rank):
        blueprint, found = found_roles(OWN["gpt"], 2)
        mesh = tensor_mesh(2)
        with pytest.raises(ModelError, match="tensor roles are for another model: parameters differ"):
            apply(nn.Linear(4, 4), blueprint, found, mesh)
        with pytest.raises(ModelError, match="divides 64 entries of dimension 0, found a shape of"):
            apply(GPT(62, 32, 2, 4, 16), blueprint, found, mesh)
        with pytest.raises(ModelError, match=r"roles for 4 ranks were given a mesh of shape \(2,\)"):
            apply(GPT(64, 32, 2, 4, 16), blueprint, found_roles(OWN["gpt"], 4)[1], mesh)

    run_ranks(rank, 2)


def test_collectives_are_one_per_region_each_way():
    """Query, key and value of one input (gate and up, too) send its gradient once."""
    pytest.importorskip("transformers")

    def rank(rank):
        case = family("llama")
        model, _ = divided(case, 2, {"model.embed_tokens.weight": "replicated", "lm_head.weight": "replicated"})
        calls, real = [], dist.all_reduce
        dist.all_reduce = lambda tensor, **given: (calls.append(tuple(tensor.shape)), real(tensor, **given))[1]
        try:
            loss = case.loss(model(**case.inputs()))
            forward = len(calls)
            loss.backward()
        finally:
            dist.all_reduce = real
        return forward, len(calls) - forward

    assert run_ranks(rank, 2) == [(4, 4), (4, 4)]  # two regions in each of two blocks


def test_a_step_is_the_same_on_all_ranks_for_what_all_have():
    def rank(rank):
        model, layout = divided(OWN["gpt"], 2)
        train(OWN["gpt"], model, layout)
        return {n: p.detach() for n, p in model.named_parameters() if layout.split(n) is None}

    first, second = run_ranks(rank, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_functions_of_split_tensors_that_models_use_are_exact():
    """einsum, products in heads, grouped queries, maxima over other dimensions, lists as indices."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = (
                nn.Linear(16, 32),
                nn.Linear(16, 16),
                nn.Linear(16, 16),
                nn.Linear(32, 16),
            )
            self.scale = nn.Parameter(torch.ones(8))
            self.bias = nn.Parameter(torch.zeros(4, 1, 1))

        def forward(self, x):
            q = self.q(x).view(x.shape[0], -1, 4, 8).movedim(1, 2) * self.scale
            k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.k, self.v))
            attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            scores = torch.einsum("bhtd,bhsd->bhts", q, attended).add_(self.bias)
            scores = (scores - scores.amax(-1, keepdim=True)).softmax(-1)
            mixed = torch.stack([scores @ attended, attended]).mean(0)[:, :, [2, 0, 1]]
            mixed = torch.cat([mixed, attended[[0, 1]][:, :, :1].flip(2, 3)], dim=2)
            return self.out(mixed.permute(0, 2, 1, 3).reshape(x.shape[0], -1, 32))

    inputs = {"x": torch.rand(2, 5, 16, generator=torch.Generator().manual_seed(1)).double()}
    case = Case(Odd, lambda: inputs, lambda y: y.pow(2).sum())
    for degree, whole in ((2, 0), (4, 2)):
        _, found = found_roles(case, degree)
        assert sum(role.split is None for name, role in found.role.items() if name.endswith("weight")) == whole
        _, _, gathers = hold(case, degree)
        assert not gathers


def test_sharding_a_divided_model_over_another_axis_is_exact():
    """Two shards of two tensor ranks, a tied table, dropout."""
    case = OWN["gpt tied with dropout"]
    wanted = train(case, built(case))

    def rank(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        blueprint, found = found_roles(case, 2)
        model = built(case)
        layout = apply(model, blueprint, found, mesh["tensor"])
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            case.loss(model(**case.inputs())).backward()
            optimizer.step()
        weights = {n: full_tensor(layout, n, p.full_tensor()) for n, p in model.named_parameters()}
        return error(weights, wanted.weights)[0]

    assert max(run_ranks(rank, 4)) < 1e-10


def test_layers_that_torch_fuses_outside_training_are_exact():
    """torch's encoder layer runs in one kernel then, which reads the weights of the modules below it."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.encoder(x))

    x = torch.rand(2, 5, 16, generator=torch.Generator().manual_seed(1)).double()
    case = Case(Encoder, lambda: {"x": x}, cross_entropy)
    with torch.no_grad():
        wanted = built(case).eval()(x)

    def rank(rank):
        model, layout = divided(case, 2)
        assert layout.split("encoder.layers.0.linear1.weight") is not None
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), wanted, rtol=1e-12, atol=1e-12)

    run_ranks(rank, 2)
    hold(case, 2)


def test_attention_layers_of_torch_with_heads_that_cannot_be_divided_stay_whole():
    layer = nn.TransformerEncoderLayer(18, 3, 32, batch_first=True)
    found = roles(trace(layer, (torch.ones(2, 5, 18),), {}), 4)
    assert found.role["self_attn.in_proj_weight"].split is None
    assert found.reasons["self_attn.in_proj_weight"] == "3 heads cannot be divided among 4"
    assert found.role["linear1.weight"].kind == "column"
