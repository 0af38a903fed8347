"""A step's price: by hand where a hand can, what hides behind what, and that the parts add up."""

import time

import pytest

from shoal.cluster.facts import Attention, Cluster, Device, Fit, Function, Link, Product, Stream
from shoal.core.errors import ConfigError
from shoal.plan import host
from shoal.plan.candidate import Candidate, States
from shoal.plan.collectives import Span, exposed
from shoal.plan.host import summed
from shoal.plan.mesh import Mesh
from shoal.plan.profile import Block, Op, Profile, Traffic, Weight
from shoal.plan.rates import op_seconds, product_flops_per_s, stream_seconds
from shoal.plan.shapes import Shape, Split
from shoal.plan.time import Prices, price
from shoal.plan.transformer import profile
from shoal.plan.work import straggling

pytestmark = pytest.mark.unit
DEVICE = Device(
    name="d", memory_bytes=80 * 10**9, flops_per_s={"bf16": 1e14, "fp8": 2e14}, matmul_share=0.5, attention_share=0.25,
    memory_bytes_per_s=1e12, memory_share=0.5, launch_s=1e-5,
)  # fmt: skip
NEAR = Link(bytes_per_s=100e9)
FAR = Link(bytes_per_s=10e9)
CLUSTER = Cluster(name="c", device=DEVICE, devices_per_node=8, nodes=8, inside=NEAR, between=FAR)
GPT = Shape("gpt", 8, 1024, 16, 16, 4096, 32000, gated=False)


def op(flops=0.0, moved=0.0, launches=0.0, kind="matmul", backward=2.0):
    return Op("op", kind, 1e6, 1e6, 1e6, flops, moved, 0.0, 0.0, backward, launches)


def block(path, *ops, numel=0, traffic=(), waits=0.0, carried=0.0):
    weights = (Weight(f"{path}.w", numel, 1, True, 1, False, ""),) if numel else ()
    return Block(path, path, True, ops, traffic, weights, carried, 0.0, waits=waits)


def model(*blocks):
    return Profile(name="m", precision="bf16", blocks=blocks, model_flops=1.0)


def lone(mesh=None, **values):
    return Candidate(mesh or Mesh(), values.pop("micro_batch", 1), values.pop("accumulation", 1), **values)


def test_an_operation_takes_the_longer_of_arithmetic_and_memory():
    assert op_seconds(op(flops=5e12), 2, DEVICE, "bf16") == pytest.approx((0.2, 0.4))
    assert op_seconds(op(flops=5e12, moved=5e11), 1, DEVICE, "bf16") == pytest.approx((1.0, 2.0))
    assert op_seconds(op(flops=5e12, kind="attention"), 1, DEVICE, "bf16") == pytest.approx((0.2, 0.4))
    assert op_seconds(op(moved=5e11, kind="memory", backward=1.5), 1, DEVICE, "bf16") == pytest.approx((1.0, 1.5))


def test_small_products_reach_less_of_the_peak_and_short_ones_more_so_in_a_faster_precision():
    half = DEVICE.model_copy(update={"matmul_half": 100})
    assert product_flops_per_s(half, "bf16", 100, 1e12, 1e12) == pytest.approx(0.25e14)
    assert product_flops_per_s(half, "fp8", 100, 1e12, 1e12) == pytest.approx(0.5e14)
    assert product_flops_per_s(half, "fp8", 1e12, 200, 1e12) == pytest.approx(0.5e14)
    waves = DEVICE.model_copy(update={"matmul_half": 0, "matmul_wave": 4e6})  # a quarter of a wave is lost
    assert product_flops_per_s(waves, "bf16", 1000, 1e12, 1000) == pytest.approx(
        0.5 * product_flops_per_s(waves, "bf16", 1e12, 1e12, 1e12)
    )
    assert product_flops_per_s(waves, "bf16", 100, 64, 10000) == pytest.approx(
        product_flops_per_s(waves, "bf16", 1000, 64, 1000)
    )


