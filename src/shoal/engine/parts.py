"""Applying a plan: the model becomes what this rank holds and runs of it, technique by technique."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal import compress
from shoal.blueprint.agreement import differences
from shoal.blueprint.facts import Blueprint
from shoal.blueprint.positions import Shared, needed_positions
from shoal.blueprint.roles import roles
from shoal.blueprint.split import spans
from shoal.blueprint.trace import trace
from shoal.core.errors import ConfigError
from shoal.engine.forward import Forwards, Whole
from shoal.engine.held import Held, Packed, Span
from shoal.engine.layout import Layout
from shoal.engine.names import plain
from shoal.engine.start import Start
from shoal.parallel import tensor
from shoal.parallel.pipeline.apply import Example, Pipelined, ties
from shoal.parallel.recompute import apply as recompute
from shoal.parallel.replicate.buckets import GradientBuckets
from shoal.parallel.shard.apply import Sharded, apply
from shoal.parallel.shard.gradients import ShardedGradients
from shoal.parallel.shard.spec import ShardSettings
from shoal.parallel.shard.units import shard_units
from shoal.plan.codec import Codec

Gradients = GradientBuckets | ShardedGradients


class Parts(NamedTuple):
    """What the engine runs. ``trained``: names of the whole model's trained parameters, the same on all ranks;
    ``holds``: which of them this rank holds; ``notes``: what of the layout the model does not allow; ``model_flops``:
    of a whole sample's forward, where the layout had the model traced."""

    forwards: Forwards
    gradients: Gradients
    trained: list[str]
    holds: list[bool]
    held: Held
    notes: list[str]
    model_flops: float | None = None


def spread(
    start: Start, layout: Layout, device: torch.device, example: Callable[[], Example], loaded: bool = False,
    memory: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Parts:  # fmt: skip
    """Apply the layout's techniques in order: pipeline cut, tensor, recompute, shard or replicate. Collective.

    Changes the model in place. ``example`` gives a micro-batch, for techniques that trace the model. Where the layout
    divides the model, that is done on shapes alone; then this rank's part gets memory, and its first values unless
    they are ``loaded`` later; ``memory`` holds around that.
    """
    model, plan, mesh = start.model, layout.plan, layout.plan.mesh
    if plan.cpu_offload and mesh.shard == 1:
        raise ConfigError(f"cpu_offload goes with a shard axis, and the mesh is {mesh}; leave it out or set shard > 1")
    trained = [plain(name) for name, param in model.named_parameters() if param.requires_grad]
    pipelined, divided, model_flops = None, None, None
    notes: list[str] = []
    if layout.divides:
        start.strip()
    if mesh.pipeline > 1 or mesh.tensor > 1:
        first = example()
        with first.around():
            blueprint = trace(model, first.args, first.kwargs, first.samples)
        model_flops = blueprint.flops() / first.samples
        if layout.pipeline is not None and mesh.pipeline > 1:
            pipelined = Pipelined(model, blueprint, plan, layout.rank, layout.pipeline, device, first)
        if mesh.tensor > 1:
            divided, notes = divide(model, blueprint, layout)
    recompute.apply(model, plan.recompute)
    elsewhere = frozenset(map(plain, pipelined.elsewhere)) if pipelined else frozenset[str]()
    sharded = shard(model, layout, elsewhere) if mesh.shard > 1 else None
    places = {plain(name): of for name, of in pipelined.places.items()} if pipelined else {}
    packed = _packed(model, divided, mesh.tensor, layout.at.tensor) if divided else {}
    held = Held(mesh, layout.rank, packed, places)
    with memory():
        if start.values is not None:
            start.fill(held, elsewhere, sharded, device, loaded)
        mine = [(plain(name), p) for name, p in model.named_parameters() if p.requires_grad and not p.is_meta]
        gradients = _gradients(mine, layout, pipelined, divided, sharded)
    forwards: Forwards = pipelined or Whole(model, gradients.start_backward, gradients.release)
    if pipelined:
        pipelined.around_schedule(gradients.start_schedule, gradients.gather, gradients.release, tensor.plain)
    names = {name for name, _ in mine}
    return Parts(forwards, gradients, trained, [name in names for name in trained], held, notes, model_flops)


def _gradients(
    mine: list[tuple[str, nn.Parameter]], layout: Layout, pipelined: Pipelined | None, divided: tensor.Layout | None,
    sharded: Sharded | None,
) -> Gradients:  # fmt: skip
    """Collective. What sums the gradients of this rank's parameters."""
    tied = ties(layout.plan, layout.rank, pipelined.stages_of) if pipelined else {}
    alike = frozenset(n for n, _ in mine if divided and layout.at.tensor and divided.split(n) is None)
    if sharded is not None:
        return ShardedGradients(sharded, mine, tied, alike)
    bucket_bytes, codec = int(layout.plan.bucket_mb * 2**20), None
    if layout.plan.compress is not None:
        codec = compress.make(Codec.parse(layout.plan.compress))
    return GradientBuckets(mine, bucket_bytes, layout.data, tied, alike, codec)


def divide(model: nn.Module, blueprint: Blueprint, layout: Layout) -> tuple[tensor.Layout, list[str]]:
    """Divide weights over the tensor axis by the roles that the blueprint gives, and positions where the plan says so.

    Also gives what stays whole. Raises ConfigError where nothing can be divided.
    """
    degree = layout.plan.mesh.tensor
    found = roles(blueprint, degree, layout.plan.roles)
    if not any(role.split for role in found.role.values()):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(found.reasons.items())[:3])
        raise ConfigError(f"tensor={degree}, but no weight of the model can be divided ({reasons}); set tensor = 1")
    shared = needed_positions(blueprint, found) if layout.plan.sequence_parallel else None
    layers = shared.layers if shared else {}
    carried = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    notes = [f"tensor roles: {difference}" for difference in differences(found, carried)]
    return tensor.apply(model, blueprint, found, layout.axes("tensor"), layers), notes + (
        _told(shared) if shared else []
    )


def _told(shared: Shared) -> list[str]:
    """Where positions are not shared out, and where they are gathered besides."""
    found = [f"sequence parallel: {name} gives all positions: {reason}" for name, reason in shared.reasons.items()]
    return found + [f"sequence parallel: all positions are gathered for {where}" for where in shared.gathers]


def _packed(model: nn.Module, divided: tensor.Layout, degree: int, place: int) -> dict[str, Packed]:
    """Where the divided weights' parts lie, for checkpoints."""
    found = {}
    for name in divided.whole:
        split = divided.split(name)
        if split is not None:
            parts = tuple(Span(*span) for span in spans(split, degree, place))
            found[plain(name)] = Packed(divided.whole[name], split.dim, parts)
    return found


def shard(model: nn.Module, layout: Layout, elsewhere: frozenset[str]) -> Sharded:
    """Shard the weights over the shard axis, with copies along replicate; other stages' are left alone."""
    plan, mesh = layout.plan, layout.plan.mesh
    settings = ShardSettings.parse({"level": plan.shard_level, "cpu_offload": plan.cpu_offload}, "shard")
    axes = layout.axes("replicate", "shard") if mesh.replicate > 1 else layout.axes("shard")
    away = {id(param) for name, param in model.named_parameters() if plain(name) in elsewhere}
    units = [
        path for path in shard_units(model) if not any(id(p) in away for p in model.get_submodule(path).parameters())
    ]
    return apply(model, units, axes, settings, staged=mesh.pipeline > 1)
