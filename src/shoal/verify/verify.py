"""The proof that a layout computes what one device computes: the user's job under both, everything compared."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ConfigError, DataError, ModelError, NumericsError, WorkerFailure
from shoal.core.fields import flat
from shoal.engine.resolve import resolve
from shoal.engine.settings import RunSettings
from shoal.job import Job
from shoal.launch.jobfile import LoadingStops, load_class, loading, make_job, make_settings, origins
from shoal.launch.local import run_workers
from shoal.launch.watch import Watch
from shoal.launch.worker import error_path
from shoal.launch.world import find_world
from shoal.plan.mesh import Mesh
from shoal.plan.plan import Plan
from shoal.plan.ranks import data_ranks, factorisations
from shoal.verify.compare import FP64, MULTIPLE, UNITS, Comparison, Difference, Tolerance, compare
from shoal.verify.probe import ProbedEntry
from shoal.verify.recording import Recording, split
from shoal.verify.report import HALF, LayoutResult, Report

STEPS = 3
PRECISION = "fp64"
DOUBTFUL = 1e-6  # mistakes show at 1e-3
#: Run settings that a verification takes; the others have no part in it.
SETTINGS = (
    "mesh", "plan", "schedule", "chunks", "sequence_parallel", "shard_level", "recompute", "cpu_offload",
    "global_batch", "micro_batch", "clip", "steps", "precision", "seed",
)  # fmt: skip
#: What a run says of itself that may be why losses differ, and what to change.
HINTS = (
    (
        "the loss is a scalar",
        "the loss is a scalar, a mean over the samples of a rank's micro-batch: where that depends on how samples are "
        "grouped, return shoal.Loss(sum, count)",
    ),
    (
        "iterable data split over",
        "the data splits itself with shard(), so that each number of ranks reads it in another order: verify with "
        "map-style data",
    ),
)
REFUSALS = (ConfigError.__name__, DataError.__name__, ModelError.__name__)


def verify(
    job: Job | str,
    *,
    fields: Mapping[str, Any] | None = None,
    meshes: str | Sequence[str] | None = None,
    world: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> Report:
    """Run ``job`` (an instance, or the path of its file) on one device and under layouts, and compare every step.

    The layouts: each of ``meshes`` (text such as ``"pipeline=2,tensor=2"``, or several), or ``plan=FILE``, or every
    factorisation of ``world`` ranks. The other keywords are run settings (``SETTINGS``); by default three steps in
    float64. ``tell`` gets a line per run. Nothing is left on disk. Raises ConfigError for what cannot be asked, and
    WorkerFailure or NumericsError where the job does not run on one device; what a layout does is in the report.
    """
    if loading():
        raise LoadingStops
    if isinstance(job, Job):
        if fields is not None:
            raise ConfigError(
                "verify() was given a job and fields; set the fields where the job is made, or give its file"
            )
        return _verify(job, tuple(job.model_fields_set), meshes, world, settings, tell)
    given = fields or {}
    made = make_job(load_class(job), given)
    return _verify(made, tuple(name for name, _ in flat(given)), meshes, world, settings, tell)


def verify_file(
    file: str, overrides: Sequence[str], world: int | None, given: dict[str, Any], tell: Callable[[str], None]
) -> Report:
    """What the command does."""
    names = tuple(text.partition("=")[0].strip() for text in overrides)
    return _verify(make_job(load_class(file), overrides), names, None, world, given, tell)


def _verify(
    job: Job,
    names: Sequence[str],
    meshes: str | Sequence[str] | None,
    world: int | None,
    given: Mapping[str, Any],
    tell: Callable[[str], None],
) -> Report:
    if find_world() is not None:
        raise ConfigError(
            "verify starts workers of its own, one device's and each layout's, and was called in a world that torchrun "
            "or SLURM set up; run it without"
        )
    layouts = _layouts(meshes, world, given)
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder:
        runs = Runs(job, names, Path(folder), max(layout.size for layout in layouts), tell)
        settings = [_settings(type(job), given, mesh, Path(folder)) for mesh in layouts]
        if codec := _codec(type(job), given):
            runs.note(
                f"compress = {codec!r} is off here: what a codec does to gradients is not what one device computes; "
                "the layout is held against it without"
            )
        results = [runs.result(mesh, chosen) for mesh, chosen in zip(layouts, settings, strict=True)]
        return Report(results, runs.notes)


def _layouts(meshes: str | Sequence[str] | None, world: int | None, given: Mapping[str, Any]) -> list[Mesh]:
    """What was asked for. Raises ConfigError unless it is one of the three."""
    mesh, plan = meshes or given.get("mesh"), given.get("plan")
    asked = [name for name, value in (("--mesh", mesh), ("--plan", plan), ("--world", world)) if value is not None]
    if len(asked) != 1:
        found = " and ".join(asked) if asked else "none of them"
        raise ConfigError(f"verify takes one of --mesh, --plan and --world, found {found}; say which layout to compare")
    if world is not None:
        return factorisations(int(world))
    if plan is not None:
        return [Plan.read(plan).mesh]
    return [Mesh.parse(text, "--mesh") for text in ([mesh] if isinstance(mesh, str) else mesh or ())]


def _settings(cls: type[Job], given: Mapping[str, Any], mesh: Mesh, folder: Path) -> RunSettings:
    """The settings of a run under ``mesh``: the job's own, what was given, and nothing that is beside the point."""
    unknown = [name for name in given if name not in SETTINGS]
    if unknown:
        raise ConfigError(f"verify takes no setting {unknown[0]!r}; it takes {', '.join(SETTINGS)}, fields and world")
    values = {"steps": STEPS, "precision": PRECISION, **given, "mesh": str(mesh)}
    if given.get("plan"):
        plan = Plan.read(given["plan"]).model_copy(update={"precision": values["precision"], "compress": None})
        plan.write(folder / "plan.toml")
        values.update(plan=str(folder / "plan.toml"), mesh=None)
    settings = make_settings(cls, values)
    aside = {
        "out": "", "sinks": (), "kernels": "default", "compile": False, "resume": False, "eval_every": None,
        "save_every": None, "loader_workers": 0, "debug_collectives": False, "epochs": None, "compress": None,
    }  # fmt: skip
    chosen = {name: getattr(settings, name) for name in settings.model_fields_set} | aside
    return RunSettings.parse(chosen, "settings")