def test_measured_operations_go_before_constants():
    products = [Product(precision="bf16", m=64, k=64, n=64, seconds=1e-3)]
    products.append(Product(precision="bf16", m=4096, k=64, n=64, seconds=1e-3))
    streams = (Stream(bytes=1e6, seconds=1e-3), Stream(bytes=3e6, seconds=2e-3))
    known = DEVICE.model_copy(update={"products": tuple(products), "streams": streams})
    rates = [product_flops_per_s(known, "bf16", m, 64, 64) for m in (64, 512, 4096)]
    assert rates[0] == pytest.approx(2 * 64**3 / 1e-3, rel=1e-4)
    assert rates[1] == pytest.approx((rates[0] * rates[2]) ** 0.5, rel=1e-4)
    assert product_flops_per_s(known, "fp8", 64, 64, 64) == product_flops_per_s(DEVICE, "fp8", 64, 64, 64)
    assert [stream_seconds(known, nbytes) for nbytes in (5e5, 2e6, 6e6)] == pytest.approx([5e-4, 1.5e-3, 4e-3])


def test_the_device_waits_for_a_slower_host_and_for_one_that_had_to_wait():
    slow = price(model(block("b", op(flops=5e11, launches=3000))), lone(), CLUSTER)
    assert (slow.compute_s, slow.rest_s) == pytest.approx((0.03, 0.03 - 0.01 + 0.03 - 0.02))
    waits = price(model(block("b", op(flops=5e13, launches=3000), waits=100)), lone(), CLUSTER)
    assert waits.rest_s == pytest.approx(2 * 100 * 1e-5)


def test_tensor_collectives_are_exposed_and_repeated_where_blocks_are_recomputed():
    traffic = (Traffic("tensor", "all_reduce", "forward", 8e9), Traffic("tensor", "all_reduce", "backward", 8e9))
    made = model(block("b", op(flops=5e13), traffic=traffic))
    once = 2 * 8e9 * 7 / 8 / 100e9
    cost = price(made, lone(Mesh(tensor=8), accumulation=3), CLUSTER)
    assert cost.tensor_s == pytest.approx(3 * 2 * once)
    again = price(made, lone(Mesh(tensor=8), accumulation=3, recompute="full"), CLUSTER)
    assert again.tensor_s == pytest.approx(3 * 3 * once)
    assert again.compute_s == pytest.approx(cost.compute_s * 4 / 3)


def test_tensor_collectives_that_go_in_chunks_leave_the_last_chunk_and_what_products_are_too_short_for():
    """Products of 1 s and 2 s beside a gather of 0.7 s, in eight chunks; without sequence parallelism nothing hides."""
    slow = CLUSTER.model_copy(update={"device": DEVICE.model_copy(update={"overlap_slowdown": 1.1})})
    traffic = (Traffic("tensor", "all_gather", "forward", 8e10), Traffic("tensor", "all_gather", "backward", 8e10))
    made = model(block("b", op(flops=5e13), traffic=traffic)).model_copy(
        update={"tensor": 8, "sequence_parallel": True}
    )
    chunked = lone(Mesh(tensor=8), overlap_tensor=True, sequence_parallel=True)
    one = 8e10 * 7 / 8 / 100e9
    hidden = one * 7 / 8
    assert price(made, chunked, slow).tensor_s == pytest.approx(2 * (one / 8 + 0.1 * hidden))
    assert price(made, chunked._replace(overlap_tensor=False), slow).tensor_s == pytest.approx(2 * one)
    whole = made.model_copy(update={"sequence_parallel": False})
    assert price(whole, chunked, slow).tensor_s == pytest.approx(2 * one)
    short = model(block("b", op(flops=5e12), traffic=traffic)).model_copy(
        update={"tensor": 8, "sequence_parallel": True}
    )
    assert price(short, chunked, slow).tensor_s == pytest.approx(one - 0.1 * 0.9 + one - 0.2 * 0.9)


