"""Settings of sharding, why it cannot apply, and the bytes that it promises. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


class Promise(NamedTuple):
    """Bytes on one rank. Between steps: ``weights + moments``; ``gradients`` live from backward to the update.

    Within a step besides: ``gathered``, weights that are whole at once; ``whole_gradients``, gradients not sharded yet;
    ``buffers`` of collectives.
    """

    weights: int
    moments: int
    gradients: int
    gathered: int
    whole_gradients: int
    buffers: int

    @property
    def between_steps(self) -> int:
        """Bytes held when no step runs."""
        return self.weights + self.moments

    @property
    def step_peak(self) -> int:
        """Bytes of model state at most within a step; activations come on top."""
        return sum(self)


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


def padded_bytes(parameter: Parameter, shards: int) -> int:
    """Bytes of a shard: every rank holds ceil(rows / shards) rows. Scalars stay whole."""
    return _bytes_of_rows(parameter, -(-parameter.shape[0] // shards)) if parameter.shape else parameter.bytes


def local_bytes(parameter: Parameter, shards: int, rank: int) -> int:
    """Bytes of the rows that ``rank`` owns: what optimizer state follows."""
    if not parameter.shape:
        return parameter.bytes
    rows, most = parameter.shape[0], -(-parameter.shape[0] // shards)
    return _bytes_of_rows(parameter, max(0, min(rows - rank * most, most)))


def promised(
    held: Sequence[Part],
    settings: ShardSettings,
    shards: int,
    rank: int = 0,
    *,
    micro_batches: int = 1,
    moments: int = 2,
) -> Promise:
    """Bytes on the rank that is number ``rank`` on the shard axis; the optimizer keeps ``moments`` tensors a weight.

    Gathered weights count padded rows. Level 3 holds the root, the unit that runs and the next one, which is fetched
    ahead; levels 1 and 2 hold all. Whole gradients: those of the root, which are complete last, and of one unit; with
    level 1 and several micro-batches those of all units (Zhao et al., VLDB 2023, section 4.3; "no_sync").
    """
    accumulates = settings.level == 1 and micro_batches > 1
    trained = [parameter for parameter, _ in held if parameter.trains]
    whole = _by_unit(held, lambda parameter: padded_bytes(parameter, shards) * shards)
    sent = _by_unit(held, lambda parameter: padded_bytes(parameter, shards) * shards * parameter.trains)
    made = _by_unit(held, lambda parameter: parameter.bytes * parameter.trains)
    weights = sorted((size for unit, size in whole.items() if unit != ROOT), reverse=True)
    gradients = [size for unit, size in made.items() if unit != ROOT]
    return Promise(
        weights=sum(padded_bytes(parameter, shards) for parameter, _ in held),
        moments=moments * sum(local_bytes(parameter, shards, rank) for parameter in trained),
        gradients=sum(padded_bytes(parameter, shards) for parameter in trained),
        gathered=whole[ROOT] + (sum(weights[:2]) if settings.level == 3 else sum(weights)),
        whole_gradients=made[ROOT] + (sum(gradients) if accumulates else max(gradients, default=0)),
        buffers=max(whole.values()) + max(sent.values()),
    )


def _by_unit(held: Sequence[Part], size: Callable[[Parameter], int]) -> dict[str, int]:
    sums = {ROOT: 0}
    for parameter, unit in held:
        if parameter.shape:
            sums[unit] = sums.get(unit, 0) + size(parameter)
    return sums


def _bytes_of_rows(parameter: Parameter, rows: int) -> int:
    return parameter.bytes // parameter.shape[0] * rows if parameter.shape[0] else 0
