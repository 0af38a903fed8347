"""The best plans for a model on a cluster: every way to run it, bounded from below, the promising ones priced.

Best first: a core (space.py) waits under a lower bound of its step, which is sharpened once by its own stage cuts; it
is priced when no other can be faster, and the search ends when the bounds pass the best that are wanted. So what is
found is what pricing everything would find (a test holds it to that). Besides: what does not divide is never made; what
cannot be held even with all its state shared out evenly is dropped unpriced; offload is not asked while the same plan
fits without, as it is never faster.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import NamedTuple

import numpy as np

from shoal.cluster.facts import Cluster
from shoal.plan import balance, host
from shoal.plan.candidate import Candidate, Cost, Memory
from shoal.plan.flight import in_flight
from shoal.plan.memory import holding, ranks, recomputed
from shoal.plan.messages import UNDER_WAY
from shoal.plan.profile import Block, Profile
from shoal.plan.ranks import stage_rank
from shoal.plan.sharded import alone
from shoal.plan.space import RECOMPUTE, Core, Question, Spread, candidate, cores, degrees, spreads
from shoal.plan.time import Prices
from shoal.plan.work import straggling

#: Share of a device's memory that a plan may fill: the rest is what no model foresees (fragmentation, other processes).
USABLE = 0.95
#: Schedules that run backwards in halves.
HALVES = ("interleaved-zero-bubble", "zbv", "dualpipev")
#: How often a cut that is too full is moved before the layout counts as too large.
_MOVES = 4
#: A core whose least is under this share of the room is taken to fit until it is priced.
_SURELY = 0.05

#: Tensor degree and sequence parallelism -> one rank's profile, or why there is none.
Profiles = Callable[[int, bool], Profile | str]
Only = Callable[[Core, Spread], bool]
Within = Callable[[Core], bool]


class Found(NamedTuple):
    """A plan that fits, and what it costs."""

    candidate: Candidate
    cost: Cost
    memory: Memory


class Result(NamedTuple):
    """``best``: fastest first, each of another mesh. ``asked``: how many plans there are; ``priced``: how many had to
    be."""

    best: tuple[Found, ...]
    asked: int
    priced: int


class Waiting(NamedTuple):
    """A core in the queue; ``starts`` once its stages are cut, ``played`` once its schedule is."""

    bound_s: float
    number: int
    core: Core
    starts: tuple[int, ...] = ()
    played: bool = False


class Search:
    """Searches over one model on one cluster; what is priced is kept between them. ``refused``: tensor degrees that
    the model does not take, and why. Raises ConfigError where the cluster lacks a link or the precision."""

    def __init__(self, profiles: Profiles, cluster: Cluster, question: Question) -> None:
        self.cluster, self.question = cluster, question
        self.usable_bytes = cluster.device.memory_bytes * USABLE
        self.slowest = 1 + straggling(question.world)
        self.profiles: dict[tuple[int, bool], Profile] = {}
        self.refused: dict[int, str] = {}
        for degree, sequence in degrees(question):
            if (degree, True) in self.profiles and not question.thorough:
                continue
            made = profiles(degree, sequence)
            if isinstance(made, Profile):
                self.profiles[degree, sequence] = made
            elif not sequence:
                self.refused[degree] = made
        self.prices = {key: Prices(made, cluster) for key, made in self.profiles.items()}
        self._passes: dict[tuple, np.ndarray] = {}
        self._waits: dict[tuple, float] = {}
        self._once: dict[bool, float] = {}
        self._bottlenecks: dict[tuple, np.ndarray] = {}
        self._cuts: dict[tuple, tuple[int, ...]] = {}
        self._left: dict[tuple, np.ndarray] = {}
        self._units: dict[tuple, np.ndarray] = {}
        self.priced = 0

    def with_memory(self, times: float) -> Search:
        """The same where devices have ``times`` their memory; what was priced here is not priced again."""
        device, made = self.cluster.device, copy(self)
        larger = device.model_copy(update={"memory_bytes": int(device.memory_bytes * times)})
        made.cluster = self.cluster.model_copy(update={"device": larger})
        made.usable_bytes = self.usable_bytes * times
        return made

    def cores(self) -> list[Core]:
        """Every core of the question."""
        places = {key: len(profile.blocks) for key, profile in self.profiles.items()}
        repeated = any(block.repeated for profile in self.profiles.values() for block in profile.blocks)
        return cores(self.question, places, repeated)

    def run(
        self, top: int = 5, only: Only | None = None, within: Within | None = None, below_s: float = math.inf
    ) -> Result:
        """The ``top`` best plans, each of another mesh unless one is asked for, of all or of those that ``only`` and
        ``within`` let through and that take less than ``below_s``."""
        asked_for = [core for core in self.cores() if within is None or within(core)]
        waiting = [Waiting(self.bound(core), number, core) for number, core in enumerate(asked_for)]
        mesh = self.question.mesh
        asked, before = sum(len(list(spreads(each.core.data, mesh))) for each in waiting), self.priced
        heapq.heapify(waiting)
        best: dict[tuple, Found] = {}  # by mesh; where one is asked for, by plan
        while waiting:
            each = heapq.heappop(waiting)
            worst_s = min(below_s, _worst(best, top))
            if each.bound_s >= worst_s:
                break
            if only is None and _known(best, each):
                continue
            if not each.starts:
                if self.left(each.core).sum() <= self.usable_bytes * each.core.pipeline:
                    heapq.heappush(waiting, self.cut(each))
                continue
            if not each.played:
                if self.fits(each.core, each.starts):
                    heapq.heappush(waiting, self.play(each))
                continue
            for found in self.plans(each.core, each.starts, only, worst_s, best):
                key = tuple(found.candidate.mesh.degrees.values()) if mesh is None else found.candidate
                if key not in best or found.cost.step_s < best[key].cost.step_s:
                    best[key] = found
        ordered = sorted(best.values(), key=lambda found: found.cost.step_s)
        return Result(tuple(ordered[:top]), asked, self.priced - before)

    # What a core costs at least

    def passes(self, core: Core) -> np.ndarray:
        """(blocks, 2): seconds of forward and backward of each block for one micro-batch."""
        key = (core.tensor, core.sequence_parallel, core.micro_batch, core.recompute)
        if key not in self._passes:
            own = core.tensor, core.sequence_parallel
            starts = tuple(range(len(self.profiles[own].blocks)))
            alone = core._replace(pipeline=1, data=1, accumulation=1, schedule=None, chunks=len(starts))
            stages = self.prices[own].stages(candidate(self.question, alone, Spread(1, 1, 3, False), starts))
            self._passes[key] = np.array([(forward.total, backward.total) for forward, backward in stages])
            self._waits[key] = sum(forward.waits + backward.waits for forward, backward in stages)
        return self._passes[key]

    def once_s(self, core: Core) -> float:
        """Seconds that each of its plans costs once a step, at least."""
        plain = core.data == self.question.world
        if plain not in self._once:
            made = candidate(self.question, core, Spread(core.data, 1, 3, False), (0,))
            self._once[plain] = host.once_s(made, self.cluster)
        return self._once[plain]

    def bound(self, core: Core) -> float:
        """Seconds that a step takes at least: the busiest rank's work, whatever the cuts, the wait for the slowest
        device, and what comes once. Ranks that share processors leave them to others while they wait."""
        seconds = self.passes(core).sum(axis=1)
        busy = seconds.sum() / core.pipeline
        if core.pipeline > 1:
            key = (core.tensor, core.sequence_parallel, core.micro_batch, core.recompute)
            busy -= self._waits[key] / core.pipeline * (self.cluster.device.sharing > 1)
            if key not in self._bottlenecks:
                self._bottlenecks[key] = balance.bottlenecks(seconds, len(seconds))
            busy = max(busy, self._bottlenecks[key][core.stages - 1] / self.cluster.device.sharing)
        return core.accumulation * float(busy) * self.slowest + self.once_s(core)

    def cut(self, each: Waiting) -> Waiting:
        """With stages, and a bound by them: a rank waits for the first micro-batch to come through the stages before
        it and, unless it has weights' gradients left to work out then, for its last one to go back."""
        core, starts = each.core, self.starts(each.core)
        if core.pipeline == 1 or self.cluster.device.sharing > 1:  # while the others wait, a rank may be faster
            return each._replace(starts=starts)
        stages = np.add.reduceat(self.passes(core), starts, axis=0)
        busy = np.zeros(core.pipeline)
        for stage, seconds in enumerate(stages.sum(axis=1)):
            busy[stage_rank(core.schedule or "", stage, core.pipeline, core.chunks)] += seconds
        whole = core.schedule in ("gpipe", "1f1b", "looped-bfs", "interleaved-1f1b")
        ramp = stages[: core.pipeline, 0] + (stages[: core.pipeline, 1] if whole else 0.0)
        before = np.concatenate([[0.0], np.cumsum(ramp)[:-1]])
        bound_s = float((core.accumulation * busy + before).max()) * self.slowest + self.once_s(core)
        return each._replace(starts=starts, bound_s=max(bound_s, each.bound_s))

    def play(self, each: Waiting) -> Waiting:
        """With a bound by its schedule, which lasts as long however the weights are held."""
        made = candidate(self.question, each.core, Spread(each.core.data, 1, 3, False), each.starts)
        makespan_s = self.prices[each.core.tensor, each.core.sequence_parallel].makespan(made)
        bound_s = makespan_s * self.slowest + self.once_s(each.core)
        return each._replace(played=True, bound_s=max(bound_s, each.bound_s))

    # Stages

    def starts(self, core: Core) -> tuple[int, ...]:
        """The first block of every stage, by cost alone."""
        if core.stages == 1:
            return (0,)
        key = (core.tensor, core.sequence_parallel, core.micro_batch, core.recompute, core.stages)
        if key not in self._cuts:
            found = balance.cut(self.passes(core).sum(axis=1), core.stages)
            assert found is not None  # there are no more stages than blocks
            self._cuts[key] = found
        return self._cuts[key]

    def fitted(self, core: Core, spread: Spread, starts: tuple[int, ...]) -> tuple[Candidate, Memory] | None:
        """The plan and its fullest rank, with cuts moved until every rank has room; None where none has."""
        profile, device = self.profiles[core.tensor, core.sequence_parallel], self.cluster.device
        made = candidate(self.question, core, spread, starts)
        if self.least_states(profile, made) > self.usable_bytes:
            return None
        room_bytes = self.usable_bytes * core.pipeline
        held = ranks(profile, made, device, room_bytes)
        shrunk = np.ones(core.pipeline)
        for _ in range(_MOVES):
            if len(held) < core.pipeline:  # too much for all of them together, wherever the cuts are
                return None
            full = np.array([each.total_bytes for each in held]) / self.usable_bytes
            if full.max() <= 1:
                return made, max(held, key=lambda each: each.total_bytes)
            if core.pipeline == 1 or full.sum() > core.pipeline:
                return None
            shrunk = np.where(full > 1, shrunk / full, shrunk)
            needs, room = balance.needs(profile, core, made, held, self.left(core), self.usable_bytes * shrunk)
            found = balance.cut(self.passes(core).sum(axis=1), core.stages, needs, room)
            if found is None or found == made.starts:
                return None
            made = made._replace(starts=found)
            held = ranks(profile, made, device, room_bytes)
        return None

    @staticmethod
    def least_states(profile: Profile, made: Candidate) -> float:
        """Bytes of weights, gradients and optimizer state that the fullest rank holds at least."""
        if made.cpu_offload:
            return 0.0
        states, shards, level = made.states, made.mesh.shard, made.shard_level
        trained = states.gradient / (shards if level >= 2 else 1) + states.optimizer / shards
        frozen = states.weight / (shards if level == 3 else 1)
        return (profile.parameters * frozen + profile.trained * trained) / made.mesh.pipeline

    def fits(self, core: Core, starts: tuple[int, ...]) -> bool:
        """Whether any way to hold the weights does: the one that holds least."""
        share = self.least_held(core, starts) / (self.usable_bytes * core.pipeline)
        if share > 1:
            return False
        if share < _SURELY:  # should it not, its plans are priced in vain
            return True
        spread = Spread(1, core.data, 3, core.data > 1)
        return self.fitted(core, spread, starts) is not None

    def least_held(self, core: Core, starts: tuple[int, ...]) -> float:
        """Bytes that all of a pipeline's ranks hold at least at their fullest moments, however weights are held: what
        waits for backward, with what came in for it from another rank and the gradient that came back first; or at the
        step's end whole gradients and the last messages; and whole weights, which shards are gathered to as long as a
        pipeline runs."""
        left = np.add.reduceat(self.left(core), starts)
        if core.pipeline == 1:
            return float(left.sum()) + self.cluster.device.reserved_bytes
        if core.schedule in HALVES:
            left[-1] -= self.left(core)[-1]  # what the loss keeps is given up with the first half
        place = [stage_rank(core.schedule or "", stage, core.pipeline, core.chunks) for stage in range(core.stages)]
        blocks = self.profiles[core.tensor, core.sequence_parallel].blocks
        back = np.zeros(core.stages + 1)  # gradients into each stage from the one after, of a micro-batch
        message = np.full(core.pipeline, math.inf)  # the least that a rank sends or receives
        for stage, start in enumerate(starts[1:], 1):
            back[stage] = blocks[start].crossing(core.micro_batch)[1]
            if core.schedule in HALVES and not blocks[start].returns:
                left[stage] = 0.0  # its first half is all of its backward: nothing waits for a second
            if place[stage] != place[stage - 1]:
                left[stage] += blocks[start].carried_bytes * core.micro_batch
                message[place[stage - 1 : stage + 1]] = np.minimum(message[place[stage - 1 : stage + 1]], back[stage])
        waits = np.zeros(core.pipeline)
        for rank in range(core.pipeline):
            stages = [stage for stage, at in enumerate(place) if at == rank]
            waits[rank] = (
                left[stages] @ in_flight(core.schedule, core.pipeline, core.chunks, core.accumulation, rank)
                + back[stages[-1] + 1]
            )
        weights, gradients = self.units(core, starts, place)
        ends = gradients * (core.accumulation > 1) + message * min(core.accumulation, UNDER_WAY)
        return float((np.maximum(waits, ends) + weights).sum()) + self.cluster.device.reserved_bytes * core.pipeline

    def units(self, core: Core, starts: tuple[int, ...], place: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(ranks,): bytes of weights in the blocks that are gathered by themselves, as long as a pipeline runs, and of
        their gradients at its end; all their state where nobody shares it."""
        key = core.tensor, core.sequence_parallel
        if key not in self._units:
            blocks = self.profiles[key].blocks
            self._units[key] = np.array([_numel(block) for block in blocks], float)
        numels = np.zeros((core.pipeline, 2))
        np.add.at(numels, place, np.add.reduceat(self._units[key], starts, axis=0))
        whole, trained, states = *numels.T, self.question.states
        if core.data == 1:
            return whole * states.weight + trained * (states.gradient + states.optimizer), np.zeros(core.pipeline)
        return whole * states.weight, trained * states.gradient

    def plans(
        self, core: Core, starts: tuple[int, ...], only: Only | None, worst_s: float, best: Mapping[tuple, Found]
    ) -> Iterable[Found]:
        """A core's plans that fit and take less than ``worst_s`` and the ``best`` of their mesh, cuts moved by memory
        too, but none that is too slow with the best cuts; offload where it must."""
        prices = self.prices[core.tensor, core.sequence_parallel]
        fit: set[tuple[int, int, int]] = set()
        for spread in spreads(core.data, self.question.mesh):
            if (only is not None and not only(core, spread)) or (spread.offload and spread[:3] in fit):
                continue
            plain = candidate(self.question, core, spread, starts)
            self.priced += 1
            cost = prices.price(plain)
            known = best.get(_degrees(core, spread))
            if cost.step_s >= (worst_s if known is None else min(worst_s, known.cost.step_s)):
                fit.add(spread[:3])  # or not: with offload it would be no faster
                continue
            found = self.fitted(core, spread, starts)
            if found is None:
                continue
            fit.add(spread[:3])
            made, memory = found
            yield Found(made, cost if made.starts == starts else prices.price(made), memory)

    def left(self, core: Core) -> np.ndarray:
        """(blocks,): bytes that the forward of a micro-batch leaves for backward."""
        key = (core.tensor, core.sequence_parallel, core.recompute, core.micro_batch)
        if key not in self._left:
            profile = self.profiles[core.tensor, core.sequence_parallel]
            alone = core._replace(pipeline=1, data=1, accumulation=1, schedule=None, chunks=1)
            chosen = recomputed(profile, candidate(self.question, alone, Spread(1, 1, 3, False), (0,)))
            self._left[key] = np.array([_left(block, at in chosen, core) for at, block in enumerate(profile.blocks)])
        return self._left[key]

    def least(self, within: Within | None = None, axis: str = "shard") -> tuple[Candidate, Memory] | None:
        """What needs the least memory of all, or of the cores ``within``: the smallest micro-batch, most recomputed,
        all shared out, data ranks along ``axis`` unless a mesh is asked for. None where nothing divides."""
        cores = [c for c in self.cores() if c.micro_batch == 1 and c.chunks == 1 and (within is None or within(c))]
        most = max((RECOMPUTE.index(core.recompute) for core in cores), default=0)
        found = []
        for core in cores:
            if RECOMPUTE.index(core.recompute) < most or core.schedule in ("interleaved-zero-bubble", "gpipe"):
                continue
            shard = self.question.mesh.shard if self.question.mesh else core.data if axis == "shard" else 1
            made = candidate(self.question, core, Spread(core.data // shard, shard, 3, shard > 1), self.starts(core))
            held = ranks(self.profiles[core.tensor, core.sequence_parallel], made, self.cluster.device)
            found.append((made, max(held, key=lambda each: each.total_bytes)))
        return min(found, key=lambda each: each[1].total_bytes, default=None)


def _numel(block: Block) -> tuple[int, int]:
    """Numbers in a block's weights, and in those that are trained, where it is gathered by itself; else none."""
    if not alone(block):
        return 0, 0
    sizes = [(weight.numel, weight.numel * weight.trains) for weight in block.weights if weight.rows]
    return sum(whole for whole, _ in sizes), sum(trained for _, trained in sizes)


def _degrees(core: Core, spread: Spread) -> tuple[int, ...]:
    """Of the mesh, in its order."""
    return core.pipeline, spread.replicate, spread.shard, 1, core.tensor


def _known(best: Mapping[tuple, Found], each: Waiting) -> bool:
    """Whether of each mesh that a core's plans have one is known that is as fast as they can be."""
    found = (best.get(_degrees(each.core, spread)) for spread in spreads(each.core.data))
    return all(known is not None and known.cost.step_s <= each.bound_s for known in found)


def _worst(best: dict[tuple, Found], top: int) -> float:
    """Seconds of the slowest plan that is wanted so far."""
    return sorted(found.cost.step_s for found in best.values())[top - 1] if len(best) >= top else math.inf


def _left(block: Block, recomputes: bool, core: Core) -> float:
    held = holding(block)
    sample, fixed = held.passed if recomputes else held.kept
    return sample * core.micro_batch + fixed
