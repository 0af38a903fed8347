"""A model that cannot be traced: what is known of it still, for the layouts that need no trace (replicate, shard)."""

from __future__ import annotations

import math

from shoal.blueprint.facts import inside
from shoal.blueprint.stored import Sketch
from shoal.plan.profile import Block, Profile, Weight


def states_alone(sketch: Sketch) -> Profile:
    """Weights by unit, and nothing of arithmetic or activations: plans then differ by their state's bytes and by what
    is sent of it alone."""
    homes: dict[str, list[Weight]] = {"": []}
    for parameter in sketch.blueprint.parameters:
        if parameter.buffer:
            continue
        home = next((unit for unit in sketch.units if inside(parameter.name, unit)), "")
        rows = parameter.shape[0] if parameter.shape else 0
        weight = Weight(parameter.name, math.prod(parameter.shape), rows, parameter.trains, 1, False, "")
        homes.setdefault(home, []).append(weight)
    weights = tuple(weight for of in homes.values() for weight in of)
    block = Block("", "model", False, (), (), weights, 0.0, 0.0)
    return Profile(
        name=sketch.name, precision=sketch.precision, blocks=(block,), model_flops=0.0,
        notes=("the model was not traced: its arithmetic and its activations are unknown",),
    )  # fmt: skip
