"""Stage cuts: even cost first, then little to carry."""

import pytest

from shoal.blueprint.cut import cut, places
from shoal.blueprint.facts import Blueprint, Operation, Value
from shoal.core.errors import ConfigError

pytestmark = pytest.mark.unit


def chain(costs, sizes):
    """A blueprint of units u0, u1, ... in a row; unit k costs ``costs[k]`` and gives ``sizes[k]`` bytes."""
    values = [Value((1,), "float32", 4, False), *(Value((1,), "float32", size, True) for size in sizes)]
    operations = [
        Operation("linear", f"u{k}.inner", (k,), (), (k + 1,), (), (), False, cost, 0, 0)
        for k, cost in enumerate(costs)
    ]
    return Blueprint(
        values=tuple(values), operations=tuple(operations), parameters=(), inputs=(0,), outputs=(len(costs),),
        modules={}, samples=1,
    )  # fmt: skip


def units(number):
    return [f"u{k}" for k in range(number)]


@pytest.mark.parametrize(
    ("costs", "sizes", "stages", "expected"),
    [
        ([1, 1, 1, 1], [8, 8, 8, 8], 2, ("u2",)),
        ([1, 1, 1, 5], [8, 8, 8, 8], 2, ("u3",)),
        ([4, 1, 1, 1, 1], [8, 8, 8, 8, 8], 2, ("u1",)),
        ([1, 1, 1, 1, 1, 1], [8] * 6, 3, ("u2", "u4")),
        ([2, 1, 2], [4, 400, 4], 2, ("u1",)),  # both cuts cost 3: the one that carries less
        ([2, 1, 2], [400, 4, 4], 2, ("u2",)),
        ([0, 0, 0], [8, 8, 8], 3, ("u1", "u2")),
    ],
)
def test_the_costliest_stage_is_as_cheap_as_can_be_and_then_little_is_carried(costs, sizes, stages, expected):
    assert cut(chain(costs, sizes), units(len(costs)), stages) == expected


def test_a_place_tells_its_cost_and_what_crosses_before_it():
    found = places(chain([3, 5], [16, 8]), units(2))
    assert [(place.unit, place.flops, place.carried_bytes) for place in found] == [("u0", 3, 0), ("u1", 5, 16)]


def test_fewer_places_than_stages_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="the model has 2 places to cut, 3 stages were asked for; use at most 2"):
        cut(chain([1, 1], [8, 8]), units(2), 3)


def test_a_model_that_is_one_layer_itself_is_one_stage():
    """A traceback of zip."""
    assert places(chain([1], [8]), []) == []
    with pytest.raises(ConfigError, match="the model has 0 places to cut, 2 stages were asked for; use at most 1 "):
        cut(chain([1], [8]), [], 2)
