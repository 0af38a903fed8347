"""What a rank holds of weights, gradients and their collectives' buffers within a step, replicated or sharded. No torch.

Replicated weights: gradients lie in flat buckets, made once, and a weight's new gradient is copied into them as soon
as it is complete (parallel/replicate/buckets.py). Sharded: FSDP2 as parallel/shard sets it up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Sharded:
    """The model's state on one rank that holds the blocks ``numbers``."""

    def __init__(self, profile: Profile, candidate: Candidate, numbers: Sequence[int]) -> None:
        self.candidate, self.shards = candidate, candidate.mesh.shard
        self.states, self.staged = candidate.states, candidate.mesh.pipeline > 1
        self.order = sorted(numbers)
        blocks = {number: profile.blocks[number] for number in self.order}
        self.unit = {number: self.unit_of(number, block) for number, block in blocks.items()}
        held: dict[str, tuple[Weight, int]] = {}
        for number, block in blocks.items():
            for weight in block.weights:
                held[weight.name] = weight, ROOT if weight.tie else self.unit[number]
        self.held = list(held.values())
        sharded = self.shards > 1
        local = [self.local(weight, unit) for weight, unit in self.held]
        trained = [n for (weight, _), n in zip(self.held, local, strict=True) if weight.trains]
        on_device = not (candidate.cpu_offload and sharded)
        self.weights = sum(local) * self.states.weight * on_device
        self.optimizer = sum(trained) * self.states.optimizer * on_device
        self.gradients = sum(trained) * self.states.gradient * on_device
        self.whole = self.by_unit(lambda w: self.padded(w) * self.shards * self.states.weight)
        self.made = self.by_unit(lambda w: w.numel * self.states.gradient * w.trains)
        self.sent = self.by_unit(lambda w: self.padded(w) * self.shards * self.states.gradient * w.trains)
        self.mine = self.by_unit(lambda w: self.padded(w) * self.states.gradient * w.trains)

    def unit_of(self, number: int, block: Block) -> int:
        """A repeated block is gathered by itself where no other shares its weights."""
        shared = any(weight.tie for weight in block.weights)
        return number if block.repeated and block.weights and not shared else ROOT

    def padded(self, weight: Weight) -> float:
        """Numbers in a shard: every rank holds ceil(rows / shards) rows."""
        return weight.numel / weight.rows * -(-weight.rows // self.shards) if weight.rows else float(weight.numel)

    def local(self, weight: Weight, unit: int) -> float:
        whole = self.shards == 1 or not weight.rows or (self.staged and unit == ROOT)
        return float(weight.numel) if whole else self.padded(weight)

    def by_unit(self, size: Callable[[Weight], float]) -> dict[int, float]:
        sums = {ROOT: 0.0}
        for weight, unit in self.held:
            if weight.rows and not (self.staged and unit == ROOT):
                sums[unit] = sums.get(unit, 0.0) + size(weight)
        return sums

    def moments(self, number: int, forward: bool, backwards: int) -> list[Held]:
        """At a block's forward or backward, after ``backwards`` backwards of this step."""
        if self.shards == 1:
            return [Held(0.0, self.gradients, 0.0)]
        return [self.moment(number, forward, backwards)]

    def moment(self, number: int, forward: bool, backwards: int) -> Held:
        unit, level = self.unit[number], self.candidate.shard_level
        units = [u for u in self.whole if u != ROOT]
        place = units.index(unit) if unit in units else None
        if self.staged or level < 3:
            done = units if self.staged or not forward or backwards else units[: (place or 0) + 1]
            gathered = self.whole[ROOT] + sum(self.whole[u] for u in done)
        else:
            gathered = self.whole[ROOT] + (self.whole[unit] if place is not None else 0.0)
        if forward:
            shards = self.gradients if backwards else 0.0
            buffer = self.whole[unit] if level == 3 or not backwards else 0.0
            return Held(gathered, shards, buffer)
        later = [u for u in units if u > number]
        before = [u for u in units if u < number]
        accumulates = level == 1 and self.candidate.accumulation > 1
        shards = self.gradients if backwards and not accumulates else sum(self.mine[u] for u in later)
        root = sum(w.numel * self.states.gradient for w, u in self.held if u == ROOT and w.trains) * (
            number < (units[0] if units else 0)
        )
        prefetched = self.whole[before[-1]] if level == 3 and before and not self.staged else 0.0
        sending = self.sent[later[0]] if later else 0.0
        whole = sum(self.made[u] for u in later) if accumulates else 0.0
        return Held(gathered, shards + root + whole, prefetched + sending, True)

    def updating(self) -> Held:
        """While the optimizer runs."""
        return Held(0.0, self.gradients, 0.0)