def test_experts_rows_travel_behind_another_micro_batch_where_told_so():
    """Products of 1 s and 2 s; 1.5 s for a pass's rows, of which half a second is too long for the forward."""
    traffic = tuple(Traffic("expert", "all_to_all", phase, 1.5e11 * 8 / 7) for phase in ("forward", "backward"))
    made = model(block("b", op(flops=5e13), traffic=traffic))
    plan = lone(Mesh(replicate=8), expert=8)
    assert price(made, plan, CLUSTER).expert_s == pytest.approx(3.0)
    slow = CLUSTER.model_copy(update={"device": DEVICE.model_copy(update={"overlap_slowdown": 1.1})})
    hidden = price(made, plan._replace(overlap_expert=True), slow).expert_s
    assert hidden == pytest.approx((0.5 + 0.1 * 1.0) + 0.1 * 1.5)


def test_messages_that_block_hold_up_both_ranks_of_every_pair_of_stages():
    """Four stages of 1 s and 2 s: the middle ones have two messages in each pass, as long as whole passes."""
    blocks = [block(f"{n}", op(flops=5e13)) for n in range(4)]
    plan = lone(Mesh(pipeline=4), accumulation=16, starts=(0, 1, 2, 3), schedule="1f1b")
    free, held = (price(model(*blocks), plan._replace(blocking_s=each), CLUSTER) for each in (0.0, 0.25))
    assert 4 * 0.25 * 16 < held.step_s - free.step_s < 4 * 0.25 * (16 + 3)
    assert held.pipeline_s - free.pipeline_s == pytest.approx(held.step_s - free.step_s)
    pair = lone(Mesh(pipeline=2), accumulation=16, starts=(0, 2), schedule="1f1b")
    free, held = (price(model(*blocks), pair._replace(blocking_s=each), CLUSTER) for each in (0.0, 0.25))
    assert held.step_s - free.step_s == pytest.approx(2 * 0.25 * (16 + 1))


def test_gradients_hide_behind_the_last_backward_but_for_the_last_bucket():
    made = model(block("b", op(flops=5e13), numel=10**9))
    states = States(2, 0, 4, 12)
    one = 2 * 4e9 * 7 / 8 / 100e9  # 0.07 s, behind 2 s of backward
    hidden = price(made, lone(Mesh(replicate=8), states=states, bucket_bytes=1e9), CLUSTER)
    assert hidden.replicate_s == pytest.approx(one / 4)
    bare = price(made, lone(Mesh(replicate=8), states=states, overlap_gradients=False), CLUSTER)
    assert bare.replicate_s == pytest.approx(one, rel=1e-3)


def test_a_sharded_optimizer_gathers_weights_and_behind_the_next_forward_only_if_told_so():
    made = model(block("b", op(flops=5e13), numel=10**9))
    candidate = lone(Mesh(shard=8), states=States(2, 0, 4, 12), shard_level=1, bucket_bytes=1e9)
    scatter, gather = 4e9 * 7 / 8 / 100e9, 2e9 * 7 / 8 / 100e9
    assert price(made, candidate, CLUSTER).shard_s == pytest.approx(scatter / 4 + gather)
    assert price(made, candidate._replace(overlap_weights=True), CLUSTER).shard_s == pytest.approx(scatter / 4)


@pytest.mark.parametrize("cluster", [CLUSTER, "cpu"], ids=["cuda", "cpu"])
@pytest.mark.parametrize(
    "mesh, level", [("replicate", 3), ("shard", 3), ("shard", 1)], ids=["replicate", "shard", "shard level 1"]
)
def test_frozen_weights_are_gathered_but_never_summed_scattered_or_updated(cluster, mesh, level):
    """A model of adapters was said to sum, and to update, its frozen weights: plain data parallel at 2.9 times."""
    cluster = cluster if isinstance(cluster, Cluster) else on_cpu(memory_bytes_per_s=1e30, launch_s=0)
    made = model(*(block(name, op(flops=5e9), numel=10**9) for name in "ab"))
    frozen = model(*(b._replace(weights=tuple(w._replace(trains=False) for w in b.weights)) for b in made.blocks))
    candidate = lone(Mesh(**{mesh: 8}), accumulation=2, shard_level=level)
    whole, cost = price(made, candidate, cluster), price(frozen, candidate, cluster)
    assert whole.optimizer_s > 0 and whole.shard_s + whole.replicate_s > 0
    assert cost.optimizer_s == cost.replicate_s == 0
    assert (0 if mesh == "replicate" else 0.2 * whole.shard_s) <= cost.shard_s < 0.7 * whole.shard_s + 1e-12
    mixed = model(made.blocks[0], frozen.blocks[1])
    assert cost.step_s < price(mixed, candidate, cluster).step_s < whole.step_s


