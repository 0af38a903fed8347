"""A pipeline's step by playing the very action lists that run, with each stage's times."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, get_args

from shoal.core.errors import ConfigError
from shoal.plan.ranks import stage_rank
from shoal.plan.schedule import SPLIT, Action, Kind, action_lists, parts

KINDS: tuple[Kind, ...] = get_args(Kind)


class StageTime(NamedTuple):
    """Seconds of one micro-batch on one stage; ``backward`` = inputs' half + ``weights``' half. ``send``: of values to
    the next stage, which waits for them; ``back``: of their gradients from there; None: as long. ``forward_waits``,
    ``backward_waits``: of each, for other ranks: no processor is busy."""

    forward: float
    backward: float
    weights: float = 0.0
    send: float = 0.0
    back: float | None = None
    forward_waits: float = 0.0
    backward_waits: float = 0.0

    @property
    def sends(self) -> tuple[float, float]:
        """There and back."""
        return self.send, self.send if self.back is None else self.back


class Event(NamedTuple):
    """What rank ``rank`` did from ``start`` to ``end`` seconds."""

    rank: int
    action: Action
    start: float
    end: float


class Played(NamedTuple):
    """Seconds of a whole step, each rank's busy seconds, and the most chunks that it holds activations of."""

    makespan: float
    busy: tuple[float, ...]
    chunks: tuple[int, ...]
    events: tuple[Event, ...]

    @property
    def bubble(self) -> float:
        """Seconds that the busiest rank waits."""
        return self.makespan - max(self.busy)


class _Step(NamedTuple):
    """An action as numbers, so that thousands are played soon. ``length``: of its seconds in a table of kinds by stage.
    ``needs``: slot of what must have arrived from another stage, ``gives``: slot of what it sends, ``link``: from one
    rank to another, ``send``: of its seconds in a table of transfers, there and back by stage; -1: none."""

    rank: int
    length: int
    needs: int
    gives: int
    link: int
    send: int


class _Order(NamedTuple):
    """All actions of a schedule, each after what it needs: whatever the times are, one such order tells them all."""

    actions: tuple[Action, ...]
    steps: tuple[_Step, ...]
    chunks: tuple[int, ...]
    slots: int
    links: int


def as_run(schedule: str, times: list[StageTime]) -> list[StageTime]:
    """The stages' times as torch runs them: where backwards come in halves the first stage works out all in the second,
    as nobody waits for its first (``backward_weight_one_chunk`` of torch.distributed.pipelining.stage)."""
    if schedule not in SPLIT:
        return times
    return [times[0]._replace(weights=times[0].backward), *times[1:]]


def play(
    schedule: str, pipeline: int, chunks: int, micro_batches: int, times: Sequence[StageTime], sharing: float = 1.0
) -> Played:
    """Play the lists. ``times``: of every stage, ``pipeline`` x ``chunks`` of them, while all ranks compute.
    ``sharing``: while ranks wait, the others compute faster, by up to so much.

    A forward waits for that of the stage before, a backward for that of the stage after and for its own forward, the
    weights' half for the inputs'. Raises ConfigError where the numbers break the schedule's rules.
    """
    _check(pipeline, chunks, times)
    order = _order(schedule, pipeline, chunks, micro_batches)
    if sharing > 1:
        return _play_shared(order, pipeline, times, sharing)
    starts, ends = _moments(order, pipeline, times)
    busy = [0.0] * pipeline
    events = []
    for step, action, start, end in zip(order.steps, order.actions, starts, ends, strict=True):
        busy[step.rank] += end - start
        events.append(Event(step.rank, action, start, end))
    return Played(max(ends), tuple(busy), order.chunks, tuple(events))


def makespan_s(
    schedule: str, pipeline: int, chunks: int, micro_batches: int, times: Sequence[StageTime], sharing: float = 1.0
) -> float:
    """Seconds of the whole step alone; arguments and errors as of ``play``."""
    _check(pipeline, chunks, times)
    order = _order(schedule, pipeline, chunks, micro_batches)
    if sharing > 1:
        return _play_shared(order, pipeline, times, sharing).makespan
    return max(_moments(order, pipeline, times)[1])


def _check(pipeline: int, chunks: int, times: Sequence[StageTime]) -> None:
    if len(times) != pipeline * chunks:
        raise ConfigError(
            f"{len(times)} stage times for pipeline={pipeline} x {chunks} chunks; give {pipeline * chunks}"
        )


