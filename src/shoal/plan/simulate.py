"""A pipeline's step by playing the very action lists that run, with each stage's times."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from shoal.core.errors import ConfigError
from shoal.plan.ranks import stage_rank
from shoal.plan.schedule import Action, Overlap, action_lists


class StageTime(NamedTuple):
    """Seconds of one micro-batch on one stage; ``backward`` = inputs' half + ``weights``' half. ``send``: one way to
    the next stage, which the receiver waits for."""

    forward: float
    backward: float
    weights: float = 0.0
    send: float = 0.0


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


def play(
    schedule: str, pipeline: int, chunks: int, micro_batches: int, times: Sequence[StageTime], sharing: float = 1.0
) -> Played:
    """Play the lists. ``times``: of every stage, ``pipeline`` x ``chunks`` of them, while all ranks compute.
    ``sharing``: while ranks wait, the others compute faster, by up to so much.

    A forward waits for that of the stage before, a backward for that of the stage after and for its own forward, the
    weights' half for the inputs'. Raises ConfigError where the numbers break the schedule's rules.
    """
    if len(times) != pipeline * chunks:
        raise ConfigError(
            f"{len(times)} stage times for pipeline={pipeline} x {chunks} chunks; give {pipeline * chunks}"
        )
    lists = [[_parts(item) for item in actions] for actions in action_lists(schedule, pipeline, chunks, micro_batches)]
    place = [stage_rank(schedule, stage, pipeline, chunks) for stage in range(len(times))]
    progress = _Progress(times, place)
    if sharing > 1:
        return _play_shared(lists, progress, sharing)
    at, index, busy = [0.0] * pipeline, [0] * pipeline, [0.0] * pipeline
    events: list[Event] = []
    left = sum(map(len, lists))
    while left:
        before = left
        for rank, actions in enumerate(lists):
            while index[rank] < len(actions):
                ready = [progress.ready(action) for action in actions[index[rank]]]
                if any(moment is None for moment in ready):
                    break
                for action, moment in zip(actions[index[rank]], ready, strict=True):
                    start = max(at[rank], moment or 0.0)
                    at[rank] = start + _length(action, times)
                    busy[rank] += at[rank] - start
                    progress.finish(action, at[rank])
                    events.append(Event(rank, action, start, at[rank]))
                index[rank] += 1
                left -= 1
        if left == before:
            raise ConfigError(f"schedule {schedule} waits for itself; use another schedule")
    return Played(max(at), tuple(busy), _in_flight(lists), tuple(events))


class _Progress:
    """What has been done and what has arrived, by (half, stage, micro-batch). What one rank sends to another goes one
    after the other: the link is busy for as long as each takes."""

    def __init__(self, times: Sequence[StageTime], place: Sequence[int]) -> None:
        self.times, self.place = times, place
        self.done: dict[tuple[str, int, int], float] = {}
        self.arrived: dict[tuple[str, int, int], float] = {}
        self.free: dict[tuple[int, int], float] = {}

    def finish(self, action: Action, at: float) -> None:
        """An action ended at ``at``; what other stages need of it is sent."""
        for half in "IW" if action.kind == "B" else action.kind:
            self.done[half, action.stage, action.micro] = at
            target = action.stage + (1 if half == "F" else -1)
            if half == "W" or not 0 <= target < len(self.times):
                continue
            link, arrived = (self.place[action.stage], self.place[target]), at
            if link[0] != link[1]:
                arrived = max(at, self.free.get(link, 0.0)) + self.times[min(action.stage, target)].send
                self.free[link] = arrived
            self.arrived[half, action.stage, action.micro] = arrived

    def ready(self, action: Action) -> float | None:
        """When what the action needs is there, or None where it has not been computed yet."""
        stage, micro = action.stage, action.micro
        if action.kind == "F":
            return 0.0 if stage == 0 else self.arrived.get(("F", stage - 1, micro))
        if action.kind == "W":
            return self.done.get(("I", stage, micro))
        own = self.done.get(("F", stage, micro))
        if own is None or stage == len(self.times) - 1:
            return own
        later = self.arrived.get(("I", stage + 1, micro))
        return None if later is None else max(own, later)


class _Running(NamedTuple):
    """What a rank is at: from when, and its seconds of work that are left."""

    action: Action
    start: float
    left: float


def _play_shared(lists: list[list[tuple[Action, ...]]], progress: _Progress, sharing: float) -> Played:
    """Ranks take turns on processors: with k of p computing, each is as fast as p / k, up to ``sharing``, ranks."""
    queues = [deque(action for item in actions for action in item) for actions in lists]
    running: list[_Running | None] = [None] * len(lists)
    busy, events, now = [0.0] * len(lists), [], 0.0
    while any(queues) or any(running):
        coming = []
        for rank, queue in enumerate(queues):
            ready = progress.ready(queue[0]) if queue and running[rank] is None else None
            if ready is not None and ready <= now:
                action = queue.popleft()
                running[rank] = _Running(action, now, _length(action, progress.times))
            elif ready is not None:
                coming.append(ready)
        active = [(rank, run) for rank, run in enumerate(running) if run is not None]
        if not active and not coming:
            raise ConfigError("the schedule waits for itself; use another schedule")
        speed = min(sharing, len(lists) / len(active)) if active else 1.0
        until = min([*coming, *(now + run.left / speed for _, run in active)])
        for rank, run in active:
            left = run.left - (until - now) * speed
            running[rank] = run._replace(left=left)
            busy[rank] += until - now
            if left <= 1e-9 * (run.left + 1e-12):
                progress.finish(run.action, until)
                events.append(Event(rank, run.action, run.start, until))
                running[rank] = None
        now = until
    return Played(now, tuple(busy), _in_flight(lists), tuple(events))


def _parts(item: Action | Overlap) -> tuple[Action, ...]:
    return (item,) if isinstance(item, Action) else (item.forward, item.backward)


def _length(action: Action, times: Sequence[StageTime]) -> float:
    time = times[action.stage]
    return {"F": time.forward, "B": time.backward, "I": time.backward - time.weights, "W": time.weights}[action.kind]


def _in_flight(lists: list[list[tuple[Action, ...]]]) -> tuple[int, ...]:
    """The most chunks that each rank holds activations of: forwards less whole backwards or weights' halves."""
    most = []
    for actions in lists:
        held = peak = 0
        for action in (action for parts in actions for action in parts):
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
    split = schedule in ("interleaved-zero-bubble", "zbv", "dualpipev")
    for stage, time in enumerate(times):
        rank = stage_rank(schedule, stage, pipeline, chunks)
        work[rank] += time.forward + time.backward
        fill[rank] += (time.forward + time.backward - (2 * time.weights if split else 0.0)) / chunks
    busiest = max(range(pipeline), key=work.__getitem__)
    bubble = sum(fill) - fill[busiest]
    send = max(time.send for time in times)
    if schedule in ("gpipe", "looped-bfs"):
        sent = 2 * (pipeline - 1) * send
    else:
        sent = send * (2 * micro_batches * (pipeline - 1) / pipeline + 2 * max(0, pipeline - 2)) / chunks
    return micro_batches * work[busiest] + bubble + sent, sent