def test_a_tied_weight_is_summed_and_updated_once_on_a_rank_that_reads_it_twice():
    one = model(block("a", op(flops=5e9), numel=10**9), block("b", op(flops=5e9)))
    tied = tuple(weight._replace(tie="a.w") for weight in one.blocks[0].weights)
    both = model(*(b._replace(weights=tied) for b in one.blocks))
    for candidate in (lone(Mesh(replicate=8)), lone(Mesh(pipeline=1, shard=8), shard_level=1)):
        assert price(both, candidate, CLUSTER) == pytest.approx(price(one, candidate, CLUSTER))
    apart = lone(Mesh(pipeline=2, replicate=8), accumulation=2, schedule="1f1b", starts=(0, 1))
    assert price(both, apart, CLUSTER).optimizer_s == pytest.approx(price(one, apart, CLUSTER).optimizer_s)


def test_shards_are_gathered_one_block_ahead_on_one_link():
    """Five blocks of 1 s forward and 2 s backward; a gather takes 1.5 s and a scatter 3 s on the link."""
    blocks = [block(f"{n}", op(flops=5e13), numel=10**9) for n in range(5)]
    states = States(4, 0, 8, 0)
    slow = CLUSTER.model_copy(update={"inside": Link(bytes_per_s=4e9 * 0.75 / 1.5)})
    cost = price(model(*blocks), lone(Mesh(shard=4), states=states, shard_level=3), slow)
    gather, scatter, forward, backward = 1.5, 3.0, 1.0, 2.0
    waits = 4 * (gather - forward) + 4 * (gather + scatter - backward)
    assert cost.shard_s == pytest.approx(gather + gather + waits + scatter)


def test_two_at_a_time_slow_each_other_down():
    assert exposed(3.0, 5.0, 1.0) == 0.0
    assert exposed(3.0, 5.0, 1.2) == pytest.approx(0.6)
    assert exposed(3.0, 2.0, 1.2, tail=0.5) == pytest.approx(1.0 + 0.4)
    assert exposed(3.0, 5.0, 2.0) == 3.0  # nothing is won where each waits for the other
    assert exposed(3.0, 5.0, 1.2, overlaps=False) == 3.0


def test_more_devices_wait_longer_for_the_slowest_from_a_node_on():
    assert straggling(1) == straggling(8) == 0
    assert straggling(512) == pytest.approx(0.04 * ((2 * 9 * 0.693147) ** 0.5 - (2 * 3 * 0.693147) ** 0.5), rel=1e-5)
    made = model(block("b", op(flops=5e13)))
    cost = price(made, lone(Mesh(replicate=64)), CLUSTER)
    assert cost.rest_s == pytest.approx(3.0 * straggling(64))


