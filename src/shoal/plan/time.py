"""Seconds of a step: compute by operation, what hides behind it, the pipeline's waits, the optimizer.

A product takes the longest of its arithmetic, its memory traffic and its start (roofline, Williams et al. 2009,
https://doi.org/10.1145/1498765.1498785); collectives: collectives.py; pipelines: simulate.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.cluster.facts import Cluster, Device
from shoal.core.errors import ConfigError, nearest
from shoal.plan.candidate import Candidate, Cost
from shoal.plan.collectives import Span, over, span
from shoal.plan.profile import Block, Op, Profile
from shoal.plan.ranks import stage_rank
from shoal.plan.simulate import StageTime, play

#: Of the host's time for a forward, what it takes for the backward's kernels: twice as many, from C++.
_BACKWARD_HOST = 1.0


class Pass(NamedTuple):
    """Seconds of one block's forward or backward for one micro-batch. ``launch``: what the device waits for the host."""

    compute: float = 0.0
    launch: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)

    def __add__(self, other: Pass) -> Pass:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Part by part."""
        return Pass(*(mine + others for mine, others in zip(self, other, strict=True)))


class Gathered(NamedTuple):
    """Seconds of the collectives of one block's shards: gathering weights, scattering gradients."""

    gather: float
    scatter: float


def price(profile: Profile, candidate: Candidate, cluster: Cluster) -> Cost:
    """What one step of ``candidate`` costs. Raises ConfigError where the cluster lacks a link or a precision."""
    return Prices(profile, cluster).price(candidate)


