"""``shoal train`` as a Python call: start workers here, or join the world that is there."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from shoal.cluster.machine import counts
from shoal.core.errors import ConfigError, LaunchError, ShoalError, WorkerFailure
from shoal.core.fields import flat
from shoal.engine.build import Place, build
from shoal.engine.loop import train_loop
from shoal.engine.record import check_folder, read_json, write_json
from shoal.engine.resolve import resolve, wanted_mesh
from shoal.engine.run import Hooks, Run
from shoal.engine.settings import RunSettings
from shoal.job import Job
from shoal.launch.automatic import Decision, account, decide, utilisation
from shoal.launch.jobfile import LoadingStops, job_file, load_class, loading, make_job, make_settings, origins
from shoal.launch.local import STOPPED, run_workers
from shoal.launch.lock import lock_folder
from shoal.launch.spawn import pack, unpack
from shoal.launch.stop import STOP
from shoal.launch.watch import Beats
from shoal.launch.worker import open_beats, watch_joined
from shoal.launch.world import World, device_kind, find_world, join, leave, worker_count
from shoal.monitor.console import Console
from shoal.monitor.summary import summary as summary_text

RESULT = "launch/result.json"


def train(
    job: Job | str,
    *,
    fields: Mapping[str, Any] | None = None,
    workers: int | None = None,
    restarts: int = 0,
    port: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train ``job`` (an instance, or the path of its file) and return the summary, as ``--json`` prints it.

    ``fields``: the job's fields to change, where ``job`` is a path; named values inside a field as a dict or as
    ``{"a.x": 5}``, merged onto the field's default. The other keywords are the run's settings.

    Training happens in worker processes: a model object of the caller's is not updated (``shoal.prepare`` trains in
    place). The weights are in the run's folder: ``shoal.load_weights(model, summary["out"])`` copies them into a
    model here, ``shoal.checkpoint.export`` writes them as safetensors. In a script no main guard is needed. A job
    typed into a session, in no file, is trained too, as long as workers can be forks of this process; else a
    LaunchError says what to do. Raises ConfigError, LaunchError, WorkerFailure.
    """
    if loading():
        raise LoadingStops
    launch = Launch(workers, restarts, port, quiet=True, called=True)
    if isinstance(job, Job):
        if fields is not None:
            raise ConfigError(
                "train() was given a job and fields; set the fields where the job is made, or give its file"
            )
        made, cls, names = job, type(job), tuple(job.model_fields_set)
        status, found = _checked_run(cls, lambda: made, settings, names, launch)
    else:
        cls, given = load_class(job), fields or {}
        names = tuple(name for name, _ in flat(given))
        status, found = _checked_run(cls, lambda: make_job(cls, given), settings, names, launch)
    if found is None or status not in (0, STOPPED):
        raise WorkerFailure(f"training ended with status {status}; the cause is on stderr, above")
    return found


@dataclass(frozen=True)
class Launch:
    """How workers are to be started. ``called``: from Python, not by the command."""

    workers: int | None
    restarts: int
    port: int | None
    quiet: bool
    called: bool = False


def run_file(
    file: str, overrides: Sequence[str], given: dict[str, Any], launch: Launch
) -> tuple[int, dict[str, Any] | None]:
    """What the command does: exit status and summary (None where the run failed, or on ranks but the first)."""
    cls = load_class(file)
    names = tuple(text.partition("=")[0].strip() for text in overrides)
    return _checked_run(cls, lambda: make_job(cls, overrides), given, names, launch)


