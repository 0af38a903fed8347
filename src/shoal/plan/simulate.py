"""A pipeline's step by playing the very action lists that run, with each stage's times."""

from __future__ import annotations

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


def play(schedule: str, pipeline: int, chunks: int, micro_batches: int, times: Sequence[StageTime]) -> Played:
    """Play the lists. ``times``: of every stage, ``pipeline`` x ``chunks`` of them.

    A forward waits for that of the stage before, a backward for that of the stage after and for its own forward, the
    weights' half for the inputs'. Raises ConfigError where the numbers break the schedule's rules.
    """
    if len(times) != pipeline * chunks:
        raise ConfigError(
            f"{len(times)} stage times for pipeline={pipeline} x {chunks} chunks; give {pipeline * chunks}"
        )
    lists = [[_parts(item) for item in actions] for actions in action_lists(schedule, pipeline, chunks, micro_batches)]
    place = [stage_rank(schedule, stage, pipeline, chunks) for stage in range(len(times))]
    done: dict[tuple[str, int, int], float] = {}
    at, index, busy = [0.0] * pipeline, [0] * pipeline, [0.0] * pipeline
    events: list[Event] = []
    left = sum(map(len, lists))
    while left:
        before = left
        for rank, actions in enumerate(lists):
            while index[rank] < len(actions):
                ready = [_ready(action, times, place, done) for action in actions[index[rank]]]
                if any(moment is None for moment in ready):
                    break
                for action, moment in zip(actions[index[rank]], ready, strict=True):
                    start = max(at[rank], moment or 0.0)
                    at[rank] = start + _length(action, times)
                    busy[rank] += at[rank] - start
                    for half in "IW" if action.kind == "B" else action.kind:
                        done[half, action.stage, action.micro] = at[rank]
                    events.append(Event(rank, action, start, at[rank]))
                index[rank] += 1
                left -= 1
        if left == before:
            raise ConfigError(f"schedule {schedule} waits for itself; use another schedule")
    return Played(max(at), tuple(busy), _in_flight(lists), tuple(events))


def _parts(item: Action | Overlap) -> tuple[Action, ...]:
    return (item,) if isinstance(item, Action) else (item.forward, item.backward)


def _ready(action: Action, times: Sequence[StageTime], place: list[int], done: dict) -> float | None:
    """When what the action needs is there, or None where it has not been computed yet."""
    stage, micro = action.stage, action.micro
    if action.kind == "F":
        return 0.0 if stage == 0 else _arrival("F", stage - 1, stage, micro, times, place, done)
    if action.kind == "W":
        return done.get(("I", stage, micro))
    own = done.get(("F", stage, micro))
    if own is None or stage == len(times) - 1:
        return own
    later = _arrival("I", stage + 1, stage, micro, times, place, done)
    return None if later is None else max(own, later)


def _arrival(kind: str, source: int, target: int, micro: int, times, place: list[int], done: dict) -> float | None:
    sent = done.get((kind, source, micro))
    if sent is None:
        return None
    return sent if place[source] == place[target] else sent + times[min(source, target)].send


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
