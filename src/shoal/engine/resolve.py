"""From the settings that a user gave to a whole plan: every default of the layout is decided here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shoal.core.errors import ConfigError
from shoal.engine.settings import RunSettings
from shoal.plan.batch import cut_batch
from shoal.plan.mesh import Mesh
from shoal.plan.plan import Plan
from shoal.plan.ranks import data_ranks
from shoal.plan.schedule import ScheduleName, conflicts

#: Settings that a plan's file decides; given beside it they must agree with it.
OF_PLAN = (
    "schedule", "chunks", "sequence_parallel", "shard_level", "recompute", "cpu_offload", "precision", "global_batch",
    "micro_batch", "clip", "bucket_mb", "compress",
)  # fmt: skip


def follow(settings: RunSettings, given: Collection[str]) -> RunSettings:
    """Settings under a plan's file: of what it decides, only names that were ``given`` keep their own value (and must
    then agree with it, ``resolve``). Raises ConfigError where the plan cannot be read."""
    if settings.plan is None:
        return settings
    plan = Plan.read(settings.plan)
    values = {name: getattr(plan, name) for name in OF_PLAN if name not in given}
    return settings.model_copy(update=values | ({} if "mesh" in given else {"mesh": None}))


def gave_way(plan: Plan, file: str, defaults: Mapping[str, Any]) -> list[str]:
    """A note on the job's own ``defaults`` in whose place a plan's file put other values; none: no note."""
    own = RunSettings.parse(defaults, "defaults")
    pairs = {name: (getattr(plan, name), getattr(own, name)) for name in defaults if name in OF_PLAN}
    if own.mesh is not None:
        pairs["mesh"] = (str(plan.mesh), own.mesh)
    found = [f"{name} {_shown(here)} (the job's own: {_shown(there)})" for name, (here, there) in pairs.items()
             if here != there]  # fmt: skip
    return [f"{file} decides {', '.join(found)}"] if found else []


def _shown(value: Any) -> str:
    return "off" if value is None else str(value)


def wanted_mesh(settings: RunSettings, workers: int | None) -> Mesh:
    """The mesh that was asked for; what is left of ``workers`` goes to replicate. Raises ConfigError."""
    if settings.plan is not None:
        if settings.mesh is not None:
            raise ConfigError(f"--mesh {settings.mesh} and --plan {settings.plan} were given; give one of them")
        mesh = Plan.read(settings.plan).mesh
        if workers not in (None, mesh.size):
            raise ConfigError(f"the mesh of {settings.plan} has {mesh.size} ranks, there are {workers} workers")
        return mesh
    return Mesh.parse(settings.mesh or "", "--mesh", workers) if settings.mesh or workers else Mesh()


def resolve(settings: RunSettings, workers: int) -> Plan:
    """The plan of a run with ``workers`` ranks. Raises ConfigError listing what does not fit together."""
    mesh = wanted_mesh(settings, workers)
    if settings.plan is not None:
        plan = Plan.read(settings.plan)
        given = {name: getattr(settings, name) for name in OF_PLAN if name in settings.model_fields_set}
        other = [
            f"{name} {value} (the plan: {getattr(plan, name)})"
            for name, value in given.items()
            if value != getattr(plan, name)
        ]
        if other:
            raise ConfigError(f"{settings.plan} decides {', '.join(other)}; leave the settings out, or change the plan")
    else:
        micro = settings.micro_batch or _micro_batch(settings, mesh)
        batch = cut_batch(settings.global_batch, micro, data_ranks(mesh))
        plan = Plan(
            mesh=mesh, schedule=_schedule(settings, mesh, batch.accumulation), chunks=settings.chunks,
            sequence_parallel=settings.sequence_parallel,
            shard_level=settings.shard_level, recompute=settings.recompute, cpu_offload=settings.cpu_offload,
            precision=settings.precision, global_batch=batch.global_batch, micro_batch=batch.micro_batch,
            accumulation=batch.accumulation, clip=settings.clip, bucket_mb=settings.bucket_mb,
            compress=settings.compress,
        )  # fmt: skip
    plan.fits(workers, settings.plan or "layout")
    dividing = ", ".join(f"{axis}={n}" for axis, n in mesh.degrees.items() if axis != "replicate" and n > 1)
    if settings.compile and dividing:
        raise ConfigError(
            f"--compile was asked for under {dividing}, but torch.compile takes no model whose weights or blocks are "
            "divided among ranks as they are here; use replicate alone, or leave --compile out"
        )
    return plan


def _micro_batch(settings: RunSettings, mesh: Mesh) -> int | None:
    """Samples per micro-batch: all of a rank's at once, or as few micro-batches as keep a pipeline's ranks busy."""
    per_rank, left = divmod(settings.global_batch, data_ranks(mesh))
    if mesh.pipeline == 1 or left:
        return None
    fitting = [
        count
        for count in range(1, per_rank + 1)
        if per_rank % count == 0 and not conflicts(settings.schedule or "gpipe", mesh.pipeline, settings.chunks, count)
    ]
    enough = [count for count in fitting if count >= 2 * mesh.pipeline] or fitting[-1:]
    return per_rank // enough[0] if enough else None


def _schedule(settings: RunSettings, mesh: Mesh, micro_batches: int) -> ScheduleName | None:
    if settings.schedule is not None or mesh.pipeline == 1:
        return settings.schedule
    choices: tuple[ScheduleName, ...] = ("1f1b", "interleaved-1f1b", "gpipe", "looped-bfs")
    fitting: list[ScheduleName] = [
        name for name in choices if not conflicts(name, mesh.pipeline, settings.chunks, micro_batches)
    ]
    return fitting[0] if fitting else None
