"""What a rank holds of weights and gradients within a step, and of a timeline's storages, by hand."""

import pytest

from shoal.blueprint.facts import Storage, Timeline
from shoal.plan.candidate import Candidate, States
from shoal.plan.mesh import Mesh
from shoal.plan.moments import holdings
from shoal.plan.profile import Block, Moment, Profile, Weight
from shoal.plan.sharded import Held, Sharded

pytestmark = pytest.mark.unit

SIZES = (100, 10, 20, 40, 200)  # a table, three blocks, a head
BLOCKS = tuple(
    Block(f"b{n}", "b", n in (1, 2, 3), (), (), (Weight(f"w{n}", size, 10, True, 1, False, ""),), 0.0, 0.0)
    for n, size in enumerate(SIZES)
)
MODEL = Profile(name="five", blocks=BLOCKS, model_flops=1.0)


@pytest.mark.parametrize(
    ("level", "number", "held"),
    [
        (3, 2, Held(4 * 300 + 4 * 20, 4 * 200 + 4 * 40 / 2, 4 * 10 + 4 * 40, True)),
        (2, 2, Held(4 * 300 + 4 * (10 + 20), 4 * 200 + 4 * 40 / 2, 4 * 40, True)),
        (3, 4, Held(4 * 300, 0, 4 * 40, True)),
        (3, 0, Held(4 * 300, 4 * 200 + 4 * (10 + 20 + 40) / 2, 4 * 10, True)),
    ],
)
def test_a_backward_of_two_shards(level: int, number: int, held: Held) -> None:
    """The root and one unit, or those that are still needed; the head's whole gradient and shards of those behind; the
    unit ahead and the one that is sent."""
    plan = Candidate(Mesh(shard=2), 1, 1, shard_level=level, states=States(4, 0, 4, 8))
    assert Sharded(MODEL, plan, range(5)).moment(number, False, 0) == held


def test_a_block_that_keeps_nothing_holds_what_its_own_operations_still_read() -> None:
    """100 kept bytes, read up to the second kernel, 10 that the next block reads, 1,000 that live from the second one
    to the third."""
    storages = (
        Storage(100, 25, 1, 10, 2, 0, None, True),
        Storage(10, 2, 3, 8, 5, 1, None, True),
        Storage(1000, 250, 2, 3, 3, 0, None, False),
    )
    timeline = Timeline(storages, (2, 4, 6), ((7, 2), (9, 1), (10, 0)), (("w", 9),))
    first, second = holdings(timeline, [0, 2], lambda storage: (float(storage.bytes), 0.0), {"w": 7.0})
    assert (first.kept, first.passed, second.kept) == ((110, 0), (10, 0), (0, 0))
    assert first.forward == (Moment(1110),) and first.bare == (Moment(1100),)
    assert first.backward == (Moment(100),)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(shard=2), Mesh(replicate=2)])
def test_a_weight_of_two_names_in_two_blocks_is_held_once(mesh: Mesh) -> None:
    """A table that is the head too, named apart in each: 70 numbers of blocks and 100 of it."""
    first, *middle, last = BLOCKS
    table, head = (Weight(name, 100, 10, True, 1, False, "table") for name in ("words", "head"))
    tied = MODEL.model_copy(
        update={"blocks": (first._replace(weights=(table,)), *middle, last._replace(weights=(head,)))}
    )
    held = Sharded(tied, Candidate(mesh, 1, 1, states=States(4, 0, 4, 8)), range(5))
    assert held.weights == 4 * 170 / mesh.shard and held.gradients == 4 * 170 / mesh.shard
    assert held.gradients_of(range(5)) == 4 * 170
