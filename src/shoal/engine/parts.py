"""Applying a plan: the model becomes what this rank holds and runs of it, technique by technique."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from shoal.engine.forward import Forwards, Whole
from shoal.engine.held import Held
from shoal.engine.layout import Layout
from shoal.engine.names import plain
from shoal.parallel.pipeline.apply import Example, Pipelined, ties
from shoal.parallel.replicate.buckets import GradientBuckets


class Parts(NamedTuple):
    """What the engine runs. ``trained``: names of the whole model's trained parameters, the same on all ranks;
    ``holds``: which of them this rank holds."""

    forwards: Forwards
    gradients: GradientBuckets
    trained: list[str]
    holds: list[bool]
    held: Held


def spread(model: nn.Module, layout: Layout, device: torch.device, example: Callable[[], Example]) -> Parts:
    """Apply the layout's techniques in order: pipeline cut, then replicate. Changes ``model`` in place. Collective.

    ``example`` gives a micro-batch, for techniques that trace the model.
    """
    plan = layout.plan
    trained = [plain(name) for name, param in model.named_parameters() if param.requires_grad]
    pipelined = None
    if layout.pipeline is not None and plan.mesh.pipeline > 1:
        pipelined = Pipelined(model, plan, layout.rank, layout.pipeline, device, example())
    held = [
        (plain(name), param) for name, param in model.named_parameters() if param.requires_grad and not param.is_meta
    ]
    tied = ties(plan, layout.rank, pipelined.stages_of) if pipelined else {}
    gradients = GradientBuckets(held, int(plan.bucket_mb * 2**20), layout.data, tied)
    if pipelined:
        pipelined.gather = gradients.gather
    names = {name for name, _ in held}
    places = {plain(name): of for name, of in pipelined.places.items()} if pipelined else {}
    return Parts(
        pipelined or Whole(model, gradients.start_backward), gradients, trained, [name in names for name in trained],
        Held(plan.mesh, layout.rank, stages=places),
    )  # fmt: skip