def _moments(order: _Order, pipeline: int, times: Sequence[StageTime]) -> tuple[list[float], list[float]]:
    """When each of an order's steps starts and ends."""
    lengths, sends = _seconds(times)
    at, arrived, free = [0.0] * pipeline, [0.0] * order.slots, [0.0] * order.links
    starts, ends = [], []
    for rank, length, needs, gives, link, send in order.steps:
        start = at[rank]
        if needs >= 0 and arrived[needs] > start:
            start = arrived[needs]
        end = at[rank] = start + lengths[length]
        starts.append(start)
        ends.append(end)
        if link >= 0:  # as _deliver, which would cost searches as much again
            free[link] = arrived[gives] = (end if end > free[link] else free[link]) + sends[send]
        elif gives >= 0:
            arrived[gives] = end
    return starts, ends


def _deliver(step: _Step, end: float, arrived: list[float], free: list[float], sends: list[float]) -> None:
    """A step ended; what other stages need of it is sent. What one rank sends to another goes one after the other: the
    link is busy for as long as each takes."""
    if step.link >= 0:
        free[step.link] = arrived[step.gives] = max(end, free[step.link]) + sends[step.send]
    elif step.gives >= 0:
        arrived[step.gives] = end


def _seconds(times: Sequence[StageTime]) -> tuple[list[float], list[float]]:
    """Of every kind of action by stage, and of every stage's transfers."""
    return [seconds for time in times for seconds in _lengths(time)], [each for time in times for each in time.sends]


def _lengths(time: StageTime) -> tuple[float, float, float, float]:
    """Seconds of each kind, in the order of KINDS."""
    return time.forward, time.backward, time.backward - time.weights, time.weights


def _computing(time: StageTime) -> tuple[float, ...]:
    """The part of each kind's seconds that a processor is busy, in the order of KINDS."""
    forward, backward = (
        1 - min(1.0, waits / whole) if whole else 1.0
        for whole, waits in ((time.forward, time.forward_waits), (time.backward, time.backward_waits))
    )
    return forward, backward, backward, backward


@lru_cache(maxsize=32)  # searches price one order with many times
def _order(schedule: str, pipeline: int, chunks: int, micro_batches: int) -> _Order:
    """An order for the lists. Raises ConfigError where there is none, or the numbers break the schedule's rules."""
    lists = [[parts(item) for item in actions] for actions in action_lists(schedule, pipeline, chunks, micro_batches)]
    numbered = _Numbered(schedule, pipeline, chunks, micro_batches)
    index, left = [0] * pipeline, sum(map(len, lists))
    actions, steps = [], []
    while left:
        before = left
        for rank, items in enumerate(lists):
            at = index[rank]
            while at < len(items) and all(map(numbered.ready, items[at])):
                for action in items[at]:
                    actions.append(action)
                    steps.append(numbered.step(rank, action))
                at += 1
            left -= at - index[rank]
            index[rank] = at
        if left == before:
            raise ConfigError(f"schedule {schedule} waits for itself; use another schedule")
    return _Order(tuple(actions), tuple(steps), _in_flight(lists), 2 * numbered.size, len(numbered.links))


class _Numbered:
    """Which (half, stage, micro-batch) are done while an order is made, and their numbers."""

    def __init__(self, schedule: str, pipeline: int, chunks: int, micro_batches: int) -> None:
        self.stages, self.micro_batches = pipeline * chunks, micro_batches
        self.place = [stage_rank(schedule, stage, pipeline, chunks) for stage in range(self.stages)]
        self.size = self.stages * micro_batches
        self.done = bytearray(2 * self.size)  # forwards, then the inputs' halves of backwards
        self.links: dict[tuple[int, int], int] = {}

    def ready(self, action: Action) -> bool:
        """Whether all is done that the action needs."""
        own, done = action.stage * self.micro_batches + action.micro, self.done
        if action.kind == "F":
            return action.stage == 0 or bool(done[own - self.micro_batches])
        if action.kind == "W":
            return bool(done[self.size + own])
        return bool(done[own] and (action.stage == self.stages - 1 or done[self.size + own + self.micro_batches]))

    def step(self, rank: int, action: Action) -> _Step:
        """An action that is done next. What it needs of its own stage its rank did before it."""
        stage, kind = action.stage, action.kind
        own, forward = stage * self.micro_batches + action.micro, kind == "F"
        length = len(KINDS) * stage + KINDS.index(kind)
        if kind == "W":
            return _Step(rank, length, -1, -1, -1, -1)
        gives = own if forward else self.size + own
        self.done[gives] = True
        source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        away = self.micro_batches * (source - stage)
        needs = gives + away if 0 <= source < self.stages else -1
        if not 0 <= target < self.stages:
            return _Step(rank, length, needs, -1, -1, -1)
        ends = self.place[stage], self.place[target]
        link = -1 if ends[0] == ends[1] else self.links.setdefault(ends, len(self.links))
        return _Step(rank, length, needs, gives, link, 2 * min(stage, target) + (not forward))


