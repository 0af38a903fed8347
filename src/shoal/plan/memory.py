"""What a plan needs of each device's memory: the most over all moments of a step, by category. No torch.

A step is played action by action, as the schedule orders them: each forward leaves its blocks' kept bytes, each
backward takes them up again, and within a block its own moments (from_blueprint.py, or a formula's) come on top.
Weights, gradients and buffers follow what the engine holds of them (sharded.py): whole flat buckets where weights are
replicated, FSDP2's gathered units and reduce-scatter inputs where they are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shoal.cluster.facts import Device
from shoal.plan.candidate import Candidate, Memory
from shoal.plan.flight import Flights, Head, alone, flights
from shoal.plan.profile import Block, Holding, Moment, Profile
from shoal.plan.ranks import rank_of, rank_stages
from shoal.plan.sharded import Held, Ready, Sharded

RANDOM_STATE_BYTES = 5056  # what checkpointing keeps of the CPU's generator, per recomputed block (torch.get_rng_state)


def peak(profile: Profile, candidate: Candidate, device: Device) -> Memory:
    """The rank that needs most."""
    return max(ranks(profile, candidate, device), key=lambda memory: memory.total_bytes)


def ranks(profile: Profile, candidate: Candidate, device: Device, most_bytes: float = math.inf) -> list[Memory]:
    """Each pipeline coordinate's peak (ranks that differ elsewhere hold no more), from the first on; the last ones are
    left out once those before them hold more than ``most_bytes`` together."""
    chosen = recomputed(profile, candidate)
    found: list[Memory] = []
    for place in range(candidate.mesh.pipeline):
        if sum(memory.total_bytes for memory in found) > most_bytes:
            break
        found.append(_Rank(profile, candidate, device, place, chosen).memory())
    return found


def recomputed(profile: Profile, candidate: Candidate) -> frozenset[int]:
    """The blocks that are recomputed: as parallel/recompute chooses, every repeated one, or every second; of those what
    no gradient comes to keeps nothing and is not run again."""
    repeated = [number for number, block in enumerate(profile.blocks) if block.repeated]
    if candidate.recompute == "none":
        return frozenset()
    chosen = repeated if candidate.recompute == "full" else repeated[::2]
    return frozenset(number for number in chosen if profile.blocks[number].learns)


class _Live(NamedTuple):
    """Bytes of activations at a moment, of them those of the last block (logits and loss), and what is held of weights
    and their gradients."""

    moment: str
    activations: float
    logits: float
    held: Held

    @property
    def total(self) -> float:
        """All of it."""
        return self.activations + self.logits + self.held.total


class _Beside(NamedTuple):
    """A moment of a step: bytes in all; of them what lies beside the stage at work, that but what was received, and the
    buffers of what was; and the stage's own."""

    total: float
    others: float
    received: float
    live: _Live


