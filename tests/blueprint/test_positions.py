"""Which layers give a rank its positions only, and why others give all of them."""

from __future__ import annotations

import pytest
import torch
from tests.tensor_cases import OWN, family
from tests.tensor_training import found_roles
from torch import nn

from shoal.blueprint.positions import Positions, shared_positions
from shoal.blueprint.roles import roles
from shoal.blueprint.split import Split
from shoal.blueprint.trace import trace
from shoal.models import GPT

pytestmark = pytest.mark.unit


def shared(name, degree=2):
    return shared_positions(*found_roles(OWN.get(name) or family(name), degree))


def test_rows_and_tables_of_a_gpt_give_positions():
    found = shared("gpt")
    rows = {f"blocks.{n}.{name}.weight" for n in (0, 1) for name in ("attention.out", "feed.2")}
    assert found.layers == dict.fromkeys(rows | {"tokens.weight"}, Positions(3, 1))
    assert not found.reasons
    assert not found.gathers


def test_rows_that_are_sequences_one_after_the_other_are_cut_within_each():
    pytest.importorskip("transformers")
    found = shared("gpt2")
    assert found.layers["transformer.h.1.mlp.c_proj.weight"] == Positions(2, 0, 8)
    assert Positions(2, 0, 8).split((24, 32), 2) == Split(0, (8, 8, 8))
    assert Positions(2, 0, 8).split((20, 32), 2) is None
    assert Positions(3, 1).split((4, 3, 32), 4) is None
    assert Positions(3, 1).split((12, 32), 2) is None


def test_positions_come_first_where_samples_come_second():
    """torch's attention layers work on [T, B, D]."""
    found = shared("torch's transformer")
    assert found.layers["both.encoder.layers.0.self_attn.out_proj.weight"] == Positions(3, 0)
    assert found.layers["both.encoder.layers.0.linear2.weight"] == Positions(3, 1)
    assert not found.reasons


def test_a_value_that_is_read_whole_once_is_gathered_there():
    found = shared("vit")
    assert len(found.layers) == 8
    assert found.gathers == ("getitem in the model",)


class Summing(nn.Module):
    """Each block but the first reads the mean over all positions of its stream too."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(blocks))

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            x = x + x.mean(1, keepdim=True) if number else x
        return x


def test_a_stream_that_each_block_reads_whole_stays_whole():
    model = Summing(4)
    blueprint = trace(model, (torch.zeros(2, 8, 8),), {}, samples=2)
    found = shared_positions(blueprint, roles(blueprint, 2))
    assert not found.layers
    assert found.reasons["blocks.3.2.weight"] == "its stream is read whole too often, 3 times, by mean in the model"


def test_outputs_without_positions_or_with_too_few_are_told():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    blueprint = trace(model, (torch.zeros(2, 8),), {}, samples=2)
    assert shared_positions(blueprint, roles(blueprint, 2)).reasons == {
        "2.weight": "no dimension of positions is known in its output"
    }
    short = trace(GPT(64, 32, 1, 4, 16), (torch.zeros(2, 3, dtype=torch.long),), {}, samples=2)
    reasons = shared_positions(short, roles(short, 4)).reasons
    assert reasons["blocks.0.feed.2.weight"] == "3 positions cannot be shared out among 4"