class _Running(NamedTuple):
    """What a rank is at: from when, its seconds that are left, and the part of them that it computes."""

    step: _Step
    action: Action
    start: float
    left: float
    computes: float


def _play_shared(order: _Order, pipeline: int, times: Sequence[StageTime], sharing: float) -> Played:
    """Ranks take turns on processors: with k of p computing, each is as fast as p / k, up to ``sharing``, ranks. A rank
    that waits for others is no faster for it, and leaves its processor meanwhile."""
    lengths, sends = _seconds(times)
    parts = [part for time in times for part in _computing(time)]
    queues: list[deque[tuple[_Step, Action]]] = [deque() for _ in range(pipeline)]
    for step, action in zip(order.steps, order.actions, strict=True):
        queues[step.rank].append((step, action))
    arrived, free = [math.inf] * order.slots, [0.0] * order.links
    running: list[_Running | None] = [None] * pipeline
    busy, events, now = [0.0] * pipeline, [], 0.0
    while any(queues) or any(running):
        coming = []
        for rank, queue in enumerate(queues):
            if not queue or running[rank] is not None:
                continue
            step, action = queue[0]
            ready = arrived[step.needs] if step.needs >= 0 else 0.0
            if ready <= now:
                queue.popleft()
                running[rank] = _Running(step, action, now, lengths[step.length], parts[step.length])
            else:
                coming.append(ready)
        active = [(rank, run) for rank, run in enumerate(running) if run is not None]
        busy_ranks = sum(run.computes for _, run in active)
        speed = min(sharing, pipeline / busy_ranks) if busy_ranks else sharing
        speeds = [1 / (1 - run.computes + run.computes / speed) for _, run in active]
        ends = [now + run.left / each for (_, run), each in zip(active, speeds, strict=True)]
        until = min([*coming, *ends])
        for (rank, run), end, each in zip(active, ends, speeds, strict=True):
            left = run.left - (until - now) * each
            running[rank] = run._replace(left=left)
            busy[rank] += until - now
            if end <= until or left <= 1e-9 * (run.left + 1e-12):  # what is left may be too little to move the clock
                _deliver(run.step, until, arrived, free, sends)
                events.append(Event(rank, run.action, run.start, until))
                running[rank] = None
        now = until
    return Played(now, tuple(busy), order.chunks, tuple(events))


def _in_flight(lists: list[list[tuple[Action, ...]]]) -> tuple[int, ...]:
    """The most chunks that each rank holds activations of: forwards less whole backwards or weights' halves."""
    most = []
    for actions in lists:
        held = peak = 0
        for action in (action for entry in actions for action in entry):
            held += 1 if action.kind == "F" else -1 if action.kind in "BW" else 0
            peak = max(peak, held)
        most.append(peak)
    return tuple(most)


def closed_form(
    schedule: str, pipeline: int, chunks: int, micro_batches: int, times: Sequence[StageTime]
) -> tuple[float, float]:
    """The makespan without playing, and of it what sending adds: exact where all stages take the same time.

    The busiest rank's work, the others' fill and drain once per chunk (techniques of the schedules' papers: the bubble
    is (P - 1)(F + B) of a chunk, with split backwards (P - 1)(F + I - W)), and 2 (P - 1) / P sends per micro-batch.
    """
    work, fill = [0.0] * pipeline, [0.0] * pipeline
    split = schedule in SPLIT
    for stage, time in enumerate(times):
        rank = stage_rank(schedule, stage, pipeline, chunks)
        work[rank] += time.forward + time.backward
        fill[rank] += (time.forward + time.backward - (2 * time.weights if split else 0.0)) / chunks
    busiest = max(range(pipeline), key=work.__getitem__)
    bubble = sum(fill) - fill[busiest]
    both = max(map(sum, (time.sends for time in times)))
    if schedule in ("gpipe", "looped-bfs"):
        sent = (pipeline - 1) * both
    else:
        sent = both * (micro_batches * (pipeline - 1) / pipeline + max(0, pipeline - 2)) / chunks
    return micro_batches * work[busiest] + bubble + sent, sent