class _Stage:
    """A run of blocks on one rank, for micro-batches of ``samples``."""

    def __init__(self, profile: Profile, numbers: range, samples: int, chosen: frozenset[int]) -> None:
        self.profile, self.numbers, self.samples, self.chosen = profile, numbers, samples, chosen
        self.blocks = {number: profile.blocks[number] for number in numbers}
        self.holdings = {number: holding(block) for number, block in self.blocks.items()}
        self.left = {number: self.leaves(number) for number in numbers}
        self.kept = sum(self.left.values())
        self.first, self.last = 0 in numbers, len(profile.blocks) - 1 in numbers
        self.next_here = False  # what comes back from a neighbour on this rank lies in no buffer
        self.apart = 0.0  # bytes of weights' gradients that second halves of backwards make beside the buckets

    def bytes(self, pair: tuple[float, float]) -> float:
        return pair[0] * self.samples + pair[1]

    def leaves(self, number: int) -> float:
        """Bytes that a block's forward leaves for its backward."""
        held = self.holdings[number]
        if number not in self.chosen:
            return self.bytes(held.kept)
        random = RANDOM_STATE_BYTES if self.profile.kernels == "cpu" else 0
        return self.bytes(held.passed) + random

    def moments(self, number: int, forward: bool) -> Iterator[tuple[float, float]]:
        """(bytes beyond what earlier blocks left, bytes of whole gradients) at a block's moments."""
        held, recomputes = self.holdings[number], number in self.chosen
        outside = (
            not self.first and number == self.numbers.start
            if forward
            else (not self.last and number == self.numbers.stop - 1)
        )  # what enters lies in the pipeline's buffers
        random = RANDOM_STATE_BYTES if recomputes and self.profile.kernels == "cpu" else 0
        if forward:
            for moment in held.bare if recomputes else held.forward:
                yield self.live(moment, outside) + random, 0.0
            return
        for moment in held.backward:
            yield self.live(moment, outside) + random, moment.gradient_bytes
        if recomputes:
            incoming = 0.0 if outside else self.after(number)
            for moment in held.forward:
                yield self.live(moment, True) + incoming + self.bytes(held.passed) + random, 0.0

    def after(self, number: int) -> float:
        """The gradient that comes back to a block."""
        later = self.profile.blocks[number + 1 : number + 2]
        return later[0].crossing(self.samples)[1] if later else 0.0

    def live(self, moment: Moment, outside: bool) -> float:
        return (moment.sample_bytes - moment.entering_bytes * outside) * self.samples + moment.fixed_bytes

    @cached_property
    def between(self) -> float:
        """Bytes of gradients that wait for the second half of a micro-batch's backward."""
        waiting = sum(held.between for held in self.holdings.values()) * self.samples
        return waiting - self.returning  # the last of them lies in the buffer that it came in

    @cached_property
    def after_weights(self) -> float:
        """Kept bytes of what comes after the last operation with weights (the loss), which the first half frees."""
        ops = [op for block in self.blocks.values() for op in block.ops]
        last = max((number for number, op in enumerate(ops) if op.fixed_bytes), default=0)
        return sum(op.kept_bytes for op in ops[last + 1 :]) * self.samples

    @cached_property
    def first_half(self) -> float:
        """Working bytes of a backward's first half: of the block that needs most what waits of those after it, its own
        gradients that wait, and its widest moment. In the last block that moment is the loss's, before any waits."""
        found, waiting = [0.0], -self.returning  # the last of them lies in the buffer that it came in
        for number in reversed(self.numbers):
            held = self.holdings[number]
            left, between = self.bytes(held.kept), held.between * self.samples
            moments = (self.live(moment, not self.last) - moment.fixed_bytes - left for moment in held.backward)
            widest = max(moments, default=0.0)
            loss = self.last and number == self.numbers.stop - 1
            found.append(waiting + (max(widest, between) if loss else max(widest, 0.0) + between))
            waiting += between
        return max(found)

    @cached_property
    def second_half(self) -> float:
        """Working bytes of a backward's second half: one weight's gradient."""
        if self.undivided:
            return 0.0
        weights = (weight for block in self.blocks.values() for weight in block.weights)
        return max((weight.numel for weight in weights if weight.trains), default=0) * 4.0

    @cached_property
    def entering(self) -> float:
        """Bytes that come in from the stage before, for one micro-batch, of what depends on weights."""
        return 0.0 if self.first else self.profile.blocks[self.numbers.start].carried_bytes * self.samples

    @cached_property
    def handed_in(self) -> float:
        """Bytes that come in besides and need no gradient."""
        return 0.0 if self.first else self.bytes(self.profile.blocks[self.numbers.start].handed_bytes)

    @cached_property
    def handed_out(self) -> float:
        """Bytes that go on besides and need no gradient."""
        return 0.0 if self.last else self.bytes(self.profile.blocks[self.numbers.stop].handed_bytes)

    @cached_property
    def through(self) -> float:
        """Of these what passes through, of which a copy goes on, which lies here until the backward's end."""
        return min(self.handed_in, self.handed_out)

    @cached_property
    def back(self) -> float:
        """Bytes of gradients that go to the stage before."""
        return 0.0 if self.first else self.profile.blocks[self.numbers.start].crossing(self.samples)[1]

    @cached_property
    def undivided(self) -> bool:
        """Whether the first half of its backward is all of it: what comes in from frozen stages needs no gradient."""
        return not self.first and not self.profile.blocks[self.numbers.start].returns

    @cached_property
    def gathered(self) -> float:
        """Bytes that go on of what lies in parts on the tensor ranks, gathered for it."""
        return 0.0 if self.last else self.profile.blocks[self.numbers.stop].gathered_bytes * self.samples

    @cached_property
    def plain(self) -> float:
        """Bytes that go on and that only the stage's outputs keep: of what has no gradient, though it depends on
        (frozen) weights, and gathered copies of parts."""
        return self.leaving - self.shared

    @cached_property
    def shared(self) -> float:
        """Bytes that go on and that its backward needs too."""
        return self.returning - self.gathered

    @cached_property
    def returning(self) -> float:
        """Bytes of gradients that come back from the stage after."""
        return 0.0 if self.last else self.profile.blocks[self.numbers.stop].crossing(self.samples)[1]

    @cached_property
    def leaving(self) -> float:
        """Bytes that go to the stage after."""
        return 0.0 if self.last else self.profile.blocks[self.numbers.stop].carried_bytes * self.samples

    @cached_property
    def held(self) -> tuple[float, ...]:
        """Bytes of each of HELD, of one micro-batch."""
        whole, came = self.kept + self.through + self.plain, self.entering + self.handed_in
        sent = self.leaving + self.handed_out
        halved = 0.0 if self.undivided else whole + self.between - self.after_weights
        return whole, halved, came, self.returning, sent, self.back, self.apart

    @cached_property
    def received(self) -> tuple[float, ...]:
        """Of these what lies in buffers of what came from other ranks."""
        return 0.0, 0.0, self.entering + self.handed_in, self.returning * (not self.next_here), 0.0, 0.0, 0.0