class Prices:
    """Prices of many candidates of one profile on one cluster; blocks of one kind are priced once."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self.profile, self.cluster = profile, cluster
        self._passes: dict[tuple, tuple[Pass, Pass]] = {}
        self._stages: dict[tuple, list[tuple[Pass, Pass]]] = {}
        self._plays: dict[tuple, float] = {}
        self._numels = [sum(weight.numel for weight in block.weights) for block in profile.blocks]

    def price(self, candidate: Candidate) -> Cost:
        """What one step costs."""
        stages = self.stages(candidate)
        micro, pipeline = candidate.accumulation, candidate.mesh.pipeline
        place = _places(candidate)
        sums = [Pass() for _ in range(pipeline)]
        for stage, (forward, backward) in enumerate(stages):
            sums[place[stage]] = sums[place[stage]] + forward + backward
        rank = max(range(pipeline), key=lambda index: sums[index].total)
        work = sums[rank]
        makespan = self.makespan(candidate)
        sent = makespan - self.makespan(candidate, sends=False)
        shard, replicate = self._gradients(candidate)
        return Cost(
            compute_s=micro * work.compute,
            tensor_s=micro * work.tensor,
            context_s=micro * work.context,
            expert_s=micro * work.expert,
            pipeline_s=sent,
            shard_s=shard,
            replicate_s=replicate,
            bubble_s=makespan - micro * work.total - sent,
            optimizer_s=self._optimizer(candidate),
            rest_s=micro * work.launch,
        )

    def stages(self, candidate: Candidate) -> list[tuple[Pass, Pass]]:
        """Forward and backward of every stage, for one micro-batch."""
        key = (candidate.starts, *_work(candidate))
        if key not in self._stages:
            blocks = self.profile.blocks
            ends = [*candidate.starts[1:], len(blocks)]
            found = []
            for start, end in zip(candidate.starts, ends, strict=True):
                passes = [self._block(block, candidate) for block in blocks[start:end]]
                found.append((_sum(p[0] for p in passes), _sum(p[1] for p in passes)))
            self._stages[key] = found
        return self._stages[key]

    def _block(self, block: Block, candidate: Candidate) -> tuple[Pass, Pass]:
        key = (block.kind, *_work(candidate))
        if key not in self._passes:
            self._passes[key] = self._priced(block, candidate)
        return self._passes[key]

    def _priced(self, block: Block, candidate: Candidate) -> tuple[Pass, Pass]:
        device, micro = self.cluster.device, candidate.micro_batch
        peak = peak_flops(device, self.profile.precision)
        seconds = [op_seconds(op, micro, device, peak) for op in block.ops]
        forward = sum(one for one, _ in seconds)
        backward = sum(two for _, two in seconds)
        host = sum(op.launches for op in block.ops) * device.launch_s
        sent = {phase: self._traffic(block, candidate, phase) for phase in ("forward", "backward")}
        ahead = Pass(forward, max(0.0, host - forward), *sent["forward"])
        again = 0.0
        if candidate.recompute == "full" and block.repeated:
            again = 1.0
        elif candidate.recompute == "selective":
            again = sum(one for op, (one, _) in zip(block.ops, seconds, strict=True) if op.kind == "attention") / max(
                forward, 1e-30
            )
        compute = backward + again * forward
        launches = host * (_BACKWARD_HOST + again)
        full = 1.0 if again == 1.0 else 0.0
        back = [two + full * one for one, two in zip(sent["forward"], sent["backward"], strict=True)]
        return ahead, Pass(compute, max(0.0, launches - compute), *back)

    def _traffic(self, block: Block, candidate: Candidate, phase: str) -> list[float]:
        found = {"tensor": 0.0, "context": 0.0, "expert": 0.0}
        for traffic in block.traffic:
            if traffic.phase == phase:
                where = self._span(traffic.axis, candidate)
                found[traffic.axis] += where.seconds(traffic.collective, traffic.bytes * candidate.micro_batch)
        return list(found.values())

    def _span(self, axis: str, candidate: Candidate) -> Span:
        if axis == "expert":
            return span(self.cluster, candidate.mesh.tensor * candidate.mesh.context, candidate.expert)
        return over(self.cluster, axis, candidate.mesh)

    def makespan(self, candidate: Candidate, sends: bool = True) -> float:
        """Seconds from the first forward to the last backward; ``sends``: what goes between stages takes time.

        The same on every mesh with the same work per rank.
        """
        stages, pipeline = self.stages(candidate), candidate.mesh.pipeline
        if pipeline == 1:
            return candidate.accumulation * sum(forward.total + backward.total for forward, backward in stages)
        if candidate.schedule is None:
            raise ConfigError(f"pipeline={pipeline} and no schedule; name one, for example 1f1b")
        seconds = [0.0] * len(stages)
        if sends:
            where = over(self.cluster, "pipeline", candidate.mesh)
            carried = [self.profile.blocks[start].carried_bytes for start in candidate.starts[1:]]
            seconds = [*(where.seconds("p2p", nbytes * candidate.micro_batch) for nbytes in carried), 0.0]
        times = tuple(
            StageTime(forward.total, backward.total, backward.total / 2, send)
            for (forward, backward), send in zip(stages, seconds, strict=True)
        )
        key = (candidate.schedule, pipeline, candidate.chunks, candidate.accumulation, times)
        if key not in self._plays:
            self._plays[key] = play(*key).makespan
        return self._plays[key]

    def _gradients(self, candidate: Candidate) -> tuple[float, float]:
        """Exposed seconds of gathering shards and of reducing gradients, on the axes shard and replicate."""
        mesh, blocks = candidate.mesh, self.profile.blocks
        if candidate.data_ranks == 1:
            return 0.0, 0.0
        shard_span, copy_span = over(self.cluster, "shard", mesh), over(self.cluster, "replicate", mesh)
        shard = copies = 0.0
        ends = [*candidate.starts[1:], len(blocks)]
        place = _places(candidate)
        for rank in range(mesh.pipeline):
            mine = [
                number
                for stage, (start, end) in enumerate(zip(candidate.starts, ends, strict=True))
                if place[stage] == rank
                for number in range(start, end)
            ]
            exposed = self._exposed(candidate, mine, shard_span, copy_span)
            if sum(exposed) > shard + copies:
                shard, copies = exposed
        return shard, copies

    def _exposed(self, candidate: Candidate, blocks: Sequence[int], shard: Span, copies: Span) -> tuple[float, float]:
        """Of one rank, which holds ``blocks``. Weights in shards (level 3) are gathered one block ahead in forward and backward, gradients
        scattered behind, all on one link; else gradients are reduced behind the last micro-batch's backward."""
        states = candidate.states
        width = states.compute or states.weight
        weights = [self._numels[number] for number in blocks]
        passes = [self._block(self.profile.blocks[number], candidate) for number in blocks]
        micro = candidate.accumulation
        wire = beside = 0.0
        if shard.ranks > 1 and candidate.shard_level == 3:
            gathers = [shard.seconds("all_gather", numel * width) for numel in weights]
            scatters = [shard.seconds("reduce_scatter", numel * states.gradient) for numel in weights]
            for index, (forward, backward) in enumerate(passes):
                ahead = gathers[index + 1] if index + 1 < len(blocks) else 0.0
                wire += max(0.0, ahead - forward.total)
                behind = gathers[index - 1] if index else 0.0
                behind += scatters[index + 1] if index + 1 < len(blocks) else 0.0
                wire += max(0.0, behind - backward.total)
            wire = micro * (wire + (gathers[0] if gathers else 0.0) + (scatters[0] if scatters else 0.0))
        elif shard.ranks > 1:
            whole = sum(weights)
            reduce = shard.seconds("reduce_scatter", whole * states.gradient)
            hidden = sum(backward.total for _, backward in passes)
            last = shard.seconds("reduce_scatter", min(whole * states.gradient, candidate.bucket_bytes))
            wire = max(last, reduce - hidden) + shard.seconds("all_gather", whole * width)
        if copies.ranks > 1:
            numel = sum(weights) / candidate.mesh.shard
            reduce = copies.seconds("all_reduce", numel * states.gradient)
            hidden = sum(backward.total for _, backward in passes)
            last = copies.seconds("all_reduce", min(numel * states.gradient, candidate.bucket_bytes))
            beside = max(last, reduce - hidden)
        return wire, beside

    def _optimizer(self, candidate: Candidate) -> float:
        """Reading and writing weights and states, reading gradients, of the fullest rank."""
        blocks, states = self.profile.blocks, candidate.states
        ends = [*candidate.starts[1:], len(blocks)]
        place = _places(candidate)
        sums = [0.0] * candidate.mesh.pipeline
        for stage, (start, end) in enumerate(zip(candidate.starts, ends, strict=True)):
            sums[place[stage]] += sum(self._numels[start:end])
        nbytes = max(sums) / candidate.mesh.shard * (states.gradient + 2 * (states.optimizer + states.weight))
        device = self.cluster.device
        return nbytes / (device.memory_bytes_per_s * device.memory_share)


