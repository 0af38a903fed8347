"""Measuring on a tiny grid: what is found is there, is positive, and is the same on every rank."""

import os
import re
import time
from typing import get_args

import pytest
import torch
from tests.harness import RankFailed, run_ranks
from tests.launch.measuring import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shoal.blueprint.traffic import starts
from shoal.cluster import operations
from shoal.cluster.bench import Bench
from shoal.cluster.facts import Cluster, Collective
from shoal.cluster.fit import line_error
from shoal.cluster.grid import grid
from shoal.cluster.machine import counts, groups
from shoal.cluster.measure import measure
from shoal.core.errors import ConfigError

KINDS = get_args(Collective)
CPU = torch.device("cpu")


@pytest.mark.ranks
def test_two_machines_of_two_ranks(tmp_path):
    sizes = tiny().model_copy(update={"sizes": 3, "largest_bytes": 64 * 1024})
    parts: list[float] = []

    def body(rank):
        cluster = measure(CPU, rank % 2, sizes, tmp_path, lambda part, text: parts.append(part))
        return cluster, parts

    found = run_ranks(body, 4)
    cluster, told = found[0]
    assert all(other == cluster for other, _ in found)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 2)
    assert told == sorted(told) and told[0] == 0 and told[-2:] == [pytest.approx(0.97), 1]  # the disk is the last 3 %
    assert [(fit.collective, fit.ranks) for fit in cluster.inside.fits] == [(kind, 2) for kind in KINDS]
    between = [(kind, 2) for kind in KINDS] + [(kind, 4) for kind in KINDS]  # p2p: a pair alone
    assert [(fit.collective, fit.ranks) for fit in cluster.between.fits] == between
    assert (cluster.inside.name, cluster.between.name) == ("gloo inside machines", "gloo between machines")
    for fit in (*cluster.inside.fits, *cluster.between.fits):
        sent = [nbytes for nbytes, _ in fit.points]
        assert sent[0] == 1024 and sent[-1] <= 64 * 1024 and sent == sorted(set(sent)) and len(sent) == 3
        assert all(nbytes % (4 * fit.ranks) == 0 for nbytes in sent)
    device = cluster.device
    assert device.kernels == "cpu" and device.name and 0 < device.reserved_bytes < device.memory_bytes
    assert [(p.precision, p.m, p.k, p.n) for p in device.products] == [
        *(("fp32", *shape) for shape in sizes.products), ("fp64", 64, 64, 64),
    ]  # fmt: skip
    assert set(device.flops_per_s) == {"fp32", "fp64"} and 1e6 < device.flops_per_s["fp32"] < 1e14
    assert [stream.bytes for stream in device.streams] == list(sizes.stream_bytes)
    shapes = [(b * h * t, d, t) for b, h, t, d in sizes.attentions]
    assert [(a.causal, a.m, a.k, a.n) for a in device.attentions] == [
        (causal, *shape) for causal in (True, False) for shape in shapes
    ]
    assert 1e-7 < device.launch_s < 1e-2 and device.overlap_slowdown >= 1
    assert device.optimizer_bytes_per_s > 0 and cluster.disk_bytes_per_s > 0
    assert set(cluster.sources) == {"device", "inside", "between", "disk_bytes_per_s"}
    assert "2 x 2 workers of 1 thread(s), gloo, torch" in cluster.sources["device"]
    assert list(tmp_path.iterdir()) == []
    cluster.write(tmp_path / "c.toml")
    assert Cluster.read(tmp_path / "c.toml") == cluster


@pytest.mark.ranks
def test_a_rank_alone_has_no_links(tmp_path):
    (cluster,) = run_ranks(lambda rank: measure(CPU, rank, tiny(), tmp_path, lambda part, text: None), 1)
    assert cluster.inside is None and cluster.between is None and cluster.world == 1
    assert cluster.device.overlap_slowdown == 1


@pytest.mark.ranks
def test_uneven_machines_and_a_folder_that_takes_no_file_are_refused(tmp_path):
    def uneven(rank):
        measure(CPU, (0, 1, 0)[rank], tiny(), tmp_path, lambda part, text: None)

    with pytest.raises(RankFailed, match="the machines have 2, 1 ranks; start equally many on each"):
        run_ranks(uneven, 3)

    def no_folder(rank):
        with pytest.raises(ConfigError) as refused:
            Bench(CPU, tiny(), lambda part, text: None).disk(tmp_path / ("" if rank else "gone"), 1)
        return str(refused.value)

    first, second = run_ranks(no_folder, 2)
    assert re.search("gone takes no file to measure the disk with: No such file.*; name another folder", first)
    assert re.search(f"{tmp_path} takes no file on another machine; name another folder", second)