def holding(block: Block) -> Holding:
    """A block's own, or what its operations' kept bytes say."""
    if block.holding is not None:
        return block.holding
    kept = sum(op.kept_bytes for op in block.ops), sum(op.kept_fixed_bytes for op in block.ops)
    largest = max((op.moved_bytes for op in block.ops), default=0.0)
    working = (Moment(kept[0] + largest, kept[1], block.carried_bytes),)
    return Holding(kept, (block.input_bytes, 0.0), working, (Moment(largest, 0.0, block.carried_bytes),), working)


class _Rank:
    """One pipeline coordinate."""

    def __init__(
        self, profile: Profile, candidate: Candidate, device: Device, place: int, chosen: frozenset[int]
    ) -> None:
        self.profile, self.candidate, self.device, self.place = profile, candidate, device, place
        pipeline, chunks = candidate.mesh.pipeline, candidate.chunks
        schedule = candidate.schedule or "gpipe"
        stages = rank_stages(schedule, place, pipeline, chunks) if pipeline > 1 else (0,)
        starts = [*candidate.starts, len(profile.blocks)]
        spans = {stage: range(starts[stage], starts[stage + 1]) for stage in stages}
        self.stages = {s: _Stage(profile, span, candidate.micro_batch, chosen) for s, span in spans.items()}
        for number, stage in self.stages.items():
            stage.next_here = number + 1 in self.stages
        self.model = Sharded(profile, candidate, [number for span in spans.values() for number in span])
        if candidate.mesh.shard == 1:
            for stage in self.stages.values():
                stage.apart = 0.0 if stage.undivided else self.model.gradients_of(stage.numbers)

    def flights(self) -> Flights:
        """What is in hand at the step's actions."""
        candidate, pipeline = self.candidate, self.candidate.mesh.pipeline
        if pipeline == 1:
            return alone(candidate.accumulation)
        schedule, early = candidate.schedule or "gpipe", self.device.kernels == "cpu"
        return flights(schedule, pipeline, candidate.chunks, candidate.accumulation, early)[self.place]

    def most(self) -> _Beside:
        """The moment of the step's passes that needs most.

        A backward in halves (torch.distributed.pipelining._backward) keeps the whole graph until its second one, with
        the gradients that the weights wait for; the first stage has no first half. Weights' gradients that come of
        it reach their buckets at the step's end only.
        """
        heads, head, counts = self.flights()
        stages = list(self.stages.values())
        own = [self.own(stages, each) for each in heads]
        beside = counts @ np.array([stage.held for stage in stages]).T.ravel()
        beside += np.array([other for other, _ in own])[head]
        at = int((beside + np.array([live.total for _, live in own])[head]).argmax())
        came = np.array([stage.received for stage in stages]).T.ravel()
        received, live = float(counts[at] @ came), own[head[at]][1]
        return _Beside(float(beside[at]) + live.total, float(beside[at]) - received, received, live)

    def own(self, stages: Sequence[_Stage], head: Head) -> tuple[float, _Live]:
        """An action's own moment, and the bytes by which others' are more than what is held of all micro-batches."""
        stage, spans = stages[head.chunk], [each.numbers for each in stages]
        gathered, through = (frozenset(spans[chunk] for chunk in of) for of in (head.gathered, head.through))
        ready = Ready(stage.numbers, gathered, through)
        if head.kind == "F":
            return 0.0, self.fullest(stage, True, head.micro, ready)
        if head.kind == "B" or (head.kind == "W" and stage.first) or (head.kind == "I" and stage.undivided):
            live = self.fullest(stage, False, head.micro, ready)
            return stage.shared - stage.kept, live  # what the stage kept it uses up; its outputs stay until the end
        return 0.0, self.half(stage, head.kind == "I", ready)

    def half(self, stage: _Stage, first: bool, ready: Ready) -> _Live:
        """Half a stage's backward."""
        begun = ready if first else ready._replace(through=ready.through | {ready.own})
        held = self.model.in_stage(stage.numbers.start, not first, begun)
        return _Live("backward", stage.first_half if first else stage.second_half, 0.0, held)

    def held(self, number: int, forward: bool, micro: int, ready: Ready) -> Held:
        """What is held of weights and gradients at a block's pass."""
        if self.candidate.mesh.pipeline == 1:
            return self.model.moment(number, forward, micro)
        return self.model.in_stage(number, forward, ready)

    def fullest(self, stage: _Stage, forward: bool, micro: int, ready: Ready) -> _Live:
        """The moment of a stage's pass that needs most."""
        held = self.held(stage.numbers.start, forward, micro, ready)
        nothing = _Live("forward" if forward else "backward", 0.0, 0.0, held)  # of a stage that computes nothing
        return max(self.within(stage, forward, micro, ready), key=lambda live: live.total, default=nothing)

    def within(self, stage: _Stage, forward: bool, micro: int, ready: Ready) -> Iterator[_Live]:
        """The fullest moments of a stage's pass, one of each block, and those at which gradients are sent."""
        last = len(self.profile.blocks) - 1
        before = 0.0
        for number in stage.numbers:
            own = number == last
            name = ("loss" if own else "forward") if forward else "backward"
            held = self.held(number, forward, micro, ready)
            moments = stage.moments(number, forward)
            if held.whole_gradients:
                most = max(moments, key=lambda each: each[0] + each[1], default=None)
            else:
                most = max(moments, key=lambda each: each[0], default=None)
            if most is not None:
                live, gradients = most
                yield _Live(name, before + live * (not own), live * own, held.with_gradients(gradients))
            reducing = None if forward else self.model.reducing(number, micro)
            if reducing is not None:
                carried = self.profile.blocks[number].carried_bytes * stage.samples if number else 0.0
                yield _Live(name, before + carried, 0.0, reducing)
            before += stage.left[number]

    def memory(self) -> Memory:
        """The moment that needs most."""
        candidate = self.candidate
        passes = candidate.accumulation if candidate.mesh.pipeline > 1 else 1  # a schedule has all of them at hand
        passes = 2 * candidate.accumulation if self.device.kernels == "cpu" else passes  # the loader's windows lie here
        inputs = self.profile.input_bytes * candidate.micro_batch * passes
        buffers = sum(block.buffer_bytes for stage in self.stages.values() for block in stage.blocks.values())
        weights, optimizer = self.model.weights + buffers, self.model.optimizer
        last = _Live("optimizer", 0.0, 0.0, self.model.updating())
        update = _Beside(last.total, 0.0, 0.0, last)
        _, others, received, top = max(self.most(), update, key=lambda moment: moment.total)
        return Memory(
            rank=rank_of(candidate.mesh, pipeline=self.place), moment=top.moment,
            weights=weights + top.held.gathered, gradients=top.held.gradients, optimizer=optimizer,
            activations=top.activations + others + inputs, logits=top.logits,
            buffers=received + top.held.buffers, overhead=float(self.device.reserved_bytes),
        )  # fmt: skip
