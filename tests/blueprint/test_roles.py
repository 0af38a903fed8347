"""Which parameters are divided over a tensor group, and why others are not."""

import pytest
import torch
import torch.nn.functional as F
from tests.tensor_cases import OWN, SIZES, family, llama
from tests.tensor_training import found_roles
from torch import nn

from shoal.blueprint.roles import Role, roles
from shoal.blueprint.split import Refusal, Split, cut, local_size, reshaped, spans
from shoal.blueprint.trace import trace
from shoal.core.errors import ConfigError
from shoal.models import GPT

pytestmark = pytest.mark.unit


def derived(model: nn.Module, *inputs, degree=2, overrides=None):
    return roles(trace(model, inputs, {}), degree, overrides)


def test_a_gpt_is_split_into_packed_columns_rows_and_its_vocabulary():
    _, found = found_roles(OWN["gpt"], 4)
    block = "blocks.1."
    assert found.role[block + "attention.qkv.weight"] == Role("packed column", Split(0, (32, 32, 32)))
    assert found.role[block + "attention.qkv.bias"] == Role("packed column", Split(0, (32, 32, 32)))
    assert found.role[block + "attention.out.weight"] == Role("row", Split(1, (32,)))
    assert found.role[block + "attention.out.bias"] == Role("replicated", None)
    assert found.role[block + "feed.0.weight"] == Role("column", Split(0, (128,)))
    assert found.role[block + "feed.2.weight"] == Role("row", Split(1, (128,)))
    assert found.role["tokens.weight"] == found.role["head.weight"] == Role("vocabulary", Split(0, (64,)))
    assert len(found.regions) == 4
    assert set(found.reasons) == {"positions.weight"}


def test_transposed_weights_are_split_over_their_other_dimension():
    pytest.importorskip("transformers")
    _, found = found_roles(family("gpt2"), 2)
    block = "transformer.h.0."
    assert found.role[block + "attn.c_attn.weight"] == Role("packed column", Split(1, (32, 32, 32)))
    assert found.role[block + "attn.c_proj.weight"] == Role("row", Split(0, (32,)))
    _, found = found_roles(family("falcon"), 2)  # input @ weight.T
    assert found.role["transformer.h.0.mlp.dense_h_to_4h.weight"] == Role("column", Split(0, (128,)))
    assert found.role["transformer.h.0.mlp.dense_4h_to_h.weight"] == Role("row", Split(1, (128,)))


def test_unequal_parts_are_found_from_slices():
    pytest.importorskip("transformers")
    _, found = found_roles(family("phi3"), 2)
    assert found.role["model.layers.0.self_attn.qkv_proj.weight"] == Role("packed column", Split(0, (32, 16, 16)))
    assert found.role["model.layers.0.mlp.gate_up_proj.weight"] == Role("packed column", Split(0, (48, 48)))


def test_key_value_heads_fewer_than_the_degree_stay_whole_and_queries_are_split():
    """https://github.com/pytorch/torchtitan/issues/2574 https://github.com/huggingface/transformers/issues/48307"""
    pytest.importorskip("transformers")
    _, found = found_roles(family("llama"), 4)
    layer = "model.layers.0.self_attn."
    assert found.role[layer + "q_proj.weight"].kind == "column"
    assert found.role[layer + "k_proj.weight"] == Role("replicated", None)
    assert "2 (heads) cannot be divided among 4" in found.reasons[layer + "k_proj.weight"]


def test_heads_that_cannot_be_divided_stay_whole_and_the_reason_has_both_numbers():
    """https://github.com/pytorch/torchtitan/issues/2574"""
    found = derived(GPT(64, 36, 1, 3, 16), torch.zeros(2, 8, dtype=torch.long), degree=4)
    assert found.role["blocks.0.attention.qkv.weight"] == Role("replicated", None)
    assert "3 (heads) cannot be divided among 4" in found.reasons["blocks.0.attention.out.weight"]
    assert found.role["blocks.0.feed.0.weight"].kind == "column"


def test_a_degree_that_does_not_divide_splits_whole_heads_and_single_entries():
    found = derived(GPT(61, 36, 1, 3, 16), torch.zeros(2, 8, dtype=torch.long))
    block = "blocks.0."
    assert found.role[block + "attention.qkv.weight"] == Role("packed column", Split(0, (3, 3, 3), 12))
    assert found.role[block + "attention.qkv.bias"] == Role("packed column", Split(0, (3, 3, 3), 12))
    assert found.role[block + "attention.out.weight"] == Role("row", Split(1, (3,), 12))
    assert found.role["head.weight"] == Role("vocabulary", Split(0, (61,)))
    found = derived(GPT(61, 36, 1, 3, 16), torch.zeros(2, 8, dtype=torch.long), degree=5)
    assert found.role[block + "feed.0.weight"] == Role("column", Split(0, (144,)))
    assert [local_size(Split(0, (144,)), 5, rank) for rank in range(5)] == [29, 29, 29, 29, 28]
    assert spans(Split(0, (3, 3), 12), 2, 1) == [(24, 0, 12), (60, 12, 12)]


