"""Which values of a blueprint have gradients. No torch."""

from __future__ import annotations

from shoal.blueprint.facts import Blueprint


def learned(blueprint: Blueprint) -> frozenset[int]:
    """The values, of the loss too, that depend on a trained parameter."""
    found: set[int] = set()
    for of in (*blueprint.operations, *blueprint.loss):
        if found.intersection(of.reads) or any(blueprint.parameter[name].trains for name in of.parameters):
            found.update(of.gives)
    return frozenset(found)
