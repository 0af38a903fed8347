"""The order in which each rank of a pipeline computes, for every schedule, without torch.

The lists hold the same actions in the same order as those of ``torch.distributed.pipelining``, so that what is
simulated is what runs. Torch's lists also hold None for ticks in which a rank idles; its runtime drops those and waits
for the data itself, and so must whoever plays a list, so they are not in ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Literal, NamedTuple, cast, get_args

from shoal.core.errors import ConfigError, nearest
from shoal.plan.ranks import rank_stages

ScheduleName = Literal["gpipe", "1f1b", "looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"]
#: Those whose backwards come in halves: gradients of what came in, then of weights.
SPLIT = ("interleaved-zero-bubble", "zbv", "dualpipev")
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
Kind = Literal["F", "B", "I", "W"]

#: How many chunks a rank may hold: least and most (None: any number).
_CHUNKS: dict[str, tuple[int, int | None]] = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "looped-bfs": (1, None),
    "interleaved-1f1b": (2, None),
    "interleaved-zero-bubble": (1, None),
    "zbv": (2, 2),
    "dualpipev": (2, 2),
}


class Action(NamedTuple):
    """A stage's work on a micro-batch: F forward, B backward, or its halves I (inputs' gradient) and W (weights')."""

    stage: int
    kind: Kind
    micro: int

    def __str__(self) -> str:
        """As torch writes and reads it, for example ``2F0``."""
        return f"{self.stage}{self.kind}{self.micro}"


class Overlap(NamedTuple):
    """A forward and a backward that one rank may run at the same time."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        """As torch writes and reads it, for example ``(0F3;7B0)OVERLAP_F_B``."""
        return f"({self.forward};{self.backward})OVERLAP_F_B"


def parts(entry: Action | Overlap) -> tuple[Action, ...]:
    """The actions of one entry of a list, in the order in which they run."""
    return (entry,) if isinstance(entry, Action) else (entry.forward, entry.backward)


Actions = list[Action | Overlap]
Stages = tuple[int, ...]


def action_lists(schedule: str, pipeline: int, chunks: int, micro_batches: int) -> list[Actions]:
    """What each rank of the pipeline computes in one step, in order, by pipeline coordinate.

    Raises ConfigError where the numbers break the schedule's rules (see ``conflicts``).
    """
    broken = conflicts(schedule, pipeline, chunks, micro_batches)
    if broken:
        raise ConfigError("\n".join(broken))
    return [list(actions) for actions in _lists(schedule, pipeline, chunks, micro_batches)]


@lru_cache(maxsize=4)  # a plan's memory and its time are worked out from the same ones
def _lists(schedule: str, pipeline: int, chunks: int, micro_batches: int) -> tuple[tuple[Action | Overlap, ...], ...]:
    return tuple(
        tuple(_ORDERS[schedule](rank_stages(schedule, rank, pipeline, chunks), rank, pipeline, micro_batches))
        for rank in range(pipeline)
    )


def conflicts(schedule: str, pipeline: int, chunks: int, micro_batches: int) -> list[str]:
    """Which of the schedule's rules these numbers break, each with what to change."""
    if schedule not in SCHEDULES:
        return [f"no schedule {schedule!r}; {nearest(schedule, SCHEDULES)}"]
    broken = []
    least, most = _CHUNKS[schedule]
    if chunks < least or (most is not None and chunks > most):
        needed = f"exactly {least}" if least == most else f"at least {least}"
        broken.append(f"schedule {schedule} takes {needed} chunks per rank, not {chunks}; set chunks = {least}")
    fewest = least_micro_batches(schedule, pipeline, chunks)
    rounds = _rounds(pipeline, micro_batches)
    if micro_batches < fewest:
        broken.append(
            f"schedule {schedule} on pipeline={pipeline} takes at least {fewest} micro-batches per step, not "
            f"{micro_batches}; use a smaller micro-batch, a larger global batch, or schedule gpipe"
        )
    elif schedule.startswith("interleaved") and micro_batches % rounds:
        broken.append(
            f"schedule {schedule} on pipeline={pipeline} takes {micro_batches} micro-batches in {rounds} equal rounds, "
            f"and {micro_batches} is no multiple of {rounds}; use {micro_batches // rounds * rounds} micro-batches per "
            f"step, or any multiple of {pipeline}"
        )
    return broken


def least_micro_batches(schedule: str, pipeline: int, chunks: int) -> int:
    """The fewest micro-batches per step that the schedule takes."""
    return {"1f1b": pipeline, "dualpipev": pipeline * chunks}.get(schedule, 1)


def _rounds(pipeline: int, micro_batches: int) -> int:
    """How often interleaved schedules go through their chunks; each round takes an equal part of the micro-batches."""
    return max(1, micro_batches // pipeline)


def _gpipe(stages: Stages, rank: int, pipeline: int, micro_batches: int) -> Actions:
    """GPipe, https://arxiv.org/abs/1811.06965: all forwards, then all backwards."""
    return _numbered(["F0"] * micro_batches + ["B0"] * micro_batches, stages)


def _1f1b(stages: Stages, rank: int, pipeline: int, micro_batches: int) -> Actions:
    """PipeDream-flush, https://arxiv.org/abs/2006.09503: as many forwards ahead as there are stages behind this one."""
    ahead = pipeline - 1 - rank
    return _numbered(["F0"] * ahead + ["F0", "B0"] * (micro_batches - ahead) + ["B0"] * ahead, stages)


def _looped_bfs(stages: Stages, rank: int, pipeline: int, micro_batches: int) -> Actions:
    """Breadth-first pipeline parallelism, https://arxiv.org/abs/2211.05953: all micro-batches, chunk by chunk."""
    forwards = [Action(stage, "F", micro) for stage in stages for micro in range(micro_batches)]
    return [*forwards, *(Action(stage, "B", micro) for stage, _, micro in reversed(forwards))]


def _interleaved_1f1b(stages: Stages, rank: int, pipeline: int, micro_batches: int) -> Actions:
    """Interleaved 1F1B, https://arxiv.org/abs/2104.04473: forwards ahead, then one forward for each backward."""
    forwards, backwards, width = _turns(stages, pipeline, micro_batches)
    ahead = (len(stages) - 1) * width + 2 * (pipeline - 1 - rank)
    actions: Actions = list(forwards[:ahead])
    for index, (stage, micro) in enumerate(backwards, ahead):
        actions += [*forwards[index : index + 1], Action(stage, "B", micro)]
    return actions


def _interleaved_zero_bubble(stages: Stages, rank: int, pipeline: int, micro_batches: int) -> Actions:
    """ZB1P, https://arxiv.org/abs/2401.10241, interleaved: on rank r, W comes r backwards after its I."""
    forwards, backwards, width = _turns(stages, pipeline, micro_batches)
    ahead = (len(stages) - 1) * width + pipeline - 1 - rank
    weights = [Action(stage, "W", micro) for stage, micro in backwards]
    actions: Actions = list(forwards[:ahead])
    for done, (stage, micro) in enumerate(backwards):
        actions += [*forwards[ahead + done : ahead + done + 1], Action(stage, "I", micro)]
        if done >= rank:
            actions.append(weights[done - rank])
    return actions + weights[max(0, len(weights) - rank) :]


def _turns(stages: Stages, pipeline: int, micro_batches: int) -> tuple[list[Action], list[tuple[int, int]], int]:
    """The forwards in turn, the (stage, micro-batch) of the backwards in turn, and a round's micro-batches.

    Each round takes its micro-batches through the rank's first chunk, then its second...; backwards from the last.
    """
    width = micro_batches // _rounds(pipeline, micro_batches)
    rounds = [range(first, first + width) for first in range(0, micro_batches, width)]
    forwards = [Action(stage, "F", micro) for micros in rounds for stage in stages for micro in micros]
    backwards = [(stage, micro) for micros in rounds for stage in reversed(stages) for micro in micros]
    return forwards, backwards, width


def _zbv(stages: Stages, rank: int, pipeline: int, micro_batches: int) -> Actions:
    """ZB-V, https://arxiv.org/abs/2401.10241, section 6: written for a full pipeline, what is too much left out."""
    full, behind = max(2 * pipeline - 1, micro_batches), pipeline - 1 - rank
    warm_up = ["F0"] * (2 * behind + 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * (behind + 1)
    steady = ["F0", "I0", "W0", "F1", "I1", "W1"] * (full - 2 * behind - 1 - rank)
    drain = ["I0", "W0", "F1", "I1", "W1"] * behind + ["I0", "I1"] * rank + ["I0", "W0"] * (behind + 1)
    actions = _numbered([*warm_up, *steady, *drain, *["W1"] * rank, *["W0"] * rank], stages)
    return [action for action in actions if isinstance(action, Action) and action.micro < micro_batches]


def _dualpipev(stages: Stages, rank: int, pipeline: int, micro_batches: int) -> Actions:
    """DualPipe cut in half, https://github.com/deepseek-ai/DualPipe: pairs of a forward and a backward overlap."""
    behind = pipeline - 1 - rank
    warm_up = ["F0"] * (2 * behind) + ["F0", "F1"] * (rank + 1) + ["I1", "W1", "F1"] * behind
    pairs = ["F0B1", "F1B0"] * (micro_batches - 2 * pipeline + rank + 1)
    if behind == 0:
        pairs[:1] = ["F0", "B1"]  # the last rank has nothing to wait for: apart, they leave a smaller bubble
    drain = ["B1", "F1B0"] * behind
    # Of the last backwards the later half is split, so that W fills the bubble.
    chunks = ["1", "0"] * (rank + 1)
    whole, split = chunks[: rank + 1], chunks[rank + 1 :]
    drain += [f"B{chunk}" for chunk in whole] + [f"I{chunk}" for chunk in split]
    weights = [f"W{chunk}" for chunk in split] + ["W0"] * behind
    drain += [word for weight in weights[:behind] for word in (weight, "I0")] + weights[behind:]
    return _numbered(warm_up + pairs + drain, stages)


def _numbered(words: Iterable[str], stages: Stages) -> Actions:
    """Actions from words like ``F0`` (kind, which of the rank's chunks) or the overlapped pair ``F0B1``.

    A chunk's k-th forward is for micro-batch k, and so is each half of its k-th backward.
    """
    done: dict[str, list[int]] = {half: [0] * len(stages) for half in "FIW"}

    def act(kind: str, chunk: str) -> Action:
        own, at = done["I" if kind == "B" else kind], int(chunk)
        micro = own[at]
        own[at] += 1
        if kind == "B":
            done["W"][at] += 1
        return Action(stages[at], cast(Kind, kind), micro)

    return [act(*word) if len(word) == 2 else Overlap(act(*word[:2]), act(*word[2:])) for word in words]


_ORDERS: dict[str, Callable[[Stages, int, int, int], Actions]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "looped-bfs": _looped_bfs,
    "interleaved-1f1b": _interleaved_1f1b,
    "interleaved-zero-bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