def _codec(cls: type[Job], given: Mapping[str, Any]) -> str | None:
    """The codec of the plan's file, or of the job's own settings."""
    return Plan.read(given["plan"]).compress if given.get("plan") else make_settings(cls, {}).compress


@dataclass
class Runs:
    """The runs of one verification. One device runs once for each way of cutting micro-batches."""

    job: Job
    names: Sequence[str]
    folder: Path
    largest: int  # ranks of the largest layout
    tell: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    references: dict[tuple[Any, ...], tuple[Recording, Tolerance | None]] = field(default_factory=dict)
    _number: int = 0

    def __post_init__(self) -> None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.device = "cuda" if gpus >= self.largest else "cpu"
        if 0 < gpus < self.largest:
            self.note(f"on the CPU: {self.largest} ranks were asked for, and there are {gpus} GPUs")

    def result(self, mesh: Mesh, settings: RunSettings) -> LayoutResult:
        """One layout against one device."""
        try:
            plan = resolve(settings, mesh.size)
        except ConfigError as error:
            return LayoutResult(str(mesh), "refused", reason=str(error))
        reference, tolerance = self._reference(settings, plan)
        self.tell(f"{mesh}: {mesh.size} ranks, micro-batches of {plan.micro_batch}")
        out = self._out()
        try:
            recording = self._run(settings, mesh.size, out)
            if isinstance(recording, Failure):
                return recording.of(mesh)
            self._say(recording)
            found = compare(reference, recording, Tolerance(FP64) if tolerance is None else tolerance)
            if tolerance is None and found.first is not None and _doubtful(found.first):
                found = compare(reference, recording, self._measured(settings, plan))
            return _judged(mesh, found, _hints(found, reference, recording, mesh), split(recording, mesh.degrees))
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def _reference(self, settings: RunSettings, plan: Plan) -> tuple[Recording, Tolerance | None]:
        """One device's run of the same micro-batches: number j of all data ranks together, in the same order.

        With what rounding may do, where it has been measured: in low precision always.
        """
        key = _key(plan)
        if key not in self.references:
            self.tell(f"one device: micro-batches of {key[0]}")
            self.references[key] = self._alone(_one_device(settings, plan), 0.0), None
            if settings.precision != "fp64":
                self._measured(settings, plan)
        return self.references[key]

    def _measured(self, settings: RunSettings, plan: Plan) -> Tolerance:
        """What moving each weight by a rounding unit changes in the one-device run, times a multiple."""
        recording, _ = self.references[_key(plan)]
        unit = UNITS[settings.precision]
        self.tell(f"one device again, weights moved by {unit:.1e} of themselves")
        errors = compare(recording, self._alone(_one_device(settings, plan), unit), Tolerance(math.inf)).errors
        self.note(
            f"{settings.precision}: what counts as rounding was measured, by moving each weight of the one-device run "
            f"by {unit:.1e} of itself; {MULTIPLE} times what that changed is allowed, tensor by tensor"
        )
        tolerance = Tolerance(FP64 if settings.precision == "fp64" else MULTIPLE * unit, errors)
        self.references[_key(plan)] = recording, tolerance
        return tolerance

    def _alone(self, settings: RunSettings, unit: float) -> Recording:
        recording = self._run(settings, 1, self._out(), unit)
        if isinstance(recording, Failure):
            kind = ModelError if recording.status == "refused" else WorkerFailure
            raise kind(f"the job does not run on one device, so there is nothing to compare with: {recording.reason}")
        self._say(recording)
        bad = [step for step in recording.steps if not step.first["applied"]]
        if len(bad) == len(recording.steps):
            raise NumericsError(
                f"on one device no step could be applied ({bad[0].first['reason']}), so there is nothing to compare; "
                "make the job train first"
            )
        return recording

    def _run(self, settings: RunSettings, ranks: int, out: Path, unit: float = 0.0) -> Recording | Failure:
        probes = out / "probes"
        probes.mkdir(parents=True)
        settings = settings.model_copy(update={"out": str(out / "run")})
        entry = ProbedEntry(
            self.job,
            settings,
            True,
            True,
            origins(self.job, self.names, ()),
            folder=str(probes),
            unit=unit,
            device=self.device,
        )
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            status = run_workers(entry, ranks, out / "run", device=self.device, watch=Watch(saves=False))
        if status:
            return _failure(out / "run" / "launch", ranks, said.getvalue())
        return Recording(probes)

    def _out(self) -> Path:
        self._number += 1
        return self.folder / f"run-{self._number}"

    def _say(self, recording: Recording) -> None:
        """What was changed in the job to make runs comparable."""
        if recording.any("keyed"):
            self.note(
                "dropout has the same masks on both sides, by sample and place; a training's own differ by layout"
            )
        for off in sorted({name for told in recording.by_rank for name in told["off"]}):
            self.note(f"dropout of {off} is off on both sides: its masks depend on the layout")
        if recording.any("lifted"):
            self.note("casts to float32 inside the model are to float64 on both sides")

    def note(self, text: str) -> None:
        """Something to know of the comparison, once."""
        if text not in self.notes:
            self.notes.append(text)


