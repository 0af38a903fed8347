"""The search finds what pricing every plan finds, and its answers move the right way with the hardware."""

from __future__ import annotations

import itertools
import math
import resource

import numpy as np
import pytest

from shoal.cluster import presets
from shoal.cluster.facts import Cluster, Device, Link
from shoal.plan import balance
from shoal.plan.candidate import States
from shoal.plan.search import Found, Search, Waiting
from shoal.plan.shapes import Shape, Split
from shoal.plan.space import Core, Question, Spread, divisors, schedules, spreads
from shoal.plan.transformer import profile

pytestmark = pytest.mark.unit

SMALL = Shape("small", layers=4, hidden=512, heads=8, kv_heads=4, ffn=2048, vocab=32000)
LLAMA_70B = Shape("llama-70b", 80, 8192, 64, 8, 28672, 128256)
LLAMA_405B = Shape("llama-405b", 126, 16384, 128, 8, 53248, 128256)
BF16 = States(weight=4, compute=0, gradient=4, optimizer=8)


def cluster(world: int, memory: float = 80e9, inside: float = 300e9, between: float = 25e9, node: int = 4) -> Cluster:
    device = Device(
        name="device", memory_bytes=int(memory), flops_per_s={"bf16": 3e14}, matmul_share=0.7, matmul_half=64,
        attention_share=0.5, memory_bytes_per_s=2e12, memory_share=0.8, launch_s=5e-6,
    )  # fmt: skip
    return Cluster(
        name="test", device=device, devices_per_node=min(node, world), nodes=max(1, world // node),
        inside=Link(bytes_per_s=inside, base_s=1e-5, latency_s=1e-6),
        between=Link(bytes_per_s=between, base_s=2e-5, latency_s=5e-6),
    )  # fmt: skip


def search(on: Cluster, batch: int = 8, shape: Shape = SMALL, tokens: int = 1024, most_tensor: int = 8) -> Search:
    question = Question(on.world, batch, "bf16", BF16, most_tensor)
    return Search(lambda degree, sequence: profile(shape, tokens, Split(degree, sequence)), on, question)


def everything(of: Search) -> dict[tuple[int, ...], Found]:
    """The fastest plan of every mesh, by pricing all: nothing is bounded, nothing ordered."""
    best: dict[tuple[int, ...], Found] = {}
    for core in of.cores():
        starts = of.starts(core)
        fit = set()
        for spread in spreads(core.data):
            if spread.offload and spread[:3] in fit:
                continue
            found = of.fitted(core, spread, starts)
            if found is None:
                continue
            fit.add(spread[:3])
            cost = of.prices[core.tensor, core.sequence_parallel].price(found[0])
            mesh = tuple(found[0].mesh.degrees.values())
            if mesh not in best or cost.step_s < best[mesh].cost.step_s:
                best[mesh] = Found(found[0], cost, found[1])
    return best


@pytest.mark.parametrize("memory", [80e9, 1.1e9, 0.8e9])
def test_the_search_finds_what_pricing_every_plan_finds(memory: float) -> None:
    """https://github.com/microsoft/DeepSpeed/issues/2183"""
    of = search(cluster(4, memory, node=2))
    result = of.run(5)
    expected = sorted(everything(of).values(), key=lambda found: found.cost.step_s)
    assert expected, "the memory leaves nothing to compare"
    assert [found.cost.step_s for found in result.best] == pytest.approx(
        [found.cost.step_s for found in expected[: len(result.best)]]
    )
    assert len(result.best) == min(5, len(expected))
    assert {str(f.candidate.mesh) for f in result.best} == {str(f.candidate.mesh) for f in expected[: len(result.best)]}
    assert result.priced < 0.6 * result.asked


def test_plans_that_are_found_fit_their_devices() -> None:
    of = search(cluster(4, 0.8e9, node=2))
    for found in of.run(5).best:
        assert found.memory.total_bytes <= of.usable_bytes


def test_the_batch_is_the_one_that_was_asked_for() -> None:
    for found in search(cluster(8), batch=24).run(5).best:
        assert found.candidate.global_batch == 24
        assert found.candidate.world == 8


def test_more_memory_never_raises_the_predicted_time() -> None:
    steps = []
    for memory in (0.6e9, 0.8e9, 1e9, 1.5e9, 3e9, 80e9):
        best = search(cluster(4, memory, node=2)).run(1).best
        steps.append(best[0].cost.step_s if best else math.inf)
    assert math.isfinite(steps[-1])
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1], "memory never bound, so nothing was looked at"


