"""Which rank stands where on a mesh, and with whom it forms groups: arithmetic only. See docs/mesh.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.core.errors import ConfigError, nearest
from shoal.plan.mesh import AXES, Mesh

#: The axes that split the samples of a step: ranks that differ in one of them read different samples.
DATA_AXES = ("replicate", "shard")
#: Schedules whose stages run down the ranks and up again, so that the first rank has the first and the last stage.
V_SCHEDULES = ("zbv", "dualpipev")


class Coordinates(NamedTuple):
    """Where a rank stands on each axis, from 0."""

    pipeline: int = 0
    replicate: int = 0
    shard: int = 0
    context: int = 0
    tensor: int = 0


def coordinates(mesh: Mesh, rank: int) -> Coordinates:
    """Where ``rank`` stands; ranks are counted along tensor first, along pipeline last. Raises ConfigError."""
    if not 0 <= rank < mesh.size:
        raise ConfigError(
            f"rank {rank} is not on the mesh {mesh}, which has ranks 0 to {mesh.size - 1}; give one of those"
        )
    found = []
    for degree in reversed(mesh.degrees.values()):
        rank, coordinate = divmod(rank, degree)
        found.append(coordinate)
    return Coordinates(*reversed(found))


def rank_of(mesh: Mesh, **coords: int) -> int:
    """The rank at these coordinates; an axis that is not named counts 0. Raises ConfigError."""
    _known(coords)
    rank = 0
    for axis, degree in mesh.degrees.items():
        coordinate = coords.get(axis, 0)
        if not 0 <= coordinate < degree:
            raise ConfigError(f"{axis} {coordinate} is not on the mesh {mesh}: {axis} goes from 0 to {degree - 1}")
        rank = rank * degree + coordinate
    return rank


def group(mesh: Mesh, axes: str | Iterable[str], rank: int) -> tuple[int, ...]:
    """The ranks that differ from ``rank`` along ``axes`` only, itself among them, ascending. Raises ConfigError."""
    names = _known([axes] if isinstance(axes, str) else axes)
    members = [coordinates(mesh, rank)]
    for axis in names:
        members = [member._replace(**{axis: place}) for member in members for place in range(mesh.degrees[axis])]
    return tuple(sorted(rank_of(mesh, **member._asdict()) for member in members))


def groups(mesh: Mesh, axes: str | Iterable[str]) -> list[tuple[int, ...]]:
    """All groups along ``axes``, ordered by first rank; each rank is in exactly one. Raises ConfigError."""
    names = [axes] if isinstance(axes, str) else list(axes)
    return sorted({group(mesh, names, rank) for rank in range(mesh.size)})


def data_ranks(mesh: Mesh) -> int:
    """Into how many parts the samples of a step are cut: one per place on replicate and shard."""
    return math.prod(mesh.degrees[axis] for axis in DATA_AXES)


def data_rank(mesh: Mesh, rank: int) -> int:
    """Which part of the samples ``rank`` reads; ranks with the same one read the same. Raises ConfigError."""
    place = coordinates(mesh, rank)
    return place.replicate * mesh.shard + place.shard


def stage_rank(schedule: str, stage: int, pipeline: int, chunks: int) -> int:
    """The pipeline coordinate that holds ``stage``: round and round, or down and up for V schedules.

    Raises ConfigError for a stage that is not there.
    """
    if not 0 <= stage < pipeline * chunks:
        raise ConfigError(
            f"stage {stage} was asked for; pipeline={pipeline} with {chunks} chunks a rank has stages 0 to "
            f"{pipeline * chunks - 1}; give one of those"
        )
    turn, place = divmod(stage, pipeline)
    return pipeline - 1 - place if schedule in V_SCHEDULES and turn % 2 else place


def rank_stages(schedule: str, rank: int, pipeline: int, chunks: int) -> tuple[int, ...]:
    """The stages that pipeline coordinate ``rank`` holds, first to last: the reverse of ``stage_rank``."""
    stages = range(pipeline * chunks)
    return tuple(stage for stage in stages if stage_rank(schedule, stage, pipeline, chunks) == rank)


def factorisations(world: int, axes: Sequence[str] = ("pipeline", "replicate", "shard", "tensor")) -> list[Mesh]:
    """Every mesh of ``world`` ranks over ``axes``, the rest at 1, in the order of their degrees. Raises ConfigError."""
    _known(axes)
    if world < 1:
        raise ConfigError(f"meshes of {world} ranks were asked for; a world has at least 1")
    found: list[dict[str, int]] = [{}]
    for axis in axes:
        found = [
            {**degrees, axis: degree}
            for degrees in found
            for left in [world // math.prod(degrees.values())]
            for degree in range(1, left + 1)
            if left % degree == 0
        ]
    return [Mesh(**degrees) for degrees in found if math.prod(degrees.values()) == world]


def _known(axes: Iterable[str]) -> list[str]:
    names = list(axes)
    for position, axis in enumerate(names):
        if axis not in AXES:
            raise ConfigError(f"no axis {axis!r}; {nearest(axis, AXES)}; the axes are {', '.join(AXES)}")
        if axis in names[:position]:
            raise ConfigError(f"axis {axis!r} is named twice in {', '.join(names)}; name it once")
    return names