@pytest.mark.ranks
def test_all_ranks_call_equally_often_and_one_without_a_call_takes_part():
    """A collective would hang where one rank made a call more; how long it takes is judged differently on each."""

    def body(rank):
        bench, calls = Bench(CPU, tiny(), lambda part, text: None), []

        def call():
            calls.append(1)
            time.sleep(0.005 * rank)

        both, count = bench.seconds(call, 0.05), len(calls)
        return both, count, bench.seconds(None if rank else call, 0.01)

    (first, count, alone), (second, other, none) = run_ranks(body, 2)
    assert count == other and count > 3
    assert 0 < first < second and second > 0.005
    assert alone > 0 and none == 0


class _Kernels(TorchDispatchMode):
    """Counts calls that are no views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.count += starts(func, any(one.untyped_storage()._cdata not in given for one in made))
        return result


@pytest.mark.unit
def test_a_chain_starts_as_many_kernels_as_are_counted():
    call, kernels = operations.chain(CPU)
    call()  # gradients are there: they are added to
    with _Kernels() as seen:
        call()
    ends = 3  # the sum, its gradient, and adding to the input's
    assert seen.count == kernels + ends


@pytest.mark.unit
def test_a_product_is_three_kernels_without_the_sum_of_a_bias():
    def flows(call):
        with FlopCounterMode(display=False) as counted, _Kernels() as seen:
            call()
        return counted.get_total_flops(), seen.count

    flops, kernels = flows(operations.product(CPU, torch.float32, (64, 32, 16)))
    assert (flops, kernels) == (3 * 2 * 64 * 32 * 16, 3)


@pytest.mark.ranks
def test_ranks_that_share_a_core_are_timed_by_turns():
    """Timed at once, a lap shorter than a time slice has the core to itself or not at all."""

    def body(rank):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda pid: {0})
            bench, spans = Bench(CPU, tiny(), lambda part, text: None, rank, 2), []

        def call():
            start_s = time.monotonic()
            time.sleep(0.02)
            spans.append((start_s, time.monotonic()))

        alone_s = bench.computing(call, 0.1)
        mine = list(spans)
        ended = iter([1.0, *(1.0, 1.0, 2.5) * 3])  # one lap; thrice each turn's, and all at once
        bench._ended = lambda call, count: next(ended)
        bench.crowd(1.0)
        return alone_s, mine, bench.computing(call, 0.1) / alone_s, bench.sharing(0.1)

    (first_s, mine, crowding, sharing), (second_s, other, _, _) = run_ranks(body, 2)
    assert max(end for _, end in mine) < min(start for start, _ in other)
    assert first_s == second_s == pytest.approx(0.02, rel=0.5)
    assert crowding == pytest.approx(2.5, rel=0.5)
    assert sharing == 2.5  # alone a rank is so much faster


@pytest.mark.ranks
def test_a_collective_is_timed_after_work_that_is_taken_off_again():
    def body(rank):
        bench = Bench(CPU, tiny(), lambda part, text: None)
        done: list[str] = []

        def work():
            done.append("work")
            time.sleep(0.02)

        def call():
            done.append("call")
            time.sleep(0.02)

        bench._work, bench._all_work_s = work, 0.02
        found = bench._met(call, bench._work_before(True, 0.1), 0.2)
        pairs = done[done.index("call") - 1 :]
        return found, set(pairs[::2]), set(pairs[1::2]), bench._work_before(rank == 0, 0.1)

    for rank, (found, before, after, apart_s) in enumerate(run_ranks(body, 2)):
        assert found == pytest.approx(0.02, rel=0.5) and (before, after) == ({"work"}, {"call"})
        assert (apart_s > 0.015) == (rank == 0)  # where not all take part, it is timed among those that do


@pytest.mark.unit
def test_the_usual_grid_has_what_is_promised():
    usual = grid("cpu")
    assert usual.sizes >= 8 and usual.smallest_bytes == 1024 and usual.largest_bytes == 256 * 2**20
    assert len(usual.products) >= 27 and {"fp64", "bf16", "fp16"} == set(usual.precisions)
    assert grid("cuda").main_precision == "bf16"


@pytest.mark.unit
def test_groups_inside_and_between_machines():
    assert groups(8, 2, 1, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(8, 3, 1, 4) == [[0, 1, 2], [4, 5, 6]]
    assert groups(8, 2, 4, 2) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups(12, 3, 4, 3) == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert groups(12, 2, 4, 3) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert counts([0, 1, 2, 0, 1, 2]) == [3, 3] and counts([0, 1, 0]) == [2, 1]


@pytest.mark.nightly
@pytest.mark.ranks
def test_fits_of_the_usual_grid_describe_their_points(tmp_path):
    found = run_ranks(lambda rank: measure(CPU, rank, grid("cpu"), tmp_path, lambda part, text: None), 2, 300)
    for fit in found[0].inside.fits:
        assert len(fit.points) >= 8
        assert line_error(fit.points, fit.latency_s, fit.bytes_per_s) < 0.5
