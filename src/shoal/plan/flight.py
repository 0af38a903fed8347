"""What a rank of a pipeline has in hand at each action of its list, in micro-batches, chunk by chunk. No torch.

Counted as the engine holds it (parallel/pipeline/runtime.py): what a receive is posted into until the micro-batch's
backward is through, what a forward left, gradients that came back, and the last messages that were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import ge
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
    """The action that runs: the rank's how-manieth chunk, whether on the first or last micro-batch, and whether the
    chunk was through with a backward before."""

    chunk: int
    kind: Kind
    first: bool
    last: bool
    done: bool


class Flights(NamedTuple):
    """What a rank has in hand at its actions, but where another with the same head has as much of everything.
    ``counts``: (actions, what of HELD, chunks)."""

    heads: tuple[Head, ...]
    counts: np.ndarray


def flights(schedule: str, pipeline: int, chunks: int, micro_batches: int, early: bool) -> tuple[Flights, ...]:
    """Of each pipeline coordinate. ``early``: receives are posted ahead, as on the CPU."""
    return _flights(schedule, pipeline, chunks, enough(schedule, pipeline, micro_batches), early)


def enough(schedule: str, pipeline: int, micro_batches: int) -> int:
    """The micro-batches of a step, fewer where no more are ever in flight, that tells as much: once it is full, a
    pipeline comes through the same states again and again."""
    if schedule in ("gpipe", "looped-bfs"):
        return micro_batches
    least = max(4 * pipeline, 2 * AHEAD)
    if not schedule.startswith("interleaved"):
        return min(micro_batches, least)
    rounds = max(1, micro_batches // pipeline)
    return micro_batches // rounds * min(rounds, least // pipeline)


@lru_cache(maxsize=512)  # searches ask for the same ones with many cuts, micro-batches and ways to hold weights
def _flights(schedule: str, pipeline: int, chunks: int, micro_batches: int, early: bool) -> tuple[Flights, ...]:
    lists = with_messages(action_lists(schedule, pipeline, chunks, micro_batches))
    return tuple(
        _Hand(rank_stages(schedule, rank, pipeline, chunks), pipeline * chunks, micro_batches).flights(
            received_early(entries) if early else entries
        )
        for rank, entries in enumerate(lists)
    )


def alone(micro_batches: int) -> Flights:
    """Of a rank that is no pipeline's."""
    unlike = sorted({0, min(1, micro_batches - 1), micro_batches - 1})  # the others are as the second
    return _Hand((0,), 1, micro_batches).flights([Action(0, kind, micro) for micro in unlike for kind in ("F", "B")])


class _Hand:
    """The counts while a list is played."""

    def __init__(self, stages: Sequence[int], of: int, micro_batches: int) -> None:
        self.place = {stage: chunk for chunk, stage in enumerate(stages)}
        self.of, self.micro_batches = of, micro_batches
        self.held = [[0] * len(stages) for _ in HELD]
        self.under_way: deque[tuple[bool, int, int]] = deque()  # forward, stage, micro-batch
        self.through: set[tuple[int, int]] = set()  # stage and micro-batch of forwards that are sent and given up
        self.done = [False] * len(stages)

    def flights(self, entries: Iterable[Entry]) -> Flights:
        """Play the list to its end."""
        seen: set[tuple[Head, tuple[int, ...]]] = set()
        most: dict[Head, list[tuple[int, ...]]] = {}
        for entry in entries:
            if isinstance(entry, Message):
                self.message(entry)
                continue
            for action in parts(entry):
                if action.kind != "I" or action.stage:  # the first stage has no first half
                    now = self.head(action), tuple(chain.from_iterable(self.held))
                    if now not in seen:
                        seen.add(now)
                        _keep(most.setdefault(now[0], []), now[1])
                self.computed(action)
        heads = tuple(head for head, rows in most.items() for _ in rows)
        counts = np.array([row for rows in most.values() for row in rows])
        return Flights(heads, counts.reshape(len(heads), len(HELD), len(self.place)))

    def head(self, action: Action) -> Head:
        chunk = self.place[action.stage]
        return Head(chunk, action.kind, action.micro == 0, action.micro == self.micro_batches - 1, self.done[chunk])

    def add(self, what: Held, stage: int, number: int) -> None:
        self.held[HELD.index(what)][self.place[stage]] += number

    def message(self, entry: Message) -> None:
        """A receive is posted, or something is sent and the oldest that is too much awaited."""
        stage, kind, micro = entry
        if kind == "RECV_F":
            self.add("inputs", stage, 1)
        elif kind == "RECV_B":
            self.add("gradients", stage, 1)
        else:
            self.under_way.append((kind == "SEND_F", stage, micro))
            self.add("sent_back", stage, kind == "SEND_B")
            if len(self.under_way) > UNDER_WAY:
                forward, stage, micro = self.under_way.popleft()
                gone = (stage, micro) in self.through if forward else True
                self.add("sent_forward" if forward else "sent_back", stage, -gone)

    def computed(self, action: Action) -> None:
        """An action is through."""
        stage, kind, micro = action
        if kind == "F":
            self.add("whole", stage, 1)
            return
        split = kind == "I" and stage > 0
        if split:
            self.add("whole", stage, -1)
            self.add("halved", stage, 1)
        if kind in "BI" and stage - 1 in self.place:
            self.add("gradients", stage - 1, 1)
        if kind == "I":
            return
        self.add("halved" if kind == "W" and stage else "whole", stage, -1)
        self.add("inputs", stage, -(stage > 0 and stage - 1 not in self.place))
        self.add("gradients", stage, -(stage < self.of - 1))
        if (True, stage, micro) in self.under_way:
            self.through.add((stage, micro))
            self.add("sent_forward", stage, 1)
        self.finished(stage, kind)

    def finished(self, stage: int, kind: Kind) -> None:
        """A backward is through, and with it weights' gradients: apart from the others where all came of halves."""
        chunk, apart = self.place[stage], self.held[HELD.index("apart")]
        if kind == "B" or not stage:
            apart[chunk] = 0
        elif not self.done[chunk]:
            apart[chunk] = 1
        self.done[chunk] = True


def _keep(rows: list[tuple[int, ...]], new: tuple[int, ...]) -> None:
    """Add what no other has as much of, and drop what it has as much of."""
    if not any(all(map(ge, row, new)) for row in rows):
        rows[:] = [row for row in rows if not all(map(ge, new, row))]
        rows.append(new)