def test_less_bandwidth_never_makes_tensor_more_attractive() -> None:
    """Against depth, where no copies are summed over the same link: those may need it more."""
    chosen, ratios = [], []
    for inside in (900e9, 300e9, 100e9, 30e9, 10e9, 3e9):
        of = search(cluster(4, inside=inside), shape=LLAMA_70B._replace(layers=4), batch=8)
        chosen.append(of.run(1, within=lambda core: core.data == 1).best[0].candidate.mesh.tensor)
        wide, deep = (of.run(1, within=lambda core, n=n: core.tensor == n and core.data == 1).best[0] for n in (4, 1))
        ratios.append(wide.cost.step_s / deep.cost.step_s)
    assert chosen == sorted(chosen, reverse=True)
    assert ratios == sorted(ratios)
    assert chosen[0] > chosen[-1], "the link never decided, so nothing was looked at"


def test_parts_of_a_plan_sum_to_its_step() -> None:
    of = search(cluster(4, 0.8e9, node=2))
    for found in everything(of).values():
        assert sum(found.cost) == pytest.approx(found.cost.step_s)
        assert min(found.cost) >= -1e-9


def test_a_bound_is_never_above_the_price() -> None:
    of = search(cluster(4))
    for core in of.cores()[::5]:
        starts = of.starts(core)
        cost = of.prices[core.tensor, core.sequence_parallel].price(
            of.fitted(core, Spread(core.data, 1, 3, False), starts)[0]
        )
        each = Waiting(of.bound(core), 0, core)
        for sharper in (each, of.cut(each), of.play(of.cut(each))):
            assert each.bound_s <= sharper.bound_s <= cost.step_s * (1 + 1e-9)


def test_offload_is_only_taken_where_nothing_fits_without() -> None:
    roomy = search(cluster(4)).run(5)
    assert not any(found.candidate.cpu_offload for found in roomy.best)


def costliest(costs: list[float], starts: tuple[int, ...]) -> float:
    return float(np.add.reduceat(np.array(costs), starts).max())


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_cuts_make_the_costliest_stage_as_cheap_as_any_cut_does(stages: int) -> None:
    costs = [5.0, 1, 1, 7, 2, 2, 3, 1]
    every = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), stages - 1)]
    least = min(costliest(costs, starts) for starts in every)
    found = balance.cut(costs, stages)
    assert found is not None and costliest(costs, found) == least
    assert balance.bottlenecks(costs, 8)[stages - 1] == least


def test_of_cuts_with_one_costliest_stage_the_most_even_is_taken() -> None:
    assert balance.cut([9.0, 2, 2, 2, 2], 3) == (0, 1, 3)


def test_cuts_leave_each_stage_its_memory() -> None:
    costs, held = [1.0] * 8, [4.0, 1, 1, 1, 1, 1, 1, 1]
    needs = [balance.spans(held)] * 2
    assert balance.cut(costs, 2) == (0, 4)
    assert balance.cut(costs, 2, needs, [5.0, 9.0]) == (0, 2)
    assert balance.cut(costs, 2, needs, [3.0, 9.0]) is None


def test_a_stage_that_is_too_full_gives_blocks_to_those_behind_it() -> None:
    of = search(cluster(2, 80e9, node=2), batch=16)
    core = Core(2, 1, False, 1, 1, 16, "1f1b", 1, "none")
    spread, starts = Spread(1, 1, 3, False), (0, 1)  # nearly all on the second rank
    free, memory = of.fitted(core, spread, starts)
    of.usable_bytes = memory.total_bytes * 0.9
    moved = of.fitted(core, spread, starts)
    assert moved is not None and moved[0].starts != free.starts
    assert moved[1].total_bytes <= of.usable_bytes


def test_pipelines_take_gpipe_only_where_1f1b_lacks_micro_batches() -> None:
    assert ("gpipe", 1) in schedules(4, 8, 2)
    assert ("gpipe", 1) not in schedules(4, 8, 4)
    assert schedules(1, 8, 4) == [(None, 1)]


def test_divisors_of_large_numbers() -> None:
    assert divisors(16384) == [2**power for power in range(15)]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "world, batch, shape, most_s", [(1024, 1024, LLAMA_70B, 10.0), (16384, 2048, LLAMA_405B, 30.0)]
)
def test_large_worlds_are_searched_in_seconds(world: int, batch: int, shape: Shape, most_s: float) -> None:
    on = presets.find("h100", world)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    result = search(on, batch, shape, 8192).run(5)
    assert result.best
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < most_s
