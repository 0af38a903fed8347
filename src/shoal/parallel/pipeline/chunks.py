"""What each stage of a pipeline runs and holds, and what crosses between stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.parallel.pipeline.skeleton import Recording, Skeleton


class Stages(NamedTuple):
    """A recording cut into stages: each one's events, and the values that come in."""

    recording: Recording
    spans: tuple[range, ...]
    crossing: tuple[tuple[int, ...], ...]  # into each stage; () for the first

    def leaving(self, stage: int) -> tuple[int, ...]:
        """The values that a stage hands on, in order: its own and those that pass through."""
        return self.crossing[stage + 1]


def stages_of(recording: Recording, cuts: tuple[str, ...]) -> Stages:
    """Cut a recording before the first call of each unit in ``cuts``. Raises ConfigError."""
    first: dict[str, int] = {}
    for number, event in enumerate(recording.events):
        first.setdefault(event.what, number)
    bounds = [0]
    for unit in cuts:
        at = first.get(f"unit {unit}")
        if at is None:
            known = [what.removeprefix("unit ") for what in first if what.startswith("unit ")]
            raise ConfigError(f"cut before {unit!r}: the forward calls no such unit; it calls {', '.join(known)}")
        if at <= bounds[-1]:
            raise ConfigError(
                f"cut before {unit!r} comes before the cut of an earlier stage; order the cuts by forward"
            )
        bounds.append(at)
    bounds.append(len(recording.events))
    crossing = [(), *(_crossing(recording, bound) for bound in bounds[1:-1])]
    spans = tuple(range(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False))
    return Stages(recording, spans, tuple(crossing))


def _crossing(recording: Recording, at: int) -> tuple[int, ...]:
    made = {value for event in recording.events[:at] for value in event.gives}
    read = {value for event in recording.events[at:] for value in event.reads} | set(recording.returned)
    return tuple(sorted(made & read))


def holders(stages: Stages, names: list[str]) -> dict[str, tuple[int, ...]]:
    """For each parameter, the stages that read it (the first one where none does): several where it is tied."""
    found: dict[str, set[int]] = {name: set() for name in names}
    for stage, span in enumerate(stages.spans):
        for event in stages.recording.events[span.start : span.stop]:
            for name in event.parameters:
                found[name].add(stage)
    return {name: tuple(sorted(of)) or (0,) for name, of in found.items()}


@dataclass(frozen=True)
class Call:
    """One micro-batch's forward: the model's inputs, how they are cut, and what a stage does around and after it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stages: Stages
    around: Callable[[], AbstractContextManager[Any]]  # seeds and autocast
    plain: Callable[[Tensor], Tensor]  # whole values of those that are split over tensor ranks
    end: Callable[[Any], Tensor | None]  # on the last stage: from what the model returned to the loss


class _Leave(torch.autograd.Function):
    """The same values under a node of their own: schedules that split the backward detach in place what leaves a stage,
    which nothing may be that the stage's own backward still needs, nor a view."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Chunk(nn.Module):
    """A stage's part of the live model. Its parameters are the ones that the stage holds."""

    skeleton: Skeleton
    stage: int
    names: list[str]

    def __init__(self, skeleton: Skeleton, stage: int, names: list[str]) -> None:
        super().__init__()
        self.stage, self.names = stage, names
        object.__setattr__(self, "skeleton", skeleton)  # the model is not this module's: it is whole elsewhere

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The stage's parameters as the live model has them now (whole, where shards were gathered)."""
        return (self.skeleton.model.get_parameter(name) for name in self.names)

    def forward(self, *received: Tensor, call: Call) -> tuple[Tensor, ...]:
        """The values that leave the stage, or the last stage's loss."""
        stages = call.stages
        known = dict(zip(stages.crossing[self.stage], received, strict=True))
        for number in stages.recording.overwritten & known.keys():
            known[number] = known[number].clone()  # a received value is a leaf, which nothing may overwrite
        with call.around():
            known, result = self.skeleton.run(stages.recording, stages.spans[self.stage], known, call.args, call.kwargs)
            if self.stage + 1 == len(stages.spans):
                loss = call.end(result)
                return () if loss is None else (loss,)
            known = {number: call.plain(known[number]) for number in stages.leaving(self.stage)}
        return tuple(
            value.clone() if number in stages.crossing[self.stage] or value._is_view() else _Leave.apply(value)
            for number, value in ((n, known[n]) for n in stages.leaving(self.stage))
        )
