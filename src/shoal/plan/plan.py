"""The plan: how a job is run, as one frozen value that is written as TOML, by hand or by a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field

from shoal.core import toml
from shoal.core.errors import ConfigError
from shoal.core.settings import Settings
from shoal.plan import codec
from shoal.plan.mesh import AXES, Mesh
from shoal.plan.ranks import data_ranks
from shoal.plan.schedule import SCHEDULES, ScheduleName, conflicts

__all__ = ["AXES", "Mesh", "Plan", "Precision", "Recompute", "Role"]

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Recompute = Literal["none", "selective", "full"]
Role = Literal["column", "row", "vocabulary", "packed-column", "head-wise", "replicated"]


class Plan(Settings):
    """How to run a job: everything that is decided before the first step. ``fits`` says what does not fit together."""

    model_config = ConfigDict(allow_inf_nan=False)

    mesh: Mesh = Field(default=Mesh(), description="ranks along each axis")
    schedule: ScheduleName | None = Field(default=None, description="order of forwards and backwards in the pipeline")
    chunks: int = Field(default=1, ge=1, description="parts of the model that each rank of the pipeline holds")
    cuts: tuple[str, ...] = Field(
        default=(), description="path of the first module of every stage but the first (empty: by balance)"
    )
    roles: dict[str, Role] = Field(default={}, description="tensor roles by name pattern, in place of the derived ones")
    sequence_parallel: bool = Field(
        default=False,
        description="between tensor regions, each rank of the tensor axis keeps its positions of the sequences",
    )
    shard_level: Literal[1, 2, 3] = Field(
        default=3,
        description="what is sharded: 1 optimizer, 2 also gradients, 3 also weights outside of their use",
    )
    recompute: Recompute = Field(default="none", description="activations computed anew in backward instead of kept")
    cpu_offload: bool = Field(default=False, description="keep sharded weights, gradients and optimizer in host memory")
    precision: Precision = Field(default="fp32", description="compute precision; weights and optimizer stay float32")
    global_batch: int = Field(ge=1, description="samples in one optimizer step, over all ranks")
    micro_batch: int = Field(ge=1, description="samples per rank in one forward and backward")
    accumulation: int = Field(ge=1, description="micro-batches per rank and step")
    clip: float | None = Field(default=None, gt=0, description="largest global gradient norm (default: no clipping)")
    bucket_mb: float = Field(default=25.0, gt=0, description="size of a gradient bucket, MB")
    compress: str | None = Field(
        default=None, description="codec in which gradients travel: bf16, int8, topk:SHARE or powersgd:RANK"
    )
    model: tuple[str, ...] = Field(
        default=(),
        description="parameters of the model that it was made for, as plan/fingerprint.py tells (empty: any)",
    )

    @property
    def stages(self) -> int:
        """Into how many stages the model is cut."""
        return self.mesh.pipeline * self.chunks

    def contradictions(self) -> list[str]:
        """What does not fit together."""
        return (
            _context(self)
            + _pipeline(self)
            + _tensor(self)
            + _batch(self)
            + codec.conflicts(self.compress, self.mesh, self.precision)
        )

    def fits(self, workers: int | None = None, where: str = "plan") -> None:
        """Raise ConfigError that lists all that does not fit together, or does not fit ``workers`` ranks."""
        found = _world(self, workers) + self.contradictions()
        if found:
            raise ConfigError("\n".join(f"{where}: {conflict}" for conflict in found))

    def diff(self, other: Plan) -> list[str]:
        """The fields that differ, each with this plan's value and the other's."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in type(self).model_fields}
        return [f"{name}: {_show(mine)} -> {_show(theirs)}" for name, (mine, theirs) in pairs.items() if mine != theirs]

    def to_toml(self) -> str:
        """The whole plan as TOML; what is off is left out."""
        return toml.to_toml(self.model_dump())

    @classmethod
    def from_toml(cls, text: str, where: str = "plan") -> Self:
        """The plan in ``text``; its mesh is a table, or text like ``"pipeline=2,tensor=2"``. Raises ConfigError."""
        values = toml.from_toml(text, where)
        if isinstance(values.get("mesh"), str | dict):
            values["mesh"] = Mesh.parse(values["mesh"], f"{where}: mesh")
        return cls.parse(values, where)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The plan in a file. Raises ConfigError."""
        return cls.from_toml(toml.read_text(path, "a plan"), str(path))

    def write(self, path: str | Path) -> None:
        """Write the plan to a file, over what was there; folders on the way are made. Raises ConfigError."""
        toml.write_text(path, self.to_toml(), folders=True)


def _show(value: Any) -> str:
    return str(value) if isinstance(value, Mesh) else "off" if value is None else repr(value)


def _world(plan: Plan, workers: int | None) -> list[str]:
    if workers is None or workers == plan.mesh.size:
        return []
    return [
        f"mesh {plan.mesh} makes {plan.mesh.size} ranks, and there are {workers} workers; "
        f"start {plan.mesh.size} workers or change a degree"
    ]


def _context(plan: Plan) -> list[str]:
    if plan.mesh.context == 1:
        return []
    return [f"context={plan.mesh.context}, but sequences cannot be split over ranks yet; set context = 1"]


def _pipeline(plan: Plan) -> list[str]:
    if plan.mesh.pipeline == 1:
        given = {"schedule": plan.schedule, "chunks": plan.chunks if plan.chunks > 1 else None, "cuts": plan.cuts}
        return [
            f"{name} = {value!r} is for a pipeline, and the mesh has pipeline=1; leave it out or set pipeline > 1"
            for name, value in given.items()
            if value
        ]
    if plan.schedule is None:
        found = [f"pipeline={plan.mesh.pipeline} and no schedule; choose one of {', '.join(SCHEDULES)}"]
    else:
        found = conflicts(plan.schedule, plan.mesh.pipeline, plan.chunks, plan.accumulation)
    if plan.cuts and len(plan.cuts) != plan.stages - 1:
        found.append(
            f"{len(plan.cuts)} cuts make {len(plan.cuts) + 1} stages, and pipeline={plan.mesh.pipeline} with chunks = "
            f"{plan.chunks} has {plan.stages}; give {plan.stages - 1} cuts, or none to have them chosen"
        )
    repeated = sorted({cut for cut in plan.cuts if plan.cuts.count(cut) > 1})
    if repeated:
        found.append(f"cuts name {', '.join(map(repr, repeated))} more than once; each stage begins at its own module")
    return found


def _tensor(plan: Plan) -> list[str]:
    given = {"roles": plan.roles, "sequence_parallel": plan.sequence_parallel}
    return [
        f"{name} = {value!r} is for a tensor axis, and the mesh has tensor=1; leave it out or set tensor > 1"
        for name, value in given.items()
        if value and plan.mesh.tensor == 1
    ]


def _batch(plan: Plan) -> list[str]:
    readers = data_ranks(plan.mesh)
    product = plan.micro_batch * plan.accumulation * readers
    if product == plan.global_batch:
        return []
    unit = plan.micro_batch * readers
    change = (
        f"accumulation = {plan.global_batch // unit} or global_batch = {product}"
        if plan.global_batch % unit == 0
        else f"global_batch = {product}"
    )
    return [
        f"global_batch = {plan.global_batch}, but micro_batch {plan.micro_batch} x accumulation {plan.accumulation} x "
        f"{readers} data ranks (replicate x shard) is {product}; set {change}"
    ]
