"""What a rank holds of weights, gradients and buffers of collectives within a step, replicated or sharded. No torch.

Replicated weights: gradients lie in flat buckets, made once, and a weight's new gradient is copied into them as soon
as it is complete (parallel/replicate/buckets.py). Sharded: FSDP2 as parallel/shard sets it up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from shoal.plan.candidate import Candidate
from shoal.plan.profile import Block, Profile, Weight

ROOT = -1  # the unit of what lies in no repeated block


class Held(NamedTuple):
    """Bytes at a moment: ``gathered`` weights, ``gradients``, ``buffers`` of collectives."""

    gathered: float
    gradients: float
    buffers: float
    whole_gradients: bool = False  # new gradients stay whole until their unit is reduced

    @property
    def total(self) -> float:
        """All of them."""
        return self.gathered + self.gradients + self.buffers

    def with_gradients(self, nbytes: float) -> Held:
        """With the gradients that a block's backward completed so far."""
        return self._replace(gradients=self.gradients + nbytes * self.whole_gradients)


def alone(block: Block) -> bool:
    """Whether a block is gathered by itself: a unit with something to shard, whose weights no other shares."""
    weights, unit = block.weights, block.repeated if block.unit is None else block.unit
    return unit and any(weight.rows for weight in weights) and not any(weight.tie for weight in weights)


class Ready(NamedTuple):
    """How far a rank's stages are in a pipeline's step, each as the range of its blocks: that at work, those whose
    units were gathered, those that were through with a backward."""

    own: range
    gathered: frozenset[range]
    through: frozenset[range]


class _Sums:
    """Sums over consecutive units, in the order of their blocks."""

    def __init__(self, by_unit: dict[int, float], units: Sequence[int]) -> None:
        self.units = units
        self.sums = [0.0, *accumulate(by_unit[unit] for unit in units)]

    @property
    def all(self) -> float:
        """Of every unit but the root."""
        return self.sums[-1]

    def upto(self, number: int) -> float:
        """Of units up to a block, its own included."""
        return self.sums[bisect_right(self.units, number)]

    def after(self, number: int) -> float:
        """Of units after a block."""
        return self.sums[-1] - self.upto(number)

    def within(self, span: range) -> float:
        """Of units among consecutive blocks."""
        return self.upto(span.stop - 1) - self.upto(span.start - 1)


