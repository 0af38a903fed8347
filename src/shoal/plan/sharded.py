"""What a rank holds of weights, gradients and buffers of collectives within a step, replicated or sharded. No torch.

Replicated weights: gradients lie in flat buckets, made once, and a weight's new gradient is copied into them as soon
as it is complete (parallel/replicate/buckets.py). Sharded: FSDP2 as parallel/shard sets it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
        self.blocks = blocks
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

    def moment(self, number: int, forward: bool, micro: int, begun: bool = True) -> Held:
        """At a block's forward or backward, in this rank's micro-batch number ``micro`` of the step.

        ``begun``: whether its stage was through with a backward before, if it could (not in a pipeline's warm-up).
        """
        if self.shards == 1:
            return Held(0.0, self.gradients, 0.0)
        units = [unit for unit in self.whole if unit != ROOT]
        if forward:
            held = self._forward(number, units, micro)
            return held if begun else held._replace(gradients=0.0)
        return self._backward(number, units, micro)

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients are summed over the micro-batches before they are sharded."""
        return self.staged or (self.candidate.shard_level == 1 and self.candidate.accumulation > 1)

    def _forward(self, number: int, units: list[int], micro: int) -> Held:
        """The root, what was gathered before, this block, and the buffer that it was gathered in."""
        unit = self.unit[number]
        stay = self.staged or self.candidate.shard_level < 3
        here = [u for u in units if u <= number] if stay else [u for u in units if u == unit]
        whole = units if stay and micro else here
        gathered = self.whole[ROOT] + sum(self.whole[u] for u in whole)
        before = [u for u in units if u <= number]
        buffer = self.whole[before[-1] if before else ROOT] * (not (stay and micro))
        return Held(gathered, self.before(micro), buffer)

    def before(self, micro: int) -> float:
        """Gradients that the micro-batches before this one left."""
        if not micro:
            return 0.0
        return sum(self.made.values()) if self.accumulates else self.gradients

    def _backward(self, number: int, units: list[int], micro: int) -> Held:
        """The root, this block or all, the unit that is fetched ahead; what is reduced, and what waits for it."""
        stay = self.staged or self.candidate.shard_level < 3
        earlier, later = [u for u in units if u < number], [u for u in units if u > number]
        own = self.unit[number]
        reduces = not self.accumulates or (micro == self.candidate.accumulation - 1 and not self.staged)
        gone = later if stay and micro == self.candidate.accumulation - 1 and not self.staged else []
        gathered = self.whole[ROOT] + (
            sum(self.whole[u] for u in units if u not in gone) if stay else self.whole[own] * (own != ROOT)
        )
        ahead = self.whole[earlier[-1]] if earlier and not stay else 0.0
        sending = self.sent[later[0]] if later and reduces else 0.0
        if not micro or not self.accumulates:
            shards = self.gradients if micro else 0.0
            done = self.root_made(number) + (shards or sum(self.mine[u] for u in later if reduces))
            done += 0.0 if reduces else sum(self.made[u] for u in later)
            return Held(gathered, done, ahead + sending, True)
        waiting = sum(self.made.values()) - sum(self.made[u] for u in later if reduces)
        return Held(gathered, waiting + sum(self.mine[u] for u in later if reduces), ahead + sending)

    def root_made(self, number: int) -> float:
        """Whole gradients of the root's weights in blocks after this one, whose backward is over."""
        names = {w.name: w.numel * w.trains for n in self.order if n > number for w in self.blocks[n].weights}
        early = {w.name for n in self.order if n <= number for w in self.blocks[n].weights}
        root = {weight.name for weight, unit in self.held if unit == ROOT}
        return sum(numel for name, numel in names.items() if name in root - early) * self.states.gradient

    def reducing(self, number: int, micro: int) -> Held | None:
        """At the end of a block's backward, where its gradients are copied and sent; None where they are not."""
        own = self.unit[number]
        last = micro == self.candidate.accumulation - 1
        if self.shards == 1 or self.staged or (own == ROOT and number) or (self.accumulates and not last):
            return None
        now = self._backward(number, [unit for unit in self.whole if unit != ROOT], micro)
        unit = own if own != ROOT else ROOT
        new = 0.0 if self.accumulates and micro else self.made[unit] - (self.root_made(number) if own == ROOT else 0.0)
        reshards = last or self.candidate.shard_level == 3
        buffers = now.buffers - (self.sent[min(u for u in self.sent if u > number)] if self.has_later(number) else 0.0)
        return Held(
            now.gathered - self.whole[unit] * reshards, now.gradients + new, buffers + self.sent[unit] + self.mine[unit]
        )

    def gradients_of(self, numbers: Iterable[int]) -> float:
        """Bytes of the gradients of some blocks' weights."""
        weights = {w.name: w.numel for n in numbers for w in self.blocks[n].weights if w.trains}
        return sum(weights.values()) * self.states.gradient

    def traffic(self) -> dict[str, float]:
        """Bytes of a step's collectives of weights and gradients by axis, of the whole buffers: units are gathered and
        reduced as often as parallel/shard says, copies of a gradient are summed once."""
        if self.shards == 1:
            return {"replicate": self.gradients} if self.candidate.mesh.replicate > 1 else {}
        micros = self.candidate.accumulation
        stay = self.staged or self.candidate.shard_level < 3
        gathers = {unit: 1 if stay else micros * (1 + (unit != ROOT)) for unit in self.whole}
        gathered = sum(whole * gathers[unit] for unit, whole in self.whole.items())
        reduced = sum(self.sent.values()) * (1 if self.accumulates else micros)
        found = {"shard": gathered + reduced}
        alone = sum(w.numel for w, u in self.held if w.trains and (not w.rows or (self.staged and u == ROOT)))
        both = "replicate x shard" if self.candidate.mesh.replicate > 1 else "shard"
        found[both] = found.get(both, 0.0) + alone * self.states.gradient
        if self.candidate.mesh.replicate > 1:
            found["replicate"] = sum(self.mine.values())
        return {axis: nbytes for axis, nbytes in found.items() if nbytes}

    def has_later(self, number: int) -> bool:
        """Whether a unit comes after a block."""
        return any(unit > number for unit in self.whole)

    def updating(self) -> Held:
        """While the optimizer runs."""
        return Held(0.0, self.gradients, 0.0)