def _checked_run(
    cls: type[Job], make: Callable[[], Job], given: dict[str, Any], names: Sequence[str], launch: Launch
) -> tuple[int, dict[str, Any] | None]:
    """Gather all that contradicts into one ConfigError; without any, train here or in workers of our own."""
    faults: list[str] = []
    job = _tried(faults, make)
    settings = _tried(faults, lambda: make_settings(cls, given))
    batch = {name: given[name] for name in ("global_batch", "micro_batch") if name in given}
    plain = settings or _tried([], lambda: make_settings(cls, batch))
    layout = _tried(faults, lambda: _layout(plain, launch)) if plain else None
    if job is not None and settings is not None and find_world() is None:
        _tried(faults, lambda: check_folder(Path(settings.out), job, settings))
    if faults or job is None or settings is None or layout is None:
        raise ConfigError("\n".join(dict.fromkeys("\n".join(faults).splitlines())))
    world, count = layout
    out = Path(settings.out)
    entry = Entry(job, settings, launch.quiet, launch.called, origins(job, names, given, settings))
    if world is not None:
        with lock_folder(out) if world.rank == 0 else nullcontext():
            status = entry.joined(world)
            leave()
        return status, read_result(out) if world.rank == 0 else None
    with lock_folder(out):
        (out / RESULT).unlink(missing_ok=True)
        entry.take(decide(job, settings, count))
        status = run_workers(entry, count, out, launch.restarts, device_kind(), launch.port)
    return status, read_result(out)


def _tried(faults: list[str], make: Callable[[], Any]) -> Any:
    """What ``make`` returns, or None and its fault on the list."""
    try:
        return make()
    except ConfigError as error:
        faults.append(str(error))
        return None


def _layout(settings: RunSettings, launch: Launch) -> tuple[World | None, int]:
    """The world that is there, if any, and the number of ranks; ConfigError with all that does not go together."""
    world, faults = find_world(), []
    if world is not None:
        count = world.size
        if launch.workers not in (None, count):
            faults.append(f"--workers {launch.workers} in a world of {count} ranks; leave --workers out")
        if launch.restarts or launch.port is not None:
            asked = f"--restarts {launch.restarts}" if launch.restarts else f"--port {launch.port}"
            faults.append(f"{asked} in a world that others started; leave it out, and tell torchrun or SLURM")
    else:
        asked = _tried(faults, lambda: wanted_mesh(settings, launch.workers))
        number = asked.size if asked is not None and (settings.mesh or settings.plan) else launch.workers
        count = _tried(faults, lambda: worker_count(number, device_kind())) or 1
    if launch.restarts < 0:
        faults.append(f"--restarts {launch.restarts}; 0 or more")
    _tried(faults, lambda: resolve(settings, count))
    if faults:
        raise ConfigError("\n".join(faults))
    return world, count


def read_result(out: Path) -> dict[str, Any] | None:
    """The summary that rank 0 left; None where the run did not get that far."""
    path = out / RESULT
    return read_json(path) if path.exists() else None


def _models_alive() -> set[int]:
    """The identities of all modules that exist in this process."""
    return {id(value) for value in gc.get_objects() if issubclass(type(value), nn.Module)}


