"""The pipeline technique: a model becomes this rank's stages, and a window one run of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.blueprint.cut import cut
from shoal.blueprint.facts import Blueprint, inside
from shoal.blueprint.structures import tensors
from shoal.parallel.pipeline.chunks import Call, Chunk, Stages, holders, stages_of
from shoal.parallel.pipeline.runtime import Pipeline
from shoal.parallel.pipeline.skeleton import Skeleton
from shoal.parallel.replicate.buckets import Tie
from shoal.plan.plan import Plan
from shoal.plan.ranks import coordinates, rank_of, rank_stages, stage_rank


class Example(NamedTuple):
    """A micro-batch's inputs as the model takes them, and what holds around a forward (precision)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    around: Callable[[], AbstractContextManager[Any]]
    samples: int


class Pass(Protocol):
    """A micro-batch on its way through the model, as the engine makes it."""

    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...
    def around(self) -> AbstractContextManager[Any]: ...
    def end(self, output: Any) -> Tensor | None: ...


class Pipelined:
    """Forwards and backwards as a pipeline's schedule.

    ``held``: names of the parameters that this rank holds; ``elsewhere``: all names of what it does not, parameters and
    buffers of units that have any.
    """

    def __init__(
        self, model: nn.Module, blueprint: Blueprint, plan: Plan, rank: int, group: dist.ProcessGroup,
        device: torch.device, example: Example,
    ) -> None:  # fmt: skip
        self.model = model
        self.skeleton = Skeleton(model, device)
        self._known: dict[Any, Stages] = {}
        self.cuts = plan.cuts or cut(blueprint, self.skeleton.paths, plan.stages)
        with example.around():
            stages = self._stages(example.args, example.kwargs)
        params = dict(model.named_parameters())
        self.stages_of = holders(stages, list(params))
        schedule = plan.schedule or "gpipe"
        at = coordinates(plan.mesh, rank).pipeline
        mine = rank_stages(schedule, at, plan.mesh.pipeline, plan.chunks)
        self.held = [name for name, of in self.stages_of.items() if set(of) & set(mine)]
        self.elsewhere = _elsewhere(
            model, {id(params[name]) for name in params if name not in self.held}, self.skeleton
        )
        chunks = [Chunk(self.skeleton, s, [name for name in self.held if s in self.stages_of[name]]) for s in mine]
        self.pipeline = Pipeline(chunks, plan.stages, schedule, device, group)
        self.places = _places(model, self.skeleton, plan, self.stages_of)
        self.around_schedule(_nothing, _nothing, _nothing, lambda tensor: tensor)

    def around_schedule(
        self, start: Callable[[], None], gather: Callable[[], None], release: Callable[[], None],
        plain: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """What other techniques do before a schedule, after it, after an evaluation, and to values that cross."""
        self.start, self.gather, self.release, self.plain = start, gather, release, plain

    def least(self, micro_batches: int) -> int:
        """As many as the schedule needs."""
        return self.pipeline.least(micro_batches)

    def train(self, passes: Iterable[Pass], number: int) -> None:
        """The schedule over the window. Gradients are sent afterwards."""
        self.start()
        self.pipeline.run([self._call(each) for each in passes], backward=True)
        self.gather()

    def evaluate(self, passes: Iterable[Pass]) -> None:
        """Forwards through the stages."""
        self.pipeline.run([self._call(each) for each in passes], backward=False)
        self.release()

    def _call(self, each: Pass) -> Call:
        with each.around():
            stages = self._stages(each.args, each.kwargs)
        return Call(each.args, each.kwargs, stages, each.around, self.plain, each.end)

    def _stages(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stages:
        """The stages for inputs of these shapes, recorded when they come for the first time."""
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors((args, kwargs)))
        key = (shapes, tuple(kwargs), self.model.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
        if key not in self._known:
            with torch.random.fork_rng(devices=[]):
                self._known[key] = stages_of(self.skeleton.record(args, kwargs), self.cuts)
        return self._known[key]


def _nothing() -> None:
    return None


def _elsewhere(model: nn.Module, others: set[int], skeleton: Skeleton) -> frozenset[str]:
    """Names of what other ranks hold: parameters, and buffers of units that have such parameters."""
    found = {name for name, param in model.named_parameters(remove_duplicate=False) if id(param) in others}
    for path in skeleton.paths:
        unit = model.get_submodule(path)
        if any(id(param) in others for param in unit.parameters()):
            found |= {f"{path}.{name}" for name, _ in unit.named_buffers(remove_duplicate=False)}
    return frozenset(found)


def _places(
    model: nn.Module, skeleton: Skeleton, plan: Plan, stages_of: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """For each parameter and buffer, the places on the pipeline axis that hold it, where they are several."""

    def on(stages: Iterable[int]) -> tuple[int, ...]:
        schedule, ranks = plan.schedule or "gpipe", plan.mesh.pipeline
        return tuple(sorted({stage_rank(schedule, stage, ranks, plan.chunks) for stage in stages}))

    found = {name: on(stages) for name, stages in stages_of.items()}
    for name, _ in model.named_buffers():
        unit = next((path for path in skeleton.paths if inside(name, path)), None)
        of_unit = [stages for param, stages in stages_of.items() if unit is not None and inside(param, unit)]
        found[name] = on(s for stages in of_unit for s in stages) if of_unit else tuple(range(plan.mesh.pipeline))
    return {name: places for name, places in found.items() if len(places) > 1}


def ties(plan: Plan, rank: int, stages_of: dict[str, tuple[int, ...]]) -> dict[str, Tie]:
    """Collective. The groups in which gradients of parameters that several ranks' stages use are summed."""
    mesh, found = plan.mesh, {}
    for name, stages in stages_of.items():
        places = sorted({stage_rank(plan.schedule or "gpipe", s, mesh.pipeline, plan.chunks) for s in stages})
        if len(places) == 1:
            continue
        for members in _columns(plan, places):
            group = dist.new_group(list(members))
            if isinstance(group, dist.ProcessGroup) and rank in members:
                found[name] = Tie(group, counts=rank == members[0])
    return found


def _columns(plan: Plan, places: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """For each coordinate on the other axes, the ranks at ``places`` of the pipeline."""
    others = {axis: degree for axis, degree in plan.mesh.degrees.items() if axis != "pipeline"}
    for coords in product(*(range(degree) for degree in others.values())):
        at = dict(zip(others, coords, strict=True))
        yield tuple(rank_of(plan.mesh, pipeline=place, **at) for place in places)