def test_key_value_heads_that_do_not_divide_stay_whole_and_queries_are_split():
    """Six queries of three keys on two ranks: a rank has three queries, of which keys would lie on both."""
    pytest.importorskip("transformers")
    settings = SIZES | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    _, found = found_roles(llama(**settings), 2)
    layer = "model.layers.0.self_attn."
    assert found.role[layer + "q_proj.weight"] == Role("column", Split(0, (48,)))
    assert found.role[layer + "k_proj.weight"].split is None
    assert found.role[layer + "o_proj.weight"] == Role("row", Split(1, (48,)))


class Experts(nn.Module):
    """Stacked weights, of which each row's own are picked; ``left``: they stand on the left of the product."""

    def __init__(self, left: bool):
        super().__init__()
        self.left = left
        sizes = ((4, 24, 8), (4, 8, 12)) if left else ((4, 8, 24), (4, 12, 8))
        self.both, self.down = (nn.Parameter(torch.randn(*size)) for size in sizes)

    def product(self, x, weight):
        return (weight @ x.unsqueeze(-1)).squeeze(-1) if self.left else torch.bmm(x.unsqueeze(1), weight).squeeze(1)

    def forward(self, x):
        picked = x.argmax(-1) % 4
        gate, up = self.product(x, self.both[picked]).chunk(2, -1)
        return self.product(F.silu(gate) * up, self.down[picked])


@pytest.mark.parametrize("left", [True, False])
def test_stacked_weights_of_experts_are_divided_inside_of_each(left):
    found = derived(Experts(left), torch.rand(6, 8))
    dim = 1 if left else 2
    assert found.role["both"] == Role("packed column", Split(dim, (12, 12)))
    assert found.role["down"] == Role("row", Split(3 - dim, (12,)))


class Factors(nn.Module):
    """Experts in einsums, and a weight that is cast."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12)), nn.Parameter(torch.randn(4, 12, 8))
        self.first, self.last = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(8, 12))

    def forward(self, x):
        inner = F.gelu(torch.einsum("btd,edh->bteh", x, self.up))
        x = torch.einsum("bteh,ehd,bte->btd", inner, self.down, x[..., :4])
        return F.linear(F.linear(x, self.first.float().to(x.dtype)).relu(), self.last)


def test_einsums_and_weights_that_are_cast_are_layers():
    found = derived(Factors().double(), torch.rand(2, 3, 8).double())
    assert found.role["up"] == Role("column", Split(2, (12,))) and found.role["down"] == Role("row", Split(1, (12,)))
    assert found.role["first"] == Role("column", Split(0, (12,))) and found.role["last"] == Role("row", Split(1, (12,)))


def test_a_weight_is_not_divided_in_two_ways():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.square = nn.Linear(8, 8)

        def forward(self, x):
            return self.square(self.square(x).relu())

    found = derived(Twice(), torch.rand(2, 8))
    assert found.role["square.weight"].split is None
    assert "square.weight is a column layer's too, and divided in another way there" in found.reasons["square.weight"]


def convolutions(groups=4, inner=12):
    return nn.Sequential(
        nn.Conv2d(3, inner, 3), nn.GroupNorm(groups, inner), nn.SiLU(), nn.Conv2d(inner, 8, 3, padding=1)
    )


def test_convolutions_are_divided_by_channels_and_whole_groups_of_a_norm():
    found = derived(convolutions(), torch.rand(2, 3, 8, 8))
    assert found.role["0.weight"] == found.role["0.bias"] == Role("column", Split(0, (12,)))
    assert found.role["3.weight"] == Role("row", Split(1, (12,))) and found.role["3.bias"].split is None
    found = derived(convolutions(groups=3), torch.rand(2, 3, 8, 8))
    assert found.role["0.weight"] == Role("column", Split(0, (3,), 4))
    found = derived(convolutions(groups=1), torch.rand(2, 3, 8, 8))
    assert found.role["0.weight"].split is None and "1 groups cannot be divided among 2" in found.reasons["0.weight"]
    found = derived(nn.Sequential(nn.Conv1d(8, 16, 3), nn.ReLU(), nn.Conv1d(16, 8, 3, groups=2)), torch.rand(2, 8, 8))
    assert found.role["0.weight"].split is None and "a convolution in groups" in found.reasons["0.weight"]


class Between(nn.Module):
    """Two layers and what stands between them."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 16), nn.Linear(16, 8), between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda x: x.softmax(-1), "softmax works along the split dimension"),
        (lambda x: F.layer_norm(x, (16,)), "layer_norm works along the split dimension"),
        (lambda x: x - x.mean(-1, keepdim=True), "mean works along the split dimension"),
        (lambda x: x.cumsum(-1), "cumsum works along the split dimension"),
        (lambda x: x.flip(-1), "flip works along the split dimension"),
        (lambda x: x[..., ::2].repeat_interleave(2, -1), "step of the split dimension"),
        (lambda x: F.pad(x, (1, 0))[..., :16], "pad is not known"),
        (lambda x: x.view(-1, 5, 16) * x.sum(), "sum over all dimensions"),
    ],
)
def test_what_works_along_the_split_dimension_is_a_barrier(between, reason):
    found = derived(Between(between), torch.zeros(2, 5, 8))
    assert not found.regions
    assert reason in found.reasons["up.weight"]