def _doubtful(first: Difference) -> bool:
    """Whether a difference in float64 may be rounding that the optimizer made large: it is to be measured then."""
    return first.error < DOUBTFUL or first.what.startswith(("weight", "optimizer"))


def _key(plan: Plan) -> tuple[Any, ...]:
    """What makes a one-device run another one: micro-batch, global batch, clipping."""
    return plan.micro_batch * data_ranks(plan.mesh), plan.global_batch, plan.clip


def _one_device(settings: RunSettings, plan: Plan) -> RunSettings:
    """A plan's run without its layout."""
    micro_batch, global_batch, clip = _key(plan)
    return settings.model_copy(
        update={
            "mesh": None, "plan": None, "schedule": None, "chunks": 1, "sequence_parallel": False, "recompute": "none",
            "cpu_offload": False,
            "micro_batch": micro_batch, "global_batch": global_batch, "clip": clip,
        }
    )  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """Why a run did not come to its end."""

    status: Any
    reason: str

    def of(self, mesh: Mesh) -> LayoutResult:
        return LayoutResult(str(mesh), self.status, reason=self.reason)


def _failure(folder: Path, ranks: int, said: str) -> Failure:
    """What the workers left: the first error of Shoal's own that refuses, else a crash."""
    rows = []
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError):
            rows.append(json.loads(error_path(folder, rank).read_text()))
    first = min((row for row in rows if not row["victim"]), key=lambda row: row["time_s"], default=None)
    if first is not None and first["kind"] in REFUSALS:
        return Failure("refused", first["text"].removeprefix("error: "))
    lines = [line for line in said.strip().splitlines() if not line.startswith("note: ")]
    return Failure("error", "\n".join(lines[-20:]).removeprefix("error: ") or "the workers left no error")


def _hints(found: Comparison, reference: Recording, recording: Recording, mesh: Mesh) -> list[str]:
    """What may be why losses, or what a model keeps, differ."""
    if found.first is None or found.first.what != "loss" and not found.first.what.startswith("buffer"):
        return []
    hints = [hint for said, hint in HINTS if any(said in note for note in recording.told["notes"])]
    if (carried := reference.told["carried"]) and data_ranks(mesh) > 1:
        hints.append(
            f"the model keeps {', '.join(map(repr, carried))} from one forward to the next, which each data rank makes "
            "of its own samples: use a layout without replicate and shard, or none that keeps it"
        )
    return hints


def _judged(mesh: Mesh, found: Comparison, hints: list[str], shares: Mapping[str, float]) -> LayoutResult:
    errors = found.largest("loss"), found.largest("gradient/"), found.largest("weight/", "buffer/")
    first, tensor = found.first, found.tensor
    if first is None:
        return LayoutResult(str(mesh), "equal", *errors, reason=_unsplit(shares), split=dict(shares))
    reason = first.why
    if tensor is not None:
        reason += f"; {tensor.module}, error {tensor.error:.2g} where rounding is below {tensor.tolerance:.1g}"
        reason += f": {tensor.why}" if tensor is not first else ""
        if first is tensor and tensor.what.startswith(("weight", "optimizer")):
            reason += "; the gradients agree, so that the optimizer did something else with them"
    reason += "".join(f"; {hint}" for hint in hints)
    return LayoutResult(
        str(mesh), "different", *errors, first_difference=str(tensor or first), reason=reason, split=dict(shares)
    )


def _unsplit(shares: Mapping[str, float]) -> str | None:
    low: Iterable[str] = [
        f"{axis} divides {share:.0%} of the weight bytes, so that the model is not split over it"
        for axis, share in shares.items()
        if share < HALF
    ]
    return "; ".join(low) or None
