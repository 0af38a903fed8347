"""Settings of sharding, its units, and why it cannot apply. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from shoal.blueprint.facts import Parameter, inside
from shoal.core.errors import nearest
from shoal.core.settings import Settings

ROOT = ""  # the unit of what lies in no other


class ShardSettings(Settings):
    """How weights are sharded over the ranks of the ``shard`` axis."""

    level: Literal[1, 2, 3] = Field(
        3,
        description="3: weights are whole only while a unit runs; 2: whole during the step, gradients reduced and "
        "sharded at each micro-batch; 1: gradients too are whole, and reduced once, at the step's end",
    )
    cpu_offload: bool = Field(False, description="keep shards and optimizer state in the host's memory")
    units: tuple[str, ...] | None = Field(
        None, description="module paths that are gathered together, in the order of their calls; None: repeated blocks"
    )


class Part(NamedTuple):
    """A parameter and the unit that it is gathered with (``ROOT``: the root)."""

    parameter: Parameter
    unit: str


def parts(parameters: Iterable[Parameter], units: Sequence[str]) -> tuple[Part, ...]:
    """Each parameter with its unit; one that has names in several units belongs to the root."""
    found = []
    for parameter in parameters:
        if parameter.buffer:
            continue
        homes = {next((u for u in units if inside(name, u)), ROOT) for name in (parameter.name, *parameter.ties)}
        found.append(Part(parameter, homes.pop() if len(homes) == 1 else ROOT))
    return tuple(found)


def check(parameters: Iterable[Parameter], units: Sequence[str], modules: Iterable[str]) -> list[str]:
    """Why these units cannot be sharded, in sentences; empty where they can."""
    known = set(modules)
    reasons = [
        f"shard: the unit {unit!r} was asked for, and the model has no such module; {nearest(unit, known)}"
        for unit in units
        if unit not in known
    ]
    first: dict[str, Parameter] = {}
    for parameter, unit in parts(parameters, units):
        if not parameter.trains or not parameter.shape:
            continue
        other = first.setdefault(unit, parameter)
        if other.dtype != parameter.dtype:
            reasons.append(
                f"shard: {parameter.name} is {parameter.dtype} and {other.name} is {other.dtype}, both train and are "
                f"gathered together (unit {unit or 'root'!r}); give all that trains in a unit one dtype"
            )
            break
    return reasons