def peak_flops(device: Device, precision: str) -> float:
    """The device's peak in a precision. Raises ConfigError where it has none."""
    if precision not in device.flops_per_s:
        known = list(device.flops_per_s)
        raise ConfigError(f"{device.name} has no peak in {precision!r}; {nearest(precision, known)}")
    return device.flops_per_s[precision]


def op_seconds(op: Op, micro_batch: float, device: Device, peak: float) -> tuple[float, float]:
    """Seconds of forward and backward for ``micro_batch`` samples."""
    moved = (op.moved_bytes * micro_batch + op.fixed_bytes) / (device.memory_bytes_per_s * device.memory_share)
    if op.kind == "memory":
        return moved, moved * op.backward
    share = device.attention_share
    if op.kind == "matmul":
        half = device.matmul_half
        share = device.matmul_share * math.prod(
            size / (size + half) for size in (op.m * micro_batch, op.k, op.n) if size + half
        )
    arithmetic = op.flops * micro_batch / (peak * share)
    return max(arithmetic, moved), max(arithmetic * op.backward, moved * op.backward)


def _work(candidate: Candidate) -> tuple:
    """All that decides what a block costs for one micro-batch."""
    mesh = candidate.mesh
    return candidate.micro_batch, candidate.recompute, mesh.tensor, mesh.context, candidate.expert


def _sum(passes: Iterable[Pass]) -> Pass:
    columns = [sum(column) for column in zip(*passes, strict=True)]
    return Pass(*columns)


def _places(candidate: Candidate) -> list[int]:
    """The pipeline coordinate of each stage."""
    pipeline = candidate.mesh.pipeline
    return [
        stage_rank(candidate.schedule or "1f1b", stage, pipeline, candidate.chunks)
        for stage in range(len(candidate.starts))
    ]