def candidates(mesh_values):
    for values in mesh_values:
        mesh = Mesh(**values)
        starts = (0, *(1 + 8 * n // mesh.pipeline for n in range(1, mesh.pipeline)))
        for recompute in ("none", "selective", "full"):
            yield Candidate(mesh, 2, 8, starts, "1f1b" if mesh.pipeline > 1 else None, recompute=recompute,
                            precision="bf16", states=States(2, 0, 4, 12), shard_level=1)  # fmt: skip


MESHES = [
    {"pipeline": p, "replicate": r, "shard": s, "tensor": 2}
    for p, r, s in ((1, 8, 4), (2, 1, 16), (4, 8, 1), (8, 2, 2), (1, 1, 32))
]


def test_parts_add_up_and_no_part_is_negative():
    prices = Prices(profile(GPT, 512, Split(tensor=2)), CLUSTER)
    for candidate in candidates(MESHES):
        cost = prices.price(candidate)
        assert cost.step_s == pytest.approx(sum(cost))
        assert min(cost) >= -1e-12
        works = prices.stages(candidate)
        assert cost.step_s >= 8 * max(work.total for work in works)


def test_the_closed_form_is_near_the_played_pipeline_and_never_far_below():
    prices = Prices(profile(GPT, 512, Split(tensor=2)), CLUSTER)
    for candidate in candidates(MESHES):
        exact, near = prices.price(candidate).step_s, prices.price(candidate, exact=False).step_s
        assert near == pytest.approx(exact, rel=0.12)


def test_less_bandwidth_never_makes_a_step_faster_nor_tensor_more_attractive():
    slow = CLUSTER.model_copy(update={"inside": Link(bytes_per_s=10e9), "between": Link(bytes_per_s=1e9)})
    ratios = []
    for cluster in (CLUSTER, slow):
        wide = price(profile(GPT, 512, Split(tensor=8)), lone(Mesh(tensor=8), accumulation=64), cluster).step_s
        data = price(profile(GPT, 512), lone(Mesh(replicate=8), accumulation=8), cluster).step_s
        ratios.append(wide / data)
    assert ratios[1] >= ratios[0]
    for candidate in candidates(MESHES):
        made = profile(GPT, 512, Split(tensor=2))
        assert price(made, candidate, slow).step_s >= price(made, candidate, CLUSTER).step_s


def test_a_thousand_plans_take_little_time():
    """At least 10,000 a second on a core of its own; the bound leaves room for busy machines."""
    prices = Prices(profile(GPT, 512, Split(tensor=2)), CLUSTER)
    many = list(candidates(MESHES)) * 70
    begun = time.process_time()
    for candidate in many:
        prices.price(candidate, exact=False)
    assert len(many) / (time.process_time() - begun) > 2000


def test_a_pipeline_without_a_schedule_and_a_precision_without_a_peak_are_refused():
    made = profile(GPT, 512)
    with pytest.raises(ConfigError, match="pipeline=2 and no schedule; name one"):
        price(made, lone(Mesh(pipeline=2), starts=(0, 5)), CLUSTER)
    with pytest.raises(
        ConfigError, match="d has no peak in fp32, in which the model computes.*add device.flops_per_s.fp32"
    ):
        price(profile(GPT, 512, precision="fp32"), lone(), CLUSTER)


def on_cpu(**values):
    return CLUSTER.model_copy(update={"device": DEVICE.model_copy(update={"kernels": "cpu", **values})})


def test_a_host_that_computes_pays_for_what_the_engine_does_besides():
    bare, cluster, once = op(flops=5e10), on_cpu(), host.STEP + host.MEETING
    sums = tuple(Traffic("tensor", "all_reduce", phase, 0.0) for phase in ("forward", "backward"))
    tensor = model(block("a", bare, traffic=sums), block("b", bare))
    assert price(tensor, lone(Mesh(tensor=2), accumulation=3), cluster).rest_s == pytest.approx(
        (3 * 2 * host.CALL + once) * 1e-5, rel=1e-3
    )
    stages = model(block("a", bare, carried=8.0), block("b", bare, carried=8.0))
    half = lone(Mesh(pipeline=2), accumulation=4, schedule="1f1b", starts=(0, 1))
    assert price(stages, half, cluster).rest_s == pytest.approx((4 * 2 * host.ACTION + once) * 1e-5, rel=1e-3)
    apart = half._replace(schedule="interleaved-zero-bubble")
    starts = 4 * (2 * host.ACTION + host.WEIGHTS) + once
    assert price(stages, apart, cluster).rest_s == pytest.approx(starts * 1e-5, rel=1e-3)
    prices = Prices(stages, cluster)
    first, second = prices.stages(apart)  # the first stage's backward is never taken apart
    played = prices._pipeline(apart, [first, second])[1]
    assert [time.weights / time.backward for time in played] == pytest.approx([1.0, 0.5])
    assert second.backward.launch - first.backward.launch == pytest.approx(host.WEIGHTS * 1e-5)
    assert price(stages, half, CLUSTER).rest_s == 0


def test_a_host_that_computes_hides_no_start():
    made = model(block("a", op(flops=5e10, launches=10)))
    assert price(made, lone(), CLUSTER).rest_s == 0
    assert price(made, lone(), on_cpu()).rest_s == pytest.approx(2 * 10 * 1e-5)


def test_measured_functions_and_attention_go_before_constants():
    function = Function(name="op", bytes=100.0, forward_s=2.0, backward_s=3.0)
    attention = Attention(precision="bf16", m=64, k=64, n=64, seconds=1e-3)
    device = DEVICE.model_copy(update={"functions": (function,), "attentions": (attention,)})
    asked = op(moved=50.0, kind="memory", backward=1.0)
    assert op_seconds(asked, 4, device, "bf16") == pytest.approx((4.0, 6.0))
    assert op_seconds(asked._replace(backward=0.0), 4, device, "bf16") == pytest.approx((4.0, 0.0))
    assert op_seconds(asked._replace(name="other"), 4, device, "bf16") == op_seconds(asked, 4, DEVICE, "bf16")
    rate = 2 * 64**3 / 1e-3
    assert op_seconds(op(flops=rate, kind="attention"), 3, device, "bf16") == pytest.approx((3.0, 6.0))


def test_shards_without_streams_are_gathered_in_turn():
    """Three blocks of one number in bytes per weight: gathered twice and scattered once each, nothing hidden."""
    made = model(*(block(name, op(flops=5e13), numel=8 * 10**9) for name in "abc"))
    cluster = on_cpu(memory_bytes_per_s=1e30, launch_s=0)
    candidate = lone(Mesh(shard=8), accumulation=3)
    each = 8e9 * 4 * 7 / 8 / 100e9
    assert price(made, candidate, cluster).shard_s == pytest.approx(3 * 3 * 3 * each)
    assert price(made, candidate._replace(shard_level=2), cluster).shard_s == pytest.approx(3 * 2 * each)
    both = price(made, candidate._replace(mesh=Mesh(replicate=8, shard=8)), cluster)
    assert both.replicate_s == pytest.approx(3 * 3 * 2 * (7 * 0 + 8e9 / 8 * 4 * 7 / 8 / 10e9))


def test_small_weights_and_figures_cost_starts_and_a_sum():
    made = model(block("a", numel=1), block("b", numel=1))
    slow = on_cpu(memory_bytes_per_s=1e30).model_copy(update={"inside": Link(bytes_per_s=1e9, base_s=0.5)})
    meshes = Mesh(), Mesh(replicate=2), Mesh(tensor=2), Mesh(shard=2)
    alone, copies, *meeting = (price(made, lone(mesh), slow) for mesh in meshes)
    assert alone.optimizer_s == pytest.approx(2 * host.UPDATE * 1e-5)
    assert (alone.rest_s, copies.rest_s) == (0, pytest.approx(0.5 + host.STEP * 1e-5, rel=1e-4))
    assert [one.rest_s for one in meeting] == pytest.approx([copies.rest_s + host.MEETING * 1e-5] * 2)


def test_gradients_are_summed_in_buckets_from_when_they_are_there():
    """Buckets of 1 and 3 of 4 bytes, one second each byte, after a backward of 8 seconds."""
    where = Span(2, 1, Link(bytes_per_s=1.0), None)
    asked = lone(Mesh(replicate=2), bucket_bytes=3, first_bucket_bytes=1)
    assert summed(where, 4.0, asked, 8.0, 1.0) == pytest.approx(3.0)  # 2 to 3; 8 to 11
    assert summed(where, 4.0, asked, 0.5, 1.0) == pytest.approx(4 - 0.5 * 3 / 4)
    assert summed(where, 4.0, asked, 8.0, 1.5) == pytest.approx(3.0 + 0.5 * 1.0)
    staged = asked._replace(mesh=Mesh(replicate=2, pipeline=2))
    assert summed(where, 4.0, staged, 8.0, 1.5) == pytest.approx(4.0)


def test_a_pair_that_has_the_nodes_link_to_itself_sends_as_measured_alone():
    def fit(ranks, seconds):
        return Fit(collective="p2p", ranks=ranks, latency_s=seconds, bytes_per_s=1e30)

    near, far = (Link(bytes_per_s=1e9, fits=fits) for fits in ((fit(2, 1.0),), (fit(2, 4.0), fit(4, 2.0))))
    cluster = on_cpu().model_copy(update={"devices_per_node": 2, "nodes": 2, "inside": near, "between": far})
    made = model(*(block(name, op(flops=5e10), carried=8.0) for name in "abcd"))
    four = lone(Mesh(pipeline=4), accumulation=4, schedule="1f1b", starts=(0, 1, 2, 3))
    two = lone(Mesh(pipeline=2, replicate=2), accumulation=4, schedule="1f1b", starts=(0, 2))
    prices = Prices(made, cluster)
    assert [time.send for time in prices._pipeline(four, prices.stages(four))[1]] == [1.0, 2.0, 1.0, 0.0]
    assert [time.send for time in prices._pipeline(two, prices.stages(two))[1]] == [4.0, 0.0]


def test_pairs_that_send_at_once_share_the_link_of_a_host_that_computes():
    """All pairs at once are measured both ways, and half as full as when all send one way."""

    def fit(ranks, rate):
        return Fit(collective="p2p", ranks=ranks, latency_s=0.0, bytes_per_s=rate)

    near, far = (Link(bytes_per_s=1e9, fits=fits) for fits in ((fit(2, 1e9),), (fit(2, 6.0), fit(4, 8.0))))
    made = model(*(block(name, op(flops=5e10), carried=8.0) for name in "ab"))
    two = lone(Mesh(pipeline=2, replicate=2), accumulation=4, schedule="1f1b", starts=(0, 1))
    sends = []
    for cluster in (on_cpu(), CLUSTER):
        cluster = cluster.model_copy(update={"devices_per_node": 2, "nodes": 2, "inside": near, "between": far})
        prices = Prices(made, cluster)
        sends.append(prices._pipeline(two, prices.stages(two))[1][0].send)
    assert sends == pytest.approx([2.0, 8 / 6])


def test_what_waits_for_tensor_ranks_is_no_work_on_shared_processors():
    """Half of each pass is a collective: while the other stage waits, only the computing half is twice as fast."""
    sums = tuple(Traffic("tensor", "all_reduce", phase, 1.0) for phase in ("forward", "backward"))
    link = Link(bytes_per_s=1e30, base_s=1.0)
    device = on_cpu(sharing=2.0, launch_s=0.0, memory_bytes_per_s=1e30)
    cluster = device.model_copy(update={"devices_per_node": 4, "nodes": 1, "inside": link})
    made = model(*(block(name, op(flops=5e13), traffic=sums, carried=8.0) for name in "ab"))
    candidate = lone(Mesh(pipeline=2, tensor=2), accumulation=1, schedule="gpipe", starts=(0, 1))
    prices = Prices(made, cluster)
    work = prices.stages(candidate)[0]
    assert work.forward.waits == work.backward.waits == 1.0
    computing = sum(side.total - side.waits for side in work)
    events = prices.played(candidate)
    assert max(one.end for one in events) == pytest.approx(2 * (2 * 1.0 + computing / 2) + 2.0)


def test_the_parts_of_a_step_on_shared_processors_add_up():
    made = model(*(block(name, op(flops=5e13), carried=8.0) for name in "abcd"))
    candidate = lone(Mesh(pipeline=4), accumulation=4, schedule="1f1b", starts=(0, 1, 2, 3))
    alone, shared = (price(made, candidate, on_cpu(sharing=sharing)) for sharing in (1.0, 4.0))
    assert shared.bubble_s == pytest.approx(0, abs=1e-9) and alone.bubble_s > 0
    assert shared.compute_s == pytest.approx(alone.compute_s)
