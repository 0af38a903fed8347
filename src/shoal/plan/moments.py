"""A blueprint's timeline cut into blocks: what each holds at the moments of its forward and backward that need most."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from shoal.blueprint.facts import Storage, Timeline
from shoal.plan.profile import Holding, Moment

#: Of a storage: (bytes that grow with the samples, fixed bytes), on one rank, for the traced micro-batch.
Sized = Callable[[Storage], tuple[float, float]]


class _Piece(NamedTuple):
    born: int
    freed: int
    used: int  # last in forward
    block: int
    forward: bool
    left: bool  # in forward for the backward
    bytes: tuple[float, float]


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
        self.pieces = [self.piece(storage, sized(storage)) for storage in timeline.storages if storage.operation >= 0]
        self.born, self.freed, self.of = (
            np.array([getattr(piece, name) for piece in self.pieces], int) for name in ("born", "freed", "block")
        )
        self.left = np.array([piece.left for piece in self.pieces], bool)

    def piece(self, storage: Storage, nbytes: tuple[float, float]) -> _Piece:
        forward = storage.born <= self.end
        block = bisect.bisect_right(self.starts, storage.operation) - 1
        left = forward and storage.freed > self.end
        return _Piece(storage.born, storage.freed, storage.used, block, forward, left, nbytes)

    def backward_spans(self) -> list[tuple[int, int]]:
        """The first and last moment of each block's backward; (0, -1): it has none."""
        spans = [(0, -1)] * len(self.starts)
        runs = [(at, bisect.bisect_right(self.starts, of) - 1) for at, of in self.timeline.backward]
        last = max((piece.freed for piece in self.pieces), default=self.end)
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
        by_block: list[list[_Piece]] = [[] for _ in self.starts]
        for piece in self.pieces:
            by_block[piece.block].append(piece)
        found = []
        for block, (begin, end, span) in enumerate(zip(self.begins, self.ends, spans, strict=True)):
            own = [piece for piece in by_block[block] if piece.forward]
            left = [piece for piece in own if piece.left]
            passed = [piece for piece in left if piece.used > end]
            others = self.alive(begin + 1, end, block)
            bare = [
                piece._replace(freed=max(piece.used, piece.born)) if piece.left and piece.block == block else piece
                for piece in others
            ]
            late = [(moment, name) for moment, name in done if span[0] <= moment <= span[1]]
            found.append(
                Holding(
                    kept=_sum(left),
                    passed=_sum(passed),
                    forward=self.moments(others, begin + 1, end, block, []),
                    bare=self.moments(bare, begin + 1, end, block, []),
                    backward=self.moments(self.alive(*span, block), *span, block, late) if span[1] >= span[0] else (),
                )
            )
        return found

    def alive(self, first: int, last: int, block: int) -> list[_Piece]:
        """The pieces there at some moment from ``first`` to ``last``, but for what earlier blocks left for backward."""
        there = (self.born <= last) & (self.freed >= first) & ~(self.left & (self.of < block))
        return [self.pieces[number] for number in np.flatnonzero(there)]

    def moments(
        self, pieces: list[_Piece], first: int, last: int, block: int, done: list[tuple[int, str]]
    ) -> tuple[Moment, ...]:
        """The moments between two that need more than another in some way."""
        alive = [piece for piece in pieces if piece.born <= last and piece.freed >= first]
        at = sorted({max(piece.born, first) for piece in alive})
        found: set[Moment] = set()
        for moment in at:
            here = [piece for piece in alive if piece.born <= moment <= piece.freed]
            samples, fixed = _sum(here)
            entering = _sum([piece for piece in here if piece.block != block])
            gradients = sum(self.gradient.get(name, 0.0) for when, name in done if when < moment)
            found.add(Moment(samples, fixed, entering[0], gradients))
        return _most(found)


def _sum(pieces: list[_Piece]) -> tuple[float, float]:
    return sum(piece.bytes[0] for piece in pieces), sum(piece.bytes[1] for piece in pieces)


def _most(found: set[Moment]) -> tuple[Moment, ...]:
    """Those that no other exceeds in all of: bytes with and without what enters, fixed, gradients."""

    def measures(m: Moment) -> tuple[float, ...]:
        return m.sample_bytes, m.sample_bytes - m.entering_bytes, m.fixed_bytes, m.gradient_bytes

    kept: list[Moment] = []
    for moment in sorted(found, key=measures, reverse=True):
        if not any(all(a >= b for a, b in zip(measures(other), measures(moment), strict=True)) for other in kept):
            kept.append(moment)
    return tuple(kept)