class Sharded:
    """The model's state on one rank that holds the blocks ``numbers``."""

    def __init__(self, profile: Profile, candidate: Candidate, numbers: Sequence[int]) -> None:
        self.candidate, self.shards = candidate, candidate.mesh.shard
        self.states, self.staged = candidate.states, candidate.mesh.pipeline > 1
        self.order = sorted(numbers)
        blocks = {number: profile.blocks[number] for number in self.order}
        self.blocks = blocks
        self.unit = {number: number if alone(block) else ROOT for number, block in blocks.items()}
        held: dict[str, tuple[Weight, int]] = {}
        for number, block in blocks.items():
            for weight in block.weights:
                held[weight.tie or weight.name] = weight, ROOT if weight.tie else self.unit[number]
        self.held = list(held.values())
        sharded = self.shards > 1
        local = [self.local(weight, unit) for weight, unit in self.held]
        trained = [n for (weight, _), n in zip(self.held, local, strict=True) if weight.trains]
        on_device = not (candidate.cpu_offload and sharded)
        self.weights = sum(local) * self.states.weight * on_device
        self.optimizer = sum(trained) * self.states.optimizer * on_device
        self.gradients = sum(trained) * self.states.gradient * on_device
        self.whole = self.by_unit(lambda w, padded: padded * self.shards * self.states.weight)
        self.made = self.by_unit(lambda w, padded: w.numel * self.states.gradient * w.trains)
        self.sent = self.by_unit(lambda w, padded: padded * self.shards * self.states.gradient * w.trains)
        self.mine = self.by_unit(lambda w, padded: padded * self.states.gradient * w.trains)
        self.all_made = sum(self.made.values())
        self.units = sorted(unit for unit in self.whole if unit != ROOT)
        self.wholes, self.mades, self.mines = (_Sums(of, self.units) for of in (self.whole, self.made, self.mine))

    def padded(self, weight: Weight) -> float:
        """Numbers in a shard: every rank holds ceil(rows / shards) rows."""
        return weight.numel / weight.rows * -(-weight.rows // self.shards) if weight.rows else float(weight.numel)

    def local(self, weight: Weight, unit: int) -> float:
        whole = self.shards == 1 or not weight.rows or (self.staged and unit == ROOT)
        return float(weight.numel) if whole else self.padded(weight)

    def by_unit(self, size: Callable[[Weight, float], float]) -> dict[int, float]:
        """Sums over each unit's weights of their ``size``, of the weight and the numbers in its shard."""
        sums = {ROOT: 0.0}
        for weight, unit, padded in self.divided:
            sums[unit] = sums.get(unit, 0.0) + size(weight, padded)
        return sums

    @cached_property
    def divided(self) -> list[tuple[Weight, int, float]]:
        """The weights that are sharded, each with its unit and the numbers in a shard."""
        return [
            (weight, unit, self.padded(weight))
            for weight, unit in self.held
            if weight.rows and not (self.staged and unit == ROOT)
        ]

    def moment(self, number: int, forward: bool, micro: int) -> Held:
        """At a block's forward or backward, in this rank's micro-batch number ``micro`` of the step."""
        if self.shards == 1:
            return Held(0.0, self.gradients, 0.0)
        return self._forward(number, micro) if forward else self._backward(number, micro)

    def in_stage(self, number: int, forward: bool, ready: Ready) -> Held:
        """At a block's forward or backward in a pipeline: units stay whole once they were gathered, and whole gradients
        are summed until the step's end; what lies in no unit has buckets, as where weights are replicated."""
        if self.shards == 1:
            return Held(0.0, self.gradients, 0.0)
        gathered, made = (
            sum(map(sums.within, spans)) for sums, spans in ((self.wholes, ready.gathered), (self.mades, ready.through))
        )
        buffer, first = 0.0, ready.own not in ready.through
        if ready.own not in ready.gathered:
            gathered += self.wholes.within(range(ready.own.start, number + 1))
            buffer = self.whole.get(number, 0.0)
        if first and not forward:
            made += self.mades.within(range(number + 1, ready.own.stop))
        new = first and not forward and self.unit[number] != ROOT
        return Held(gathered, self.buckets + made, buffer, new)

    @cached_property
    def buckets(self) -> float:
        """Bytes of gradients of what lies in no unit, in a pipeline."""
        return sum(w.numel for w, unit in self.held if unit == ROOT and w.trains) * self.states.gradient

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients are summed over the micro-batches before they are sharded."""
        return self.staged or (self.candidate.shard_level == 1 and self.candidate.accumulation > 1)

    def _forward(self, number: int, micro: int) -> Held:
        """The root, what was gathered before, this block, and the buffer that it was gathered in."""
        unit = self.unit[number]
        stay = self.candidate.shard_level < 3
        here = self.whole[unit] * (unit != ROOT)
        if stay:
            here = self.wholes.all if micro else self.wholes.upto(number)
        before = bisect_right(self.units, number)
        buffer = self.whole[self.units[before - 1] if before else ROOT] * (not (stay and micro))
        return Held(self.whole[ROOT] + here, self.before(micro), buffer)

    def before(self, micro: int) -> float:
        """Gradients that the micro-batches before this one left."""
        if not micro:
            return 0.0
        return self.all_made if self.accumulates else self.gradients

    def _backward(self, number: int, micro: int) -> Held:
        """The root, this block or all, the unit that is fetched ahead; what is reduced, and what waits for it."""
        stay = self.candidate.shard_level < 3
        own, last = self.unit[number], micro == self.candidate.accumulation - 1
        reduces = not self.accumulates or last
        here = self.whole[own] * (own != ROOT)
        if stay:
            here = self.wholes.upto(number) if last else self.wholes.all
        gathered = self.whole[ROOT] + here
        earlier, later = bisect_left(self.units, number), bisect_right(self.units, number)
        ahead = self.whole[self.units[earlier - 1]] if earlier and not stay else 0.0
        sending = self.sent[self.units[later]] if later < len(self.units) and reduces else 0.0
        reduced = self.mines.after(number) if reduces else 0.0
        if not micro or not self.accumulates:
            shards = self.gradients if micro else 0.0
            done = self.root_made(number) + (shards or reduced)
            done += 0.0 if reduces else self.mades.after(number)
            return Held(gathered, done, ahead + sending, True)
        waiting = self.all_made - (self.mades.after(number) if reduces else 0.0)
        return Held(gathered, waiting + reduced, ahead + sending)

    def root_made(self, number: int) -> float:
        """Whole gradients of the root's weights in blocks after this one, whose backward is over."""
        return sum(numel for first, numel in self._root if first > number) * self.states.gradient

    @cached_property
    def _root(self) -> list[tuple[int, int]]:
        """Of each of the root's weights the first block that reads it, and how many trained numbers it has."""
        first: dict[str, int] = {}
        for number in self.order:
            for weight in self.blocks[number].weights:
                first.setdefault(weight.tie or weight.name, number)
        return [
            (first[weight.tie or weight.name], weight.numel * weight.trains)
            for weight, unit in self.held
            if unit == ROOT
        ]

    def reducing(self, number: int, micro: int) -> Held | None:
        """At the end of a block's backward, where its gradients are copied and sent; None where they are not."""
        own = self.unit[number]
        last = micro == self.candidate.accumulation - 1
        if self.shards == 1 or self.staged or (own == ROOT and number) or (self.accumulates and not last):
            return None
        now = self._backward(number, micro)
        unit = own if own != ROOT else ROOT
        new = 0.0 if self.accumulates and micro else self.made[unit] - (self.root_made(number) if own == ROOT else 0.0)
        reshards = last or self.candidate.shard_level == 3
        later = bisect_right(self.units, number)
        buffers = now.buffers - (self.sent[self.units[later]] if later < len(self.units) else 0.0)
        return Held(
            now.gathered - self.whole[unit] * reshards, now.gradients + new, buffers + self.sent[unit] + self.mine[unit]
        )

    def gradients_of(self, numbers: Iterable[int]) -> float:
        """Bytes of the gradients of some blocks' weights."""
        weights = {w.tie or w.name: w.numel for n in numbers for w in self.blocks[n].weights if w.trains}
        return sum(weights.values()) * self.states.gradient

    def traffic(self) -> dict[str, float]:
        """Bytes of a step's collectives of weights and gradients by axis, of the whole buffers: units are gathered and
        reduced as often as parallel/shard says, copies of a gradient are summed once."""
        if self.shards == 1:
            return {"replicate": self.gradients} if self.candidate.mesh.replicate > 1 else {}
        micros = self.candidate.accumulation
        stay = self.staged or self.candidate.shard_level < 3
        again = frozenset[int]() if stay else self.gathered_again
        gathers = {unit: (1 if stay else micros) * (1 + (unit in again)) for unit in self.whole}
        gathered = sum(whole * gathers[unit] for unit, whole in self.whole.items())
        reduced = sum(self.sent.values()) * (1 if self.accumulates else micros)
        found = {"shard": gathered + reduced}
        alone = sum(w.numel for w, u in self.held if w.trains and (not w.rows or (self.staged and u == ROOT)))
        both = "replicate x shard" if self.candidate.mesh.replicate > 1 else "shard"
        found[both] = found.get(both, 0.0) + alone * self.states.gradient
        if self.candidate.mesh.replicate > 1:
            found["replicate"] = sum(self.mine.values())
        return {axis: nbytes for axis, nbytes in found.items() if nbytes}

    @cached_property
    def gathered_again(self) -> frozenset[int]:
        """The units that are gathered in a backward: those that a gradient comes to, and the one before them all, which
        FSDP2 fetches ahead without asking whether it is needed (FSDPParamGroup._backward_prefetch)."""
        first = next((at for at, unit in enumerate(self.units) if self.blocks[unit].learns), len(self.units))
        return frozenset(self.units[max(0, first - 1) :])

    def updating(self) -> Held:
        """While the optimizer runs."""
        return Held(0.0, self.gradients, 0.0)