def test_an_output_that_is_read_by_two_layers_or_leaves_the_model_is_no_region():
    class Two(Between):
        def forward(self, x):
            hidden = self.up(x)
            return self.down(hidden) + F.linear(hidden, self.down.weight)

    class Leaving(Between):
        def forward(self, x):
            hidden = self.up(x)
            return self.down(hidden), hidden

    assert "is read by down.weight too" in derived(Two(nn.Identity()), torch.zeros(2, 8)).reasons["up.weight"]
    assert "leaves the model" in derived(Leaving(nn.Identity()), torch.zeros(2, 8)).reasons["up.weight"]


def test_roles_asked_for_by_pattern():
    model = GPT(64, 32, 2, 4, 16)
    found = derived(model, torch.zeros(2, 8, dtype=torch.long), overrides={"blocks.0.*": "replicated"})
    assert all(role.split is None for name, role in found.role.items() if name.startswith("blocks.0."))
    assert found.role["blocks.1.feed.0.weight"].kind == "column"
    assert found.reasons["blocks.0.feed.0.weight"] == "asked for"
    found = derived(model, torch.zeros(2, 8, dtype=torch.long), overrides={"blocks.0.feed.0.weight": "row"})
    assert found.role["blocks.0.feed.0.weight"] == Role("row", Split(1, (32,)))


def test_roles_that_cannot_be_are_refused():
    model, ids = GPT(61, 32, 2, 4, 16), torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"'blocks.9.\*' = 'row' names no parameter"):
        derived(model, ids, overrides={"blocks.9.*": "row"})
    with pytest.raises(ConfigError, match="no such role; did you mean 'column'"):
        derived(model, ids, overrides={"blocks.0.feed.0.weight": "colunm"})
    with pytest.raises(ConfigError, match=r"'blocks.0.feed.2.bias' of shape \(32,\) cannot take .* over 33 ranks"):
        derived(model, ids, overrides={"blocks.0.feed.2.bias": "column"}, degree=33)


def test_reshapes_move_a_split_only_where_a_part_stays_a_part():
    assert reshaped(Split(2, (32,)), (2, 8, 32), (2, 8, 4, 8), 4) == Split(2, (4,))
    assert reshaped(Split(2, (32,) * 3), (2, 8, 96), (2, 8, 3, 4, 8), 4) == Split(3, (4,))
    assert reshaped(Split(1, (4,)), (2, 4, 8, 8), (8, 8, 8), 2) == Split(0, (4, 4))
    assert reshaped(Split(0, (4, 4)), (8, 8, 8), (2, 4, 8, 8), 2) == Split(1, (4,))
    assert reshaped(Split(2, (32, 16, 16)), (2, 8, 64), (2, 8, 8, 8), 2) == Split(2, (4, 2, 2))
    with pytest.raises(Refusal, match="cannot be divided among 4"):
        reshaped(Split(2, (32,)), (2, 8, 32), (2, 8, 2, 16), 4)
    with pytest.raises(Refusal, match="cannot be divided"):
        reshaped(Split(2, (96,)), (2, 8, 96), (2, 8, 3, 32), 2)
    with pytest.raises(Refusal, match="cannot be seen as"):
        reshaped(Split(0, (6,)), (6, 2), (5, 2), 2)


def test_pieces_of_a_split_dimension_are_whole_parts():
    assert cut(Split(1, (4, 4, 4)), (4, 8)) == [Split(1, (4,)), Split(1, (4, 4))]
    assert cut(Split(1, (3, 3), 2), (6, 6)) == [Split(1, (3,), 2)] * 2
    with pytest.raises(Refusal) as refused:
        cut(Split(0, (12,)), (4, 8))
    assert refused.value.parts == (4, 8)
