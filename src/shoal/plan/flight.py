"""What a rank of a pipeline has in hand at each action of its list, in micro-batches, chunk by chunk. No torch.

Counted as the engine holds it (parallel/pipeline/runtime.py): what a receive is posted into until the micro-batch's
backward is through, what a forward left, gradients that came back, and the last messages that were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from shoal.plan.messages import AHEAD, UNDER_WAY, Entry, Message, received_early, with_messages
from shoal.plan.ranks import rank_stages
from shoal.plan.schedule import Action, Kind, action_lists, parts

#: What is counted, in the order of ``Flights.counts``. ``whole``: forwards that wait for a backward; ``halved``: for
#: its second half; ``inputs``: what came, or may come, from another rank; ``gradients``: the same, and those of the
#: next stage here; ``sent_forward``: messages whose values nothing else keeps any more; ``apart``: 1 once weights'
#: gradients came of second halves alone.
Held = Literal["whole", "halved", "inputs", "gradients", "sent_forward", "sent_back", "apart"]
HELD: tuple[Held, ...] = ("whole", "halved", "inputs", "gradients", "sent_forward", "sent_back", "apart")


class Head(NamedTuple):
    """The action that runs: the rank's how-manieth chunk, the micro-batch (0 in a pipeline, where it makes no
    difference), and the chunks that ran a forward, and that were through with a backward, before."""

    chunk: int
    kind: Kind
    micro: int
    gathered: frozenset[int]
    through: frozenset[int]


class Flights(NamedTuple):
    """What a rank has in hand at its actions, all that differ. ``counts``: (actions, what of HELD x chunks); ``head``:
    (actions,), index into ``heads``."""

    heads: tuple[Head, ...]
    head: np.ndarray
    counts: np.ndarray


def flights(schedule: str, pipeline: int, chunks: int, micro_batches: int, early: bool) -> tuple[Flights, ...]:
    """Of each pipeline coordinate. ``early``: receives are posted ahead, as on the CPU."""
    return _flights(schedule, pipeline, chunks, enough(schedule, pipeline, micro_batches), early)


def enough(schedule: str, pipeline: int, micro_batches: int) -> int:
    """The micro-batches of a step, fewer where no more are ever in flight, that tells as much: once it is full, a
    pipeline comes through the same states again and again."""
    if schedule in ("gpipe", "looped-bfs"):
        return micro_batches
    if not schedule.startswith("interleaved"):
        return min(micro_batches, 3 * pipeline + AHEAD + UNDER_WAY)
    rounds = max(1, micro_batches // pipeline)
    return micro_batches // rounds * min(rounds, max(4, 2 * AHEAD // pipeline))


@lru_cache(maxsize=64)  # searches ask for the same ones with many cuts, micro-batches and ways to hold weights
def _flights(schedule: str, pipeline: int, chunks: int, micro_batches: int, early: bool) -> tuple[Flights, ...]:
    lists = with_messages(action_lists(schedule, pipeline, chunks, micro_batches))
    return tuple(
        _Hand(rank_stages(schedule, rank, pipeline, chunks), pipeline * chunks).flights(
            received_early(entries) if early else entries
        )
        for rank, entries in enumerate(lists)
    )


def alone(micro_batches: int) -> Flights:
    """Of a rank that is no pipeline's."""
    unlike = sorted({0, min(1, micro_batches - 1), micro_batches - 1})  # the others are as the second
    return _Hand((0,), 1).flights([Action(0, kind, micro) for micro in unlike for kind in ("F", "B")])


def in_flight(schedule: str | None, pipeline: int, chunks: int, micro_batches: int, rank: int) -> tuple[int, ...]:
    """Of each chunk of a pipeline's rank, the micro-batches that wait for their backward, or for its second half, when
    the rank has most of them (techniques: each schedule's own order)."""
    micro = micro_batches
    behind, width = pipeline - 1 - rank, micro // max(1, micro // pipeline)
    match schedule:
        case None:
            return (1,)
        case "1f1b":
            return (min(micro, behind + 1),)
        case "zbv":
            return min(micro, 2 * behind + 1 + rank), min(micro, rank + 1)
        case "dualpipev":
            return min(micro, 2 * behind + 2 + rank), rank + 1
        case "interleaved-1f1b" | "interleaved-zero-bubble":
            ahead = 2 * behind + 1 if schedule == "interleaved-1f1b" else pipeline
            turns, rest = divmod(min((chunks - 1) * width + ahead, micro * chunks), width)
            return tuple(
                width * len(range(chunk, turns, chunks)) + rest * (turns % chunks == chunk) for chunk in range(chunks)
            )
    return (micro,) * chunks


