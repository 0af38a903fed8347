"""Seconds of a step: compute by operation, what hides behind it, the pipeline's waits, the optimizer.

Single operations: rates.py. Collectives: collectives.py. Pipelines: simulate.py. What overlaps with what:
docs/planning.md, section Time.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import NamedTuple

from shoal.cluster.facts import Cluster
from shoal.core.errors import ConfigError, nearest
from shoal.plan import host
from shoal.plan.candidate import Candidate, Cost
from shoal.plan.coded import coded
from shoal.plan.collectives import Span, bucketed, exposed, over, span
from shoal.plan.profile import Block, Numbers, Profile, numbers, sendings
from shoal.plan.ranks import stage_rank
from shoal.plan.rates import op_seconds, stream_seconds
from shoal.plan.sharded import alone
from shoal.plan.simulate import Event, StageTime, as_run, closed_form, makespan_s, play
from shoal.plan.work import Pass, Work, straggling

#: Share of a block's forward that recomputing keeps on top of nothing, by level: "selective" is every second block.
_AGAIN = {"none": 0.0, "selective": 0.5, "full": 1.0}


class Part(NamedTuple):
    """Consecutive blocks: how many of each kind, and how often one kind follows another."""

    kinds: tuple[tuple[int, int], ...]
    pairs: tuple[tuple[tuple[int, int], int], ...]
    first: int
    last: int


def price(profile: Profile, candidate: Candidate, cluster: Cluster) -> Cost:
    """What one step of ``candidate`` costs. Raises ConfigError where the cluster lacks a link or a precision."""
    return Prices(profile, cluster).price(candidate)


class Prices:
    """Prices of many candidates of one profile on one cluster; blocks of one kind are priced once."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        """``profile``: one rank's share of the model for one tensor, context and expert degree."""
        self.profile, self.cluster = profile, cluster
        used = {op.precision or profile.precision for block in profile.blocks for op in block.ops}
        if missing := sorted(used - cluster.device.flops_per_s.keys()):
            known = list(cluster.device.flops_per_s)
            raise ConfigError(
                f"{cluster.device.name} has no peak in {', '.join(missing)}, in which the model computes; "
                f"{nearest(missing[0], known)}; choose another precision or add device.flops_per_s.{missing[0]}"
            )
        names = list(dict.fromkeys(block.kind for block in profile.blocks))
        self._kind = [names.index(block.kind) for block in profile.blocks]
        self._sample = [profile.blocks[self._kind.index(kind)] for kind in range(len(names))]
        self._passes: dict[tuple, Work] = {}
        self._parts: dict[tuple, Part] = {}
        self._spans: dict[tuple, Span] = {}
        self._plays: dict[tuple, float] = {}
        self._helds: dict[tuple, Numbers] = {}

    def price(self, candidate: Candidate, exact: bool = True) -> Cost:
        """What one step costs. ``exact``: play the pipeline; else its closed form, which is exact for equal stages."""
        micro, mesh = candidate.accumulation, candidate.mesh
        stages, place = self._cut(candidate)
        works = self._works(stages, candidate)
        ranks: list[list[int]] = [[] for _ in range(mesh.pipeline)]
        for stage, rank in enumerate(place):
            ranks[rank].append(stage)
        busiest = max(ranks, key=lambda mine: sum(works[stage].total for stage in mine))
        total = Pass(*map(sum, zip(*(side for stage in busiest for side in works[stage]), strict=True)))
        makespan, sent = micro * total.total, 0.0
        if mesh.pipeline > 1:
            makespan, sent = self._makespan(candidate, works, exact)
        shard, replicate = max((self._gradients(candidate, stages, works, mine) for mine in ranks), key=sum)
        worked = micro * total.total
        if self.cluster.device.sharing > 1:  # the busiest rank may have been faster while others waited
            worked = min(worked, makespan - sent)
        share = worked / total.total if total.total else 0.0
        return Cost(
            compute_s=share * total.compute,
            tensor_s=share * total.tensor,
            context_s=share * total.context,
            expert_s=share * total.expert,
            pipeline_s=sent,
            shard_s=shard,
            replicate_s=replicate,
            bubble_s=makespan - worked - sent,
            optimizer_s=max(self._optimizer(candidate, mine) for mine in ranks),
            rest_s=share * total.launch + host.once_s(candidate, self.cluster) + straggling(candidate.world) * makespan,
        )

    def stages(self, candidate: Candidate) -> list[Work]:
        """Seconds of one micro-batch on every stage."""
        return self._works(self._cut(candidate)[0], candidate)

    def _works(self, stages: list[Part], candidate: Candidate) -> list[Work]:
        """One micro-batch on every stage; what lies in parts on the tensor ranks is gathered to be sent on."""
        works = [self._work(part, candidate, stage) for stage, part in enumerate(stages)]
        if candidate.mesh.pipeline > 1 and candidate.mesh.tensor > 1:
            where = self._span("tensor", candidate)
            for stage, start in enumerate(candidate.starts[1:]):
                forward = works[stage].forward
                nbytes = self.profile.blocks[start].gathered_bytes * candidate.micro_batch
                more = where.seconds("all_gather", nbytes) if nbytes else 0.0
                works[stage] = works[stage]._replace(forward=forward._replace(tensor=forward.tensor + more))
        return works

    def _cut(self, candidate: Candidate) -> tuple[list[Part], list[int]]:
        """The stages' parts, and the pipeline coordinate of each."""
        ends = (*candidate.starts[1:], len(self._kind))
        parts = [self._part(start, end) for start, end in zip(candidate.starts, ends, strict=True)]
        schedule = candidate.schedule or "1f1b"
        pipeline, chunks = candidate.mesh.pipeline, candidate.chunks
        return parts, [stage_rank(schedule, stage, pipeline, chunks) for stage in range(len(parts))]

    def _part(self, start: int, end: int) -> Part:
        if (start, end) not in self._parts:
            kinds = self._kind[start:end]
            pairs = Counter(zip(kinds, kinds[1:], strict=False))
            ends = (kinds[0], kinds[-1]) if kinds else (0, 0)
            self._parts[start, end] = Part(tuple(Counter(kinds).items()), tuple(pairs.items()), *ends)
        return self._parts[start, end]

    def _work(self, part: Part, candidate: Candidate, stage: int = 0) -> Work:
        """One micro-batch on a part, which is that stage."""
        adds = candidate.accumulation > 1 and candidate.shard_level < 3
        starts = host.action_starts(candidate, stage, self.cluster.device)
        key = (part.kinds, candidate.micro_batch, candidate.recompute, candidate.keep, adds, starts)
        key += (candidate.overlap_tensor, candidate.overlap_expert)
        if key not in self._passes:
            works = [(self._block(self._sample[kind], candidate), count) for kind, count in part.kinds]
            sides = [
                Pass(*(sum(work[side][index] * count for work, count in works) for index in range(len(Pass._fields))))
                for side in (0, 1)
            ]
            waits = [count * self.cluster.device.launch_s for count in starts]
            self._passes[key] = Work(
                *(side._replace(launch=side.launch + wait) for side, wait in zip(sides, waits, strict=True))
            )
        return self._passes[key]

    def _block(self, block: Block, candidate: Candidate) -> Work:
        """One micro-batch on one block: the device computes and sends in turn, and waits where the host is slower."""
        device, micro = self.cluster.device, candidate.micro_batch
        seconds = [op_seconds(op, micro, device, op.precision or self.profile.precision) for op in block.ops]
        forward, backward = (sum(each[side] for each in seconds) for side in (0, 1))  # a block may have none
        starts = [(op.launches, op.launches if op.back_launches is None else op.back_launches) for op in block.ops]
        started, back_started = (sum(each[side] for each in starts) * device.launch_s for side in (0, 1))
        sent = {phase: self._traffic(block, candidate, phase) for phase in ("forward", "backward", "again")}
        if candidate.overlap_tensor and self.profile.sequence_parallel:
            products = [each for op, each in zip(block.ops, seconds, strict=True) if op.kind == "matmul"]
            for side, phase in ((0, "forward"), (1, "backward"), (0, "again")):
                sent[phase] = self._chunked(sent[phase], sum(each[side] for each in products))
        if candidate.overlap_expert:
            for phase, computing in (("forward", forward), ("backward", backward), ("again", forward)):
                tensor, context, expert = sent[phase]
                sent[phase] = tensor, context, exposed(expert, computing, device.overlap_slowdown)
        again = (
            (_AGAIN[candidate.recompute] if candidate.recompute != "full" else 1 - candidate.keep)
            if block.repeated and block.learns
            else 0.0
        )
        back = [mine + again * other for mine, other in zip(sent["backward"], sent["again"], strict=True)]
        backward += again * forward
        adds = self.profile.precision != "fp32" and candidate.accumulation > 1 and candidate.shard_level < 3
        if adds or host.computes(device):  # into the buckets
            backward += self._accumulated(block, candidate)
        waits = block.waits * device.launch_s
        back_waits, back_started = waits * (1 + again), back_started + again * started
        if host.computes(device):  # nothing hides what it takes to start a kernel
            there, back_calls, repeated = (
                host.CALL * device.launch_s * len(sendings(block, phase)) for phase in ("forward", "backward", "again")
            )
            waits, back_waits = waits + there + started, back_waits + back_calls + again * repeated + back_started
            started = back_started = 0.0
        return Work(
            Pass(forward, waits + max(0.0, started - forward - sum(sent["forward"])), *sent["forward"]),
            Pass(backward, back_waits + max(0.0, back_started - backward - sum(back)), *back),
        )

    def _chunked(self, sent: tuple[float, float, float], computing: float) -> tuple[float, float, float]:
        """Exposed seconds where tensor collectives go chunk by chunk, one for each rank, beside the products: the last
        chunk is waited for."""
        tensor, context, expert = sent
        slowdown = self.cluster.device.overlap_slowdown
        return exposed(tensor, computing, slowdown, tensor / self.profile.tensor), context, expert

    def _accumulated(self, block: Block, candidate: Candidate) -> float:
        """Adding a micro-batch's gradients to the sum: read and written."""
        nbytes = 2 * candidate.states.gradient * numbers(block.weights).trained
        return stream_seconds(self.cluster.device, nbytes)

    def _traffic(self, block: Block, candidate: Candidate, phase: str) -> tuple[float, float, float]:
        found = {"tensor": 0.0, "context": 0.0, "expert": 0.0}
        for traffic in sendings(block, phase):
            where = self._span(traffic.axis, candidate)
            nbytes = traffic.bytes * candidate.micro_batch + traffic.fixed_bytes
            found[traffic.axis] += where.seconds(traffic.collective, nbytes, traffic.copies)
        return found["tensor"], found["context"], found["expert"]

    def _span(self, axis: str, candidate: Candidate) -> Span:
        mesh = candidate.mesh
        key = (axis, mesh.tensor, mesh.context, mesh.shard, mesh.replicate, mesh.pipeline, candidate.expert)
        if key not in self._spans:
            self._spans[key] = (
                span(self.cluster, 1, candidate.expert) if axis == "expert" else over(self.cluster, axis, mesh)
            )
        return self._spans[key]

    def makespan(self, candidate: Candidate) -> float:
        """Seconds from the first forward to the last backward, however the weights are held."""
        works = self.stages(candidate)
        if candidate.mesh.pipeline == 1:
            return candidate.accumulation * sum(work.total for work in works)
        return self._lasts(*self._pipeline(candidate, works))

    def _makespan(self, candidate: Candidate, works: list[Work], exact: bool) -> tuple[float, float]:
        """Seconds from the first forward to the last backward, and of them what sending between stages adds."""
        shape, times = self._pipeline(candidate, works)
        if not exact:
            return closed_form(*shape, times)
        whole = self._lasts(shape, times)
        free = self._pipeline(candidate._replace(blocking_s=0.0), works)[1]
        return whole, max(0.0, whole - self._lasts(shape, [time._replace(send=0.0, back=0.0) for time in free]))

    def _lasts(self, shape: tuple[str, int, int, int], times: list[StageTime]) -> float:
        key = (*shape, tuple(times))
        if key not in self._plays:  # the same for every way to hold the weights
            self._plays[key] = makespan_s(*shape, times, self.cluster.device.sharing)
        return self._plays[key]

    def _pipeline(self, candidate: Candidate, works: list[Work]) -> tuple[tuple[str, int, int, int], list[StageTime]]:
        """The schedule's numbers and each stage's times."""
        pipeline = candidate.mesh.pipeline
        if candidate.schedule is None and pipeline > 1:
            raise ConfigError(f"pipeline={pipeline} and no schedule; name one, for example 1f1b")
        blocks = self.profile.blocks
        sizes = [blocks[start].crossing(candidate.micro_batch) for start in candidate.starts[1:]]
        sends = [[self._sent(candidate, stage, nbytes) for nbytes in both] for stage, both in enumerate(sizes)]
        last = len(works) - 1
        holds = [candidate.blocking_s * ((stage > 0) + (stage < last)) for stage in range(len(works))]
        halves = [
            0.5,
            *(0.5 * blocks[start].returns for start in candidate.starts[1:]),
        ]  # into frozen stages nobody waits for a first half
        times = [
            StageTime(f.total + hold, b.total + hold, half * (b.total + hold), there, back, f.waits, b.waits)
            for (f, b), hold, half, (there, back) in zip(works, holds, halves, [*sends, (0.0, 0.0)], strict=True)
        ]
        shape = candidate.schedule or "1f1b", pipeline, candidate.chunks, candidate.accumulation
        return shape, as_run(shape[0], times)

    def _sent(self, candidate: Candidate, stage: int, nbytes: float) -> float:
        """Seconds from a stage to the next: within a node, or between two, where a rank that has the node's link to
        itself is measured apart from all of a node's ranks at once. Stages send one way: what all send in turn."""
        cluster, pipeline = self.cluster, candidate.mesh.pipeline
        schedule, each = candidate.schedule or "1f1b", candidate.world // pipeline
        here, there = (stage_rank(schedule, at, pipeline, candidate.chunks) * each for at in (stage, stage + 1))
        if here == there or not nbytes:
            return 0.0
        if here // cluster.devices_per_node == there // cluster.devices_per_node:
            return Span(2, 1, cluster.inside, cluster.between).seconds("p2p", nbytes)
        pairs = min(each, cluster.devices_per_node)
        apart, all_ranks = (Span(1, count, cluster.inside, cluster.between) for count in (cluster.world, 2))
        sent_s = (apart if each < cluster.devices_per_node else all_ranks).seconds("p2p", nbytes)
        return max(sent_s, apart.seconds("p2p", pairs * nbytes)) if host.computes(cluster.device) else sent_s

    def played(self, candidate: Candidate) -> tuple[Event, ...]:
        """What each pipeline rank does when, from the first forward to the last backward."""
        shape, times = self._pipeline(candidate, self.stages(candidate))
        return play(*shape, times, self.cluster.device.sharing).events

    def _gradients(
        self, candidate: Candidate, stages: list[Part], works: list[Work], mine: list[int]
    ) -> tuple[float, float]:
        """Exposed seconds of gathering shards and of reducing gradients, on the axes shard and replicate, of the rank
        that holds the stages ``mine``."""
        shard, copies = self._span("shard", candidate), self._span("replicate", candidate)
        if shard.ranks == 1 and copies.ranks == 1:
            return 0.0, 0.0
        states, slowdown = candidate.states, self.cluster.device.overlap_slowdown
        held = self._held(candidate, mine)
        made = held.trained * states.sent  # frozen weights have no gradients
        backward = sum(works[stage].backward.total for stage in mine)
        forward = sum(works[stage].forward.total for stage in mine)
        unit = (
            max(each.trained for each in self._numbers) * states.sent
            if candidate.shard_level > 1 and shard.ranks > 1
            else 0.0
        )
        bucket = min(made, max(candidate.bucket_bytes, unit))
        wire = beside = 0.0
        if shard.ranks > 1 and host.computes(self.cluster.device):
            units, rest = self._units(stages, mine)
            return host.in_turn(units, rest, candidate, shard, copies, self.cluster.device)
        if candidate.shard_level == 3 and shard.ranks > 1:
            wire = candidate.accumulation * sum(self._gathered(candidate, stages[stage], shard) for stage in mine)
        elif shard.ranks > 1:
            reduce = bucketed(shard, "reduce_scatter", made, bucket)
            gather = bucketed(shard, "all_gather", held.all * (states.compute or states.weight), bucket)
            tail = bucketed(shard, "reduce_scatter", bucket, bucket)
            wire = exposed(reduce, backward, slowdown, tail, candidate.overlap_gradients)
            wire += exposed(gather, forward, slowdown, 0.0, candidate.overlap_weights)
        if copies.ranks > 1 and candidate.codec is not None:
            weights = [w for stage in mine for block in self._blocks(candidate, stage) for w in block.weights]
            beside = coded(weights, candidate, copies, self.cluster.device, backward)
        elif copies.ranks > 1 and host.computes(self.cluster.device):
            beside = host.summed(copies, made, candidate, backward, slowdown)
        elif copies.ranks > 1:
            part = 1 / candidate.mesh.shard
            reduce = bucketed(copies, "all_reduce", made * part, bucket * part)
            tail = bucketed(copies, "all_reduce", bucket * part, bucket * part)
            beside = exposed(reduce, backward, slowdown, tail, candidate.overlap_gradients)
        return wire, beside

    def _gathered(self, candidate: Candidate, part: Part, where: Span) -> float:
        """Exposed seconds of one micro-batch where weights lie in shards: each block's are gathered while the block
        before computes, its gradients scattered while the next does; both on one link."""
        states, slowdown = candidate.states, self.cluster.device.overlap_slowdown
        whole = [each.all * (states.compute or states.weight) for each in self._numbers]
        gather = [where.seconds("all_gather", nbytes) for nbytes in whole]
        made = [each.trained * states.sent for each in self._numbers]
        scatter = [bucketed(where, "reduce_scatter", nbytes, nbytes) for nbytes in made]
        works = [self._block_work(kind, candidate) for kind in range(len(self._sample))]
        total = gather[part.first] + gather[part.last] + scatter[part.first]
        for (before, after), count in part.pairs:
            total += count * exposed(gather[after], works[before].forward.total, slowdown)
            total += count * exposed(gather[before] + scatter[after], works[after].backward.total, slowdown)
        return total

    def _units(self, stages: list[Part], mine: list[int]) -> tuple[list[Numbers], Numbers]:
        """Every block of a rank that is gathered by itself, and all else."""
        units, rest = list[Numbers](), [Numbers(0, 0, 0)]
        for kind, count in (pair for stage in mine for pair in stages[stage].kinds):
            (units if alone(self._sample[kind]) else rest).extend([self._numbers[kind]] * count)
        return units, Numbers(*map(sum, zip(*rest, strict=True)))

    def _block_work(self, kind: int, candidate: Candidate) -> Work:
        return self._work(Part(((kind, 1),), (), kind, kind), candidate)

    @cached_property
    def _numbers(self) -> list[Numbers]:
        """In the weights of a block, by kind."""
        return [numbers(block.weights) for block in self._sample]

    def _blocks(self, candidate: Candidate, stage: int) -> tuple[Block, ...]:
        ends = (*candidate.starts[1:], len(self._kind))
        return self.profile.blocks[candidate.starts[stage] : ends[stage]]

    def _held(self, candidate: Candidate, mine: list[int]) -> Numbers:
        """In a rank's weights: tied ones are one weight, wherever they are read."""
        ends = (*candidate.starts[1:], len(self._kind))
        key = tuple((candidate.starts[stage], ends[stage]) for stage in mine)
        if key not in self._helds:
            blocks = self.profile.blocks
            self._helds[key] = numbers(w for start, end in key for block in blocks[start:end] for w in block.weights)
        return self._helds[key]

    def _optimizer(self, candidate: Candidate, mine: list[int]) -> float:
        """Reading gradients, reading and writing weights and states, of what is trained."""
        states, device, held = candidate.states, self.cluster.device, self._held(candidate, mine)
        numel = held.trained / candidate.mesh.shard
        nbytes = numel * (states.gradient + 2 * (states.optimizer + states.weight))
        if candidate.cpu_offload and candidate.mesh.shard > 1:  # gradients go down, weights come up, the host updates
            return (numel * (states.gradient + states.weight) + nbytes) / device.host_bytes_per_s
        started = host.UPDATE * held.weights * device.launch_s * host.computes(device)
        return started + nbytes / (device.optimizer_bytes_per_s or device.memory_bytes_per_s * device.memory_share)
