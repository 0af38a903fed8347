"""Seconds of collectives: rings and trees by hand, measured lines before formulas, which links a group spans."""

import pytest

from shoal.cluster.facts import Cluster, Device, Fit, Link
from shoal.core.errors import ConfigError
from shoal.plan.collectives import Span, over, places, seconds, span
from shoal.plan.mesh import Mesh

pytestmark = pytest.mark.unit
MB = 1e6
LINK = Link(bytes_per_s=10e9, share=0.5, base_s=1e-5, latency_s=1e-6)
FAR = Link(bytes_per_s=1e9, base_s=2e-5, latency_s=1e-5)
DEVICE = Device(
    name="d", memory_bytes=10**10, flops_per_s={"bf16": 1e14}, matmul_share=0.5, attention_share=0.5,
    memory_bytes_per_s=1e12, memory_share=0.8, launch_s=1e-6,
)  # fmt: skip
CLUSTER = Cluster(name="c", device=DEVICE, devices_per_node=8, nodes=4, inside=LINK, between=FAR)


def test_a_ring_gather_sends_all_but_ones_own_part():
    by_hand = 1e-5 + 7 * 1e-6 + 100 * MB * 7 / 8 / 5e9
    assert seconds("all_gather", 8, 100 * MB, LINK) == pytest.approx(by_hand)
    assert seconds("reduce_scatter", 8, 100 * MB, LINK) == pytest.approx(by_hand)


def test_a_large_all_reduce_is_a_ring_and_a_small_one_among_many_a_tree():
    ring = 1e-5 + 2 * 7 * 1e-6 + 2 * 100 * MB * 7 / 8 / 5e9
    assert seconds("all_reduce", 8, 100 * MB, LINK) == pytest.approx(ring)
    assert seconds("all_reduce", 1024, 1.0, LINK) == pytest.approx(1e-5 + 2 * 10 * 1e-6, rel=1e-3)


def test_sending_to_one_rank_takes_one_hop_and_a_group_of_one_no_time():
    assert seconds("p2p", 2, 5 * MB, LINK) == pytest.approx(1e-5 + 1e-6 + 1e-3)
    assert seconds("all_reduce", 1, 5 * MB, LINK) == 0.0


def test_a_measured_line_goes_before_the_ring():
    """Gloo's reduce-scatter moves as much as its all-reduce, which no ring's formula says."""
    gloo = LINK.model_copy(
        update={"fits": (Fit(collective="reduce_scatter", ranks=2, latency_s=1e-3, bytes_per_s=1e8),)}
    )
    assert seconds("reduce_scatter", 2, 10 * MB, gloo) == pytest.approx(0.101)
    wider = seconds("reduce_scatter", 4, 10 * MB, gloo)  # 3 steps for 1, and 3/4 for 1/2 of the buffer
    assert wider == pytest.approx(3e-3 + 0.1 * 1.5)
    assert seconds("all_gather", 2, 10 * MB, gloo) == seconds("all_gather", 2, 10 * MB, LINK)


def test_tensor_fills_a_node_before_shards_do():
    mesh = Mesh(pipeline=2, shard=4, tensor=4)
    assert over(CLUSTER, "tensor", mesh)[:2] == (4, 1)
    assert over(CLUSTER, "shard", mesh)[:2] == (2, 2)
    assert over(CLUSTER, "pipeline", mesh)[:2] == (1, 2)
    assert span(CLUSTER, 1, 32)[:2] == (8, 4)


def test_a_group_over_nodes_takes_the_slower_link_and_one_hop_from_each_node():
    wide = Span(8, 4, LINK, FAR)
    by_hand = 2e-5 + 4 * 1e-5 + 27 * 1e-6 + 100 * MB * 31 / 32 / min(5e9, 8 * 1e9)
    assert wide.seconds("all_gather", 100 * MB) == pytest.approx(by_hand)
    few = Span(2, 4, LINK, FAR)  # two cards a node are slower than a device's own link
    assert few.seconds("all_gather", 100 * MB) == pytest.approx(2e-5 + 4e-5 + 3e-6 + 100 * MB * 7 / 8 / 2e9)
    alone = Span(1, 4, LINK, FAR)
    assert alone.seconds("all_gather", 100 * MB) == pytest.approx(2e-5 + 3e-5 + 100 * MB * 3 / 4 / 1e9)


def test_a_row_for_several_experts_of_a_node_goes_there_once():
    wide = Span(8, 4, LINK, FAR)
    once, copies = wide.seconds("all_to_all", 800 * MB, 1), wide.seconds("all_to_all", 800 * MB, 8)
    assert once == pytest.approx(2e-5 + 3e-5 + 800 * MB * 3 / 4 / 1e9)
    assert copies == pytest.approx(2e-5 + 3e-5 + 100 * MB * 3 * (1 - 0.75**8) / 1e9)


def test_an_all_to_all_in_a_node_is_no_ring_and_sends_a_row_to_each_rank_once():
    once = seconds("all_to_all", 8, 100 * MB, LINK)
    assert once == pytest.approx(1e-5 + 1e-6 + 100 * MB * 7 / 8 / 5e9)
    near = Span(8, 1, LINK, FAR)
    assert near.seconds("all_to_all", 100 * MB) == pytest.approx(once)
    reached = places(8, 8)
    assert reached == pytest.approx(8 * (1 - (7 / 8) ** 8)) and places(8, 1) == pytest.approx(1)
    copies = near.seconds("all_to_all", 100 * MB, 8)
    assert copies == pytest.approx(1.1e-5 + 100 * MB * reached / 8 * 7 / 8 / 5e9)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"])
def test_more_bytes_and_less_bandwidth_never_take_less_time(collective):
    for inside, across in ((2, 1), (8, 1), (1, 4), (8, 4)):
        times = [Span(inside, across, LINK, FAR).seconds(collective, nbytes) for nbytes in (0, 1e3, 1e6, 1e9)]
        assert times == sorted(times)
        slow = FAR.model_copy(update={"bytes_per_s": 1e8})
        assert Span(inside, across, LINK, slow).seconds(collective, 1e9) >= times[-1]


def test_a_missing_link_is_refused_by_name():
    lone = CLUSTER.model_copy(update={"between": None})
    with pytest.raises(ConfigError, match="no link between nodes.*add \\[between\\]"):
        over(lone, "tensor", Mesh(tensor=16)).seconds("all_reduce", 1.0)


def test_all_ranks_of_several_nodes_go_by_what_was_measured_of_them():
    line = Fit(collective="all_reduce", ranks=32, latency_s=1.0, bytes_per_s=1e9)
    pair = Fit(collective="all_reduce", ranks=4, latency_s=3.0, bytes_per_s=1e9)
    far = FAR.model_copy(update={"fits": (pair, line)})
    cluster = CLUSTER.model_copy(update={"between": far})
    assert span(cluster, 1, 32).seconds("all_reduce", 1e9) == pytest.approx(2.0)
    assert span(cluster, 1, 16).seconds("all_reduce", 1e9) == span(CLUSTER, 1, 16).seconds("all_reduce", 1e9)
    assert span(cluster, 1, 32).seconds("all_gather", 1e9) == span(CLUSTER, 1, 32).seconds("all_gather", 1e9)
    assert span(cluster, 8, 4).seconds("all_reduce", 1e9) == pytest.approx(4.0)
