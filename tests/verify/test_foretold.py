"""Bytes of a step as the price counts them: what a rehearsal's traffic is held to."""

import pytest

from memory_runs import CASE, CPU, MICRO_BATCH, blueprint_of
from shoal.cluster.facts import Cluster, Link
from shoal.plan.candidate import Candidate
from shoal.plan.from_blueprint import profile
from shoal.plan.mesh import Mesh
from shoal.plan.profile import Block, Op, Profile, Traffic
from shoal.plan.time import Prices
from shoal.verify.foretold import work

pytestmark = pytest.mark.unit
#: A link on which a byte takes a second, so that seconds are bytes: an all-reduce among two moves its buffer once,
#: gathering and scattering half of it.
SLOW = Link(bytes_per_s=1.0)
SECONDS = Cluster(
    name="slow", device=CPU.model_copy(update={"kernels": "cuda"}), devices_per_node=8, nodes=1, inside=SLOW
)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputed_blocks_are_priced_by_what_they_send_again(recompute):
    """torch's checkpoint stops before a block's last sum: what is not sent again takes no time."""
    made = profile(*blueprint_of(CASE, MICRO_BATCH), tensor=2)
    candidate = Candidate(Mesh(tensor=2), MICRO_BATCH, 3, recompute=recompute)
    assert not all(each.repeats for block in made.blocks for each in block.traffic)
    said = work(made, candidate, 0)[1]["tensor"]
    assert Prices(made, SECONDS).price(candidate).tensor_s == pytest.approx(said)


def test_tables_that_are_handed_on_are_priced_on_their_way_and_not_back():
    """Between two stages: values of 10 bytes a sample there and as much back, 3 a sample and 5 besides there alone."""
    op = Op("op", "memory", 1, 1, 1, 0, 0, 0, 0, 2, 1)
    first, second = (Block(name, name, True, (op,), (), (), 10.0, 10.0, handed_bytes=(3.0, 5.0)) for name in "ab")
    made = Profile(name="m", blocks=(first, second), model_flops=1.0)
    candidate = Candidate(Mesh(pipeline=2), 2, 4, starts=(0, 1), schedule="1f1b")
    prices = Prices(made, SECONDS)
    times = prices._pipeline(candidate, prices.stages(candidate))[1]
    assert times[0].sends == (2 * (10 + 3) + 5, 2 * 10) and times[1].sends == (0, 0)
    assert 4 * sum(times[0].sends) == work(made, candidate, 0)[1]["pipeline"]
    exact, closed = (prices.price(candidate, exact=exact) for exact in (True, False))
    assert exact.pipeline_s > 4 * times[0].send and closed.pipeline_s == pytest.approx(4 * sum(times[0].sends) / 2)


def test_what_is_gathered_to_be_sent_on_is_priced():
    """10 bytes a sample in parts on two tensor ranks, and 3 a pass within the first stage: half of each moves."""
    op = Op("op", "memory", 1, 1, 1, 0, 0, 0, 0, 2, 1)
    traffic = (Traffic("tensor", "all_gather", "forward", 0.0, fixed_bytes=3.0),)
    first = Block("a", "a", True, (op,), traffic, (), 10.0, 10.0)
    made = Profile(
        name="m",
        tensor=2,
        blocks=(first, Block("b", "b", True, (op,), (), (), 10.0, 10.0, gathered_bytes=10.0)),
        model_flops=1.0,
    )
    candidate = Candidate(Mesh(pipeline=2, tensor=2), 2, 4, starts=(0, 1), schedule="1f1b")
    assert work(made, candidate, 0)[1]["tensor"] == 4 * (2 * 10 + 3)
    prices = Prices(made, SECONDS)
    assert prices.stages(candidate)[0].forward.tensor == pytest.approx((2 * 10 + 3) / 2)
    assert prices.price(candidate).tensor_s == pytest.approx(4 * (2 * 10 + 3) / 2)
