"""The mesh: all ranks arranged on five named axes, outermost (slowest links) first. See docs/mesh.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field

from shoal.core.errors import ConfigError, nearest
from shoal.core.settings import Settings, checked

#: The axes, outermost first: neighbours on the last one are neighbouring ranks.
AXES = ("pipeline", "replicate", "shard", "context", "tensor")


class Mesh(Settings):
    """How many ranks stand along each axis; their product is the world."""

    pipeline: int = Field(default=1, ge=1, description="ranks that hold consecutive parts of the model")
    replicate: int = Field(default=1, ge=1, description="copies of the weights, each for its own samples")
    shard: int = Field(default=1, ge=1, description="ranks that share out one copy's storage, each for its own samples")
    context: int = Field(default=1, ge=1, description="ranks that share out the positions of one sequence")
    tensor: int = Field(default=1, ge=1, description="ranks that share out the arithmetic of each layer")

    @classmethod
    def parse(cls, values: str | Mapping[str, Any], where: str = "mesh", workers: int | None = None) -> Self:
        """A mesh from ``"pipeline=2,tensor=2"`` or a table; what is left of ``workers`` goes to replicate.

        Raises ConfigError for an unknown or repeated axis, a degree below 1, and where workers do not divide.
        """
        degrees = _words(values, where) if isinstance(values, str) else dict(values)
        mesh = checked(cls, degrees, where)
        if workers is None or mesh.size == workers:
            return mesh
        if "replicate" in degrees or workers % mesh.size or workers < 1:
            raise ConfigError(_misfit(mesh, "replicate" in degrees, where, workers))
        return mesh.model_copy(update={"replicate": workers // mesh.size})

    @property
    def size(self) -> int:
        """The world: the product of all degrees."""
        return math.prod(self.degrees.values())

    @property
    def degrees(self) -> dict[str, int]:
        """Each axis's degree, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def __str__(self) -> str:
        """The axes that split something, as ``parse`` reads them."""
        return ",".join(f"{axis}={degree}" for axis, degree in self.degrees.items() if degree > 1) or "replicate=1"


def _words(text: str, where: str) -> dict[str, str]:
    degrees: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        axis, sign, degree = (part.strip() for part in word.partition("="))
        if not sign or not degree:
            raise ConfigError(f"{where}: {word!r} is no axis=degree; write for example pipeline=2,tensor=2")
        if axis not in AXES:
            raise ConfigError(f"{where}: no axis {axis!r}; {nearest(axis, AXES)}; the axes are {', '.join(AXES)}")
        if axis in degrees:
            raise ConfigError(f"{where}: {axis} is given twice ({degrees[axis]} and {degree}); give it once")
        degrees[axis] = degree
    return degrees


def _misfit(mesh: Mesh, fixed: bool, where: str, workers: int) -> str:
    """Why ``workers`` are no such mesh, and which numbers would be."""
    asked = f"{where}: {mesh} makes {mesh.size} ranks, and there are {workers} workers"
    if fixed:
        return f"{asked}; leave replicate out, so that it takes what is left, or start {mesh.size} workers"
    below = workers // mesh.size * mesh.size
    choices = " or ".join(str(count) for count in (below, below + mesh.size) if count > 0)
    return f"{asked}, which is no multiple of {mesh.size}; start {choices} workers, or change a degree"
