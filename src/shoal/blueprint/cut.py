"""Where to cut a model into stages, from facts alone: even cost, then little to carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.blueprint.facts import Blueprint, inside
from shoal.core.errors import ConfigError


class Place(NamedTuple):
    """A unit in the order of the forward: a cut may come before it. ``flops`` are its own and what follows it up to
    the next unit; ``carried_bytes`` cross a cut before it, per micro-batch and direction."""

    unit: str
    flops: int
    carried_bytes: int


def places(blueprint: Blueprint, units: Sequence[str]) -> list[Place]:
    """Every unit that the traced forward came to, at its first call; none of a model that is one layer itself."""
    unit_of = owners(blueprint, units)
    starts: dict[str, int] = {}
    for number, unit in enumerate(unit_of):
        if unit is not None and unit not in starts:
            starts[unit] = number
    ordered = sorted(starts, key=lambda unit: starts[unit])
    if not ordered:
        return []
    ends = [*(starts[unit] for unit in ordered[1:]), len(blueprint.operations)]
    begins = [0, *(starts[unit] for unit in ordered[1:])]
    flops = [sum(op.flops for op in blueprint.operations[b:e]) for b, e in zip(begins, ends, strict=True)]
    return [
        Place(unit, cost, carried_bytes(blueprint, starts[unit])) for unit, cost in zip(ordered, flops, strict=True)
    ]


def owners(blueprint: Blueprint, units: Sequence[str]) -> list[str | None]:
    """The unit that each operation of the forward lies in."""
    known, found = set(units), {}
    for module in {op.module for op in blueprint.operations}:
        path = module
        while path not in known and path:
            path = path.rpartition(".")[0]
        found[module] = path if path in known else None
    return [found[op.module] for op in blueprint.operations]


def handed_on(blueprint: Blueprint, units: Sequence[str]) -> frozenset[int]:
    """Values that cross cuts although they depend on no parameter, and so have no gradient: what a unit gives that has
    parameters or was called with a value that depends on one, as a pipeline runs units whole (rotary tables, for which
    the hidden states are asked for their dtype), and what is made of it between units."""
    names = [name for p in blueprint.parameters if not p.buffer for name in (p.name, *p.ties)]
    takes = {unit for unit in units if unit in blueprint.takers or any(inside(name, unit) for name in names)}
    found: set[int] = set()
    for operation, unit in zip(blueprint.operations, owners(blueprint, units), strict=True):
        if unit in takes or (unit is None and found.intersection(operation.reads)):
            found.update(value for value in operation.gives if not blueprint.values[value].of_model)
    return frozenset(found)


def carried_bytes(blueprint: Blueprint, at: int) -> int:
    """Bytes of the values that depend on parameters, are there before operation ``at``, and are read from it on."""
    return blueprint.carried_bytes[at]


def cut(blueprint: Blueprint, units: Sequence[str], stages: int) -> tuple[str, ...]:
    """The first unit of every stage but the first: the costliest stage as cheap as can be, then least carried.

    Raises ConfigError where there are fewer places than stages.
    """
    found = places(blueprint, units)
    if len(found) < stages:
        raise ConfigError(
            f"the model has {len(found)} places to cut, {stages} stages were asked for; use at most "
            f"{max(1, len(found))} stages (pipeline x chunks)"
        )
    total = sum(place.flops for place in found) or 1
    # best[k][i]: (cost of the costliest of k stages over the first i units, carried), and where the last one begins
    best = {(0, 0): ((0.0, 0), 0)}
    sums = [0]
    for place in found:
        sums.append(sums[-1] + place.flops)
    for stage in range(1, stages + 1):
        for end in range(stage, len(found) - (stages - stage) + 1):
            choices = []
            for begin in range(stage - 1, end):
                if (stage - 1, begin) in best:
                    (cost, carried), _ = best[stage - 1, begin]
                    own = round((sums[end] - sums[begin]) / total, 3)  # a part in a thousand is not worth a transfer
                    more = found[begin].carried_bytes if begin else 0
                    choices.append(((max(cost, own), carried + more), begin))
            if choices:
                best[stage, end] = min(choices)
    starts, end = [], len(found)
    for stage in range(stages, 0, -1):
        end = best[stage, end][1]
        starts.append(end)
    return tuple(found[begin].unit for begin in reversed(starts[:-1]))