@dataclass
class Entry:
    """What each worker runs. Fresh workers load the job's file again and get what was changed in the job."""

    job: Job
    settings: RunSettings
    quiet: bool
    called: bool = False
    origins: dict[str, Any] | None = None
    decision: Decision | None = field(default=None, init=False)
    nodes: int = field(default=1, init=False)

    def take(self, decision: Decision) -> None:
        """The layout that was decided on; said where the run's own output goes."""
        if decision.settings.plan != self.settings.plan and self.origins is not None:
            self.origins = {**self.origins, "settings": {**self.origins["settings"], "plan": "planned"}}
        self.decision, self.settings = decision, decision.settings
        for line in decision.lines:
            print(line, file=sys.stderr if self.quiet else sys.stdout, flush=True)

    def __post_init__(self) -> None:
        self.file = job_file(self.job)
        self._home = sys.modules.get(type(self.job).__module__)

    def __getstate__(self) -> dict[str, Any]:
        cls = type(self.job)
        if self.file is None:
            raise LaunchError(
                f"{cls.__name__} stands in no file for them to load; put it in one, say job.py, and call "
                'shoal.train("job.py"), or start training before anything else that uses torch in this session'
            )
        if getattr(self._home, cls.__name__, None) is not cls:
            raise LaunchError(f"{cls.__name__} is not at the top level of {self.file}, where they look; move it there")
        changed = {name: getattr(self.job, name) for name in self.job.model_fields_set}
        (fields, bad), (private, worse) = pack(changed), pack(self.job.__pydantic_private__ or {})
        if bad or worse:
            found = "; ".join(f"{cls.__name__}.{fault}" for fault in [*bad, *worse])
            raise LaunchError(
                f"{found}; write it as a method of {cls.__name__} or as a function at the file's top level"
            )
        names = ("settings", "quiet", "called", "origins", "decision")
        keep = {name: getattr(self, name) for name in names}
        return {"file": self.file, "name": cls.__name__, "fields": fields, "private": private, **keep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cls = load_class(state["file"], state["name"])
        self._home, self.file = sys.modules[cls.__module__], state["file"]
        self.job = cls(**unpack(state["fields"], self._home))
        for name, value in unpack(state["private"], self._home).items():
            setattr(self.job, name, value)
        self.settings, self.quiet = state["settings"], state["quiet"]
        self.called, self.origins, self.decision = state["called"], state["origins"], state["decision"]

    def __call__(self, world: World) -> int:
        """One rank under our launcher. Collective."""
        beats = open_beats(Path(self.settings.out), world)
        return self._train(world, beats)

    def joined(self, world: World) -> int:
        """One rank of a world that torchrun or SLURM set up. Collective."""
        out = Path(self.settings.out)
        (out / "launch").mkdir(parents=True, exist_ok=True)
        beats = open_beats(out, world)
        watch_joined(out, world, beats)
        return self._train(world, beats)

    def _train(self, world: World, beats: Beats) -> int:
        device = join(world, device_kind(), debug_collectives=self.settings.debug_collectives)
        first = world.rank == 0
        if not world.launched:
            self._decide_together(world)
        settings = self.settings.model_copy(update={"resume": True}) if world.restart else self.settings
        hooks = Hooks(beat=beats.beat, stop_requested=STOP, tell=self._tell)
        sinks = (Console(),) if first and not self.quiet else ()
        before = _models_alive() if self.called and world.launched else set()
        run = build(self.job, settings, Place(device, world.restart), hooks, sinks, self.origins)
        if id(run.model) in before:
            run.record.note(
                "model() returned an object that the caller made: the workers train copies of it and leave it "
                f"as it is; take the weights with shoal.load_weights(model, {str(run.out)!r})"
            )
        found = train_loop(run)
        if first:
            found |= utilisation(self.decision, run, found["samples_per_s"], self.nodes)
        run.record.row("end", **{name: value for name, value in found.items() if name != "parts"})
        run.close()
        beats.beat(run.step_count, "end")  # how long after() may take is the job's affair
        if first:
            found["prediction"] = account(self.decision, run.out)
            write_json(run.out / RESULT, found)
            self._say_end(run, found)
        return STOPPED if found["stopped"] else 0

    def _decide_together(self, world: World) -> None:
        """Collective. Rank 0 decides on a layout for all."""
        answer: list[Any] = [None]
        local_ranks: list[Any] = [None] * world.size
        dist.all_gather_object(local_ranks, world.local_rank)
        self.nodes = max(1, len(counts(local_ranks)))
        if world.rank == 0:
            try:
                answer = [decide(self.job, self.settings, world.size, self.nodes)]
            except ShoalError as error:
                answer = [error]
        if world.size > 1:
            dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], ShoalError):
            raise answer[0]
        if world.rank == 0:
            self.take(answer[0])
        self.decision, self.settings = answer[0], answer[0].settings

    def _tell(self, text: str) -> None:
        if self.quiet:  # else the console prints them
            print(f"note: {text}", file=sys.stderr, flush=True)

    def _say_end(self, run: Run, found: dict[str, Any]) -> None:
        if not self.quiet:
            print(summary_text(found), flush=True)
        if found["stopped"]:
            said = f"stopped on request after step {run.step_count} and saved; go on with --resume"
            print(said, file=sys.stderr if self.quiet else sys.stdout, flush=True)
        else:
            with redirect_stdout(sys.stderr if self.quiet else sys.stdout):
                self.job.after(run.whole_model(), found)