class _Hand:
    """The counts while a list is played: each change is noted, and summed up at the end."""

    def __init__(self, stages: Sequence[int], of: int) -> None:
        self.place = {stage: chunk for chunk, stage in enumerate(stages)}
        self.of, self.chunks = of, len(stages)
        self.cells: list[int] = []  # what changes: index into HELD x chunks
        self.changes: list[int] = []
        self.under_way: deque[tuple[bool, int, int]] = deque()  # forward, stage, micro-batch
        self.through: set[tuple[int, int]] = set()  # stage and micro-batch of forwards that are sent and given up
        self.gathered = self.done = frozenset[int]()  # chunks that ran a forward, that were through with a backward
        self.apart = [0] * len(stages)

    def flights(self, entries: Iterable[Entry]) -> Flights:
        """Play the list to its end."""
        numbers: dict[Head, int] = {}
        heads: list[int] = []
        at: list[int] = []  # how many changes came before
        for entry in entries:
            if isinstance(entry, Message):
                self.message(*entry)
                continue
            for stage, kind, micro in parts(entry):
                if kind != "I" or stage:  # the first stage has no first half
                    head = Head(self.place[stage], kind, micro * (self.of == 1), self.gathered, self.done)
                    heads.append(numbers.setdefault(head, len(numbers)))
                    at.append(len(self.cells))
                self.computed(stage, kind, micro)
        steps = np.zeros((len(self.cells) + 1, len(HELD) * self.chunks), np.int32)
        steps[np.arange(1, len(steps)), self.cells] = self.changes
        return _differing(tuple(numbers), np.array(heads), steps.cumsum(axis=0)[at])

    def add(self, what: Held, stage: int, number: int) -> None:
        self.cells.append(_ROW[what] * self.chunks + self.place[stage])
        self.changes.append(number)

    def message(self, stage: int, kind: str, micro: int) -> None:
        """A receive is posted, or something is sent and the oldest that is too much awaited."""
        if kind == "RECV_F":
            self.add("inputs", stage, 1)
            return
        if kind == "RECV_B":
            self.add("gradients", stage, 1)
            return
        self.under_way.append((kind == "SEND_F", stage, micro))
        if kind == "SEND_B":
            self.add("sent_back", stage, 1)
        if len(self.under_way) > UNDER_WAY:
            forward, stage, micro = self.under_way.popleft()
            if not forward:
                self.add("sent_back", stage, -1)
            elif (stage, micro) in self.through:
                self.add("sent_forward", stage, -1)

    def computed(self, stage: int, kind: Kind, micro: int) -> None:
        """An action is through."""
        chunk = self.place[stage]
        if kind == "F":
            self.add("whole", stage, 1)
            if chunk not in self.gathered:
                self.gathered |= {chunk}
            return
        if kind != "W" and stage - 1 in self.place:
            self.add("gradients", stage - 1, 1)
        if kind == "I":
            if stage:
                self.add("whole", stage, -1)
                self.add("halved", stage, 1)
            return
        self.add("halved" if kind == "W" and stage else "whole", stage, -1)
        if stage and stage - 1 not in self.place:
            self.add("inputs", stage, -1)
        if stage < self.of - 1:
            self.add("gradients", stage, -1)
        if (True, stage, micro) in self.under_way:
            self.through.add((stage, micro))
            self.add("sent_forward", stage, 1)
        apart = int(kind == "W" and stage > 0 and (self.apart[chunk] or chunk not in self.done))
        if apart != self.apart[chunk]:
            self.add("apart", stage, apart - self.apart[chunk])
            self.apart[chunk] = apart
        if chunk not in self.done:
            self.done |= {chunk}


_ROW = {what: row for row, what in enumerate(HELD)}


def _differing(heads: tuple[Head, ...], head: np.ndarray, counts: np.ndarray) -> Flights:
    """Those that differ, but for what has no more of anything than the one before or after it of the same head: of
    micro-batches that pile up, the last."""
    order = np.argsort(head, kind="stable")
    head, counts = head[order], counts[order]
    same, more = head[1:] == head[:-1], counts[1:] - counts[:-1]
    grows, falls = (more >= 0).all(axis=1), (more <= 0).all(axis=1)
    stays = np.ones(len(head), bool)
    stays[:-1] &= ~(same & grows)
    stays[1:] &= ~(same & falls & ~grows)
    rows = {(int(head[row]), counts[row].tobytes()): row for row in np.flatnonzero(stays)}
    chosen = list(rows.values())
    return Flights(heads, head[chosen], counts[chosen])
