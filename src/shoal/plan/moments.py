"""A blueprint's timeline cut into blocks: what each holds at the moments of its forward and backward that need most."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from operator import ge

import numpy as np

from shoal.blueprint.facts import Storage, Timeline
from shoal.plan.profile import Holding, Moment

#: Of a storage: (bytes that grow with the samples, fixed bytes), on one rank, for the traced micro-batch.
Sized = Callable[[Storage], tuple[float, float]]


def holdings(timeline: Timeline, starts: Sequence[int], sized: Sized, gradient: dict[str, float]) -> list[Holding]:
    """What each block holds. ``starts``: each block's first operation; ``gradient``: a weight's gradient's bytes."""
    return _Cut(timeline, starts, sized, gradient).holdings()


class _Cut:
    def __init__(self, timeline: Timeline, starts: Sequence[int], sized: Sized, gradient: dict[str, float]) -> None:
        self.timeline, self.starts, self.gradient = timeline, [0, *starts[1:]], gradient
        self.end = timeline.forward[-1]
        ends = [timeline.forward[start - 1] for start in self.starts[1:]]
        self.begins = [0, *ends]
        self.ends = [*ends, self.end]
        pieces = [storage for storage in timeline.storages if storage.operation >= 0]
        self.born, self.freed, self.used, operation = (
            np.array([getattr(piece, name) for piece in pieces], int) for name in ("born", "freed", "used", "operation")
        )
        self.block = np.searchsorted(self.starts, operation, side="right") - 1
        self.left = (self.born <= self.end) & (self.freed > self.end)  # in forward for the backward
        self.bytes = np.array([sized(piece) for piece in pieces], float).reshape(-1, 2)

    def backward_spans(self) -> list[tuple[int, int]]:
        """The first and last moment of each block's backward; (0, -1): it has none."""
        spans = [(0, -1)] * len(self.starts)
        runs = [(at, bisect.bisect_right(self.starts, of) - 1) for at, of in self.timeline.backward]
        last = int(self.freed.max(initial=self.end))
        lowest = len(self.starts)
        for at, block in runs:
            if block < lowest:  # from here on; a late part of a later block's (residual sums) belongs to this one
                if lowest < len(self.starts):
                    spans[lowest] = (spans[lowest][0], at - 1)
                spans[block] = (at, last)
                lowest = block
        return spans

    def holdings(self) -> list[Holding]:
        spans = self.backward_spans()
        done = [(moment, name) for name, moment in self.timeline.gradients]
        found = []
        for block, (begin, end, span) in enumerate(zip(self.begins, self.ends, spans, strict=True)):
            own = self.block == block
            left = own & self.left
            others = self.alive(begin + 1, end, block)
            freed = np.where(left, np.maximum(self.used, self.born), self.freed)  # where nothing is kept
            late = [(moment, name) for moment, name in done if span[0] <= moment <= span[1]]
            back = self.alive(*span, block)
            found.append(
                Holding(
                    kept=self.sum(left),
                    passed=self.sum(left & (self.used > end)),
                    forward=self.moments(others, self.freed, (begin + 1, end), block, []),
                    bare=self.moments(others, freed, (begin + 1, end), block, []),
                    backward=self.moments(back, self.freed, span, block, late) if span[1] >= span[0] else (),
                )
            )
        return found

    def sum(self, which: np.ndarray) -> tuple[float, float]:
        """Bytes of some pieces: those that grow with the samples, and fixed ones."""
        samples, fixed = self.bytes[which].sum(axis=0)
        return float(samples), float(fixed)

    def alive(self, first: int, last: int, block: int) -> np.ndarray:
        """The pieces there at some moment from ``first`` to ``last``, but for what earlier blocks left for backward."""
        there = (self.born <= last) & (self.freed >= first) & ~(self.left & (self.block < block))
        return np.flatnonzero(there)

    def moments(
        self, pieces: np.ndarray, freed: np.ndarray, span: tuple[int, int], block: int, done: list[tuple[int, str]]
    ) -> tuple[Moment, ...]:
        """The moments of a span that need more than another in some way."""
        first, last = span
        pieces = pieces[(self.born[pieces] <= last) & (freed[pieces] >= first)]
        born, freed = self.born[pieces], freed[pieces]
        at = np.unique(np.maximum(born, first))
        here = ((born <= at[:, None]) & (at[:, None] <= freed)).astype(float)
        others = self.bytes[pieces, 0] * (self.block[pieces] != block)
        sums = here @ np.column_stack([self.bytes[pieces], others])
        complete = np.searchsorted(at, [moment for moment, _ in done], side="right")
        gradients = np.zeros(len(at) + 1)
        np.add.at(gradients, complete, [self.gradient.get(name, 0.0) for _, name in done])
        table = np.column_stack([sums, np.cumsum(gradients)[:-1]])
        return _most({Moment(*map(float, row)) for row in table})


def _most(found: set[Moment]) -> tuple[Moment, ...]:
    """Those that no other exceeds in all of: bytes with and without what enters, fixed, gradients."""

    def measures(m: Moment) -> tuple[float, ...]:
        return m.sample_bytes, m.sample_bytes - m.entering_bytes, m.fixed_bytes, m.gradient_bytes

    kept: list[Moment] = []
    known: list[tuple[float, ...]] = []
    for moment in sorted(found, key=measures, reverse=True):
        sizes = measures(moment)
        if not any(all(map(ge, other, sizes)) for other in known):
            kept.append(moment)
            known.append(sizes)
    return tuple(kept)
