"""What a plan takes for units and repeated blocks is what the engine shards and recomputes; what has a backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.blueprint.trace import Ending, trace
from shoal.parallel.pipeline.units import block_paths, unit_paths
from shoal.parallel.shard.units import own_units, shard_units
from shoal.plan.from_blueprint import profile
from shoal.plan.profile import Profile
from shoal.plan.sharded import alone

pytestmark = pytest.mark.unit
WIDTH = 8


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


class Stack(nn.Sequential):
    """A sequence by another name."""


class Called(nn.Module):
    """Calls the members of a list itself."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def linears(count: int = 3) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


MODELS = {
    "a sequence of layers": lambda: nn.Sequential(*linears()),
    "a sequence of all kinds": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)),
    "a sequence of blocks": lambda: nn.Sequential(block(), block(), block()),
    "a class of its own": lambda: Stack(block(), block(), block()),
    "sequences within": lambda: nn.Sequential(Stack(*linears()), nn.Sequential(block(), block()), nn.Linear(WIDTH, 1)),
    "a list of layers": lambda: Called(*linears()),
    "a list of blocks": lambda: Called(block(), block(), block()),
    "a list of one": lambda: Called(block()),
    "a list of two kinds": lambda: Called(block(), nn.TransformerEncoderLayer(WIDTH, 2, 16), block()),
}


def profiled(model: nn.Module) -> Profile:
    x = torch.randn(2, WIDTH)
    ending = Ending(lambda output, target: (output - target).square().mean(), torch.zeros(2, 1))
    return profile(trace(model, (x,), {}, 2, ending), unit_paths(model))


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_shards_and_recomputes_what_the_engine_does(name: str) -> None:
    """A sequence of ten layers was said to need 1.9 times the memory that it did in shards, and to gather once."""
    model = MODELS[name]()
    blocks = profiled(model).blocks
    assert {each.path for each in blocks if alone(each)} == set(own_units(model, shard_units(model)))
    assert {each.path for each in blocks if each.repeated} == set(block_paths(model))


def test_layers_before_the_first_trained_one_have_no_backward() -> None:
    """Frozen layers in front, as where a head alone is trained, were said to take a backward as well."""
    layers = linears(4)
    for layer in layers[:2]:
        layer.requires_grad_(False)
    model = nn.Sequential(*layers)
    products = [op.backward for each in profiled(model).blocks for op in each.ops if op.kind == "matmul"]
    assert products == [0, 0, 1, 2]  # the third one's input needs no gradient
