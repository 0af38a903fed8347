"""Applying a plan: the model becomes what this rank holds and runs of it, technique by technique."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from shoal.core.errors import ConfigError
from shoal.engine.forward import Forwards, Whole
from shoal.engine.held import Held
from shoal.engine.layout import Layout
from shoal.engine.names import plain
from shoal.parallel.pipeline.apply import Example, Pipelined, ties
from shoal.parallel.replicate.buckets import GradientBuckets
from shoal.parallel.shard.apply import Sharded, apply
from shoal.parallel.shard.gradients import ShardedGradients
from shoal.parallel.shard.spec import ShardSettings
from shoal.parallel.shard.units import shard_units

Gradients = GradientBuckets | ShardedGradients


class Parts(NamedTuple):
    """What the engine runs. ``trained``: names of the whole model's trained parameters, the same on all ranks;
    ``holds``: which of them this rank holds."""

    forwards: Forwards
    gradients: Gradients
    trained: list[str]
    holds: list[bool]
    held: Held


def spread(model: nn.Module, layout: Layout, device: torch.device, example: Callable[[], Example]) -> Parts:
    """Apply the layout's techniques in order: pipeline cut, shard or replicate. Changes ``model`` in place. Collective.

    ``example`` gives a micro-batch, for techniques that trace the model.
    """
    plan = layout.plan
    trained = [plain(name) for name, param in model.named_parameters() if param.requires_grad]
    pipelined = None
    if layout.pipeline is not None and plan.mesh.pipeline > 1:
        pipelined = Pipelined(model, plan, layout.rank, layout.pipeline, device, example())
    sharded = shard(model, layout) if plan.mesh.shard > 1 else None
    held = [
        (plain(name), param) for name, param in model.named_parameters() if param.requires_grad and not param.is_meta
    ]
    tied = ties(plan, layout.rank, pipelined.stages_of) if pipelined else {}
    gradients: Gradients
    if sharded is not None:
        gradients = ShardedGradients(sharded, held, tied)
    else:
        gradients = GradientBuckets(held, int(plan.bucket_mb * 2**20), layout.data, tied)
    release = sharded.release if sharded else lambda: None
    forwards: Forwards = pipelined or Whole(model, gradients.start_backward, release)
    if pipelined:
        pipelined.start, pipelined.gather, pipelined.release = gradients.start_schedule, gradients.gather, release
    names = {name for name, _ in held}
    places = {plain(name): of for name, of in pipelined.places.items()} if pipelined else {}
    return Parts(
        forwards, gradients, trained, [name in names for name in trained],
        Held(plan.mesh, layout.rank, stages=places),
    )  # fmt: skip


def shard(model: nn.Module, layout: Layout) -> Sharded:
    """Shard the weights over the shard axis, with copies along replicate. Raises ConfigError where it cannot apply."""
    plan, mesh = layout.plan, layout.plan.mesh
    others = [f"{axis}={degree}" for axis, degree in mesh.degrees.items() if degree > 1 and axis == "tensor"]
    if others:
        raise ConfigError(
            f"the mesh {mesh} shards weights beside {', '.join(others)}; shard does not go with tensor yet: "
            "leave one of them at 1"
        )
    settings = ShardSettings.parse({"level": plan.shard_level, "cpu_offload": plan.cpu_offload}, "shard")
    axes = layout.axes("replicate", "shard") if mesh.replicate > 1 else layout.axes("shard")
    units = [path for path in shard_units(model) if not any(p.is_meta for p in model.get_submodule(path).parameters())]
    return apply(model, units, axes, settings, staged=mesh.pipeline > 1)
