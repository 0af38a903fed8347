"""``shoal train`` as a Python call: start workers here, or join the world that is there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ConfigError, WorkerFailure
from shoal.engine.build import Place, build
from shoal.engine.loop import train_loop
from shoal.engine.record import check_folder, read_json, write_json
from shoal.engine.run import Hooks, Run
from shoal.engine.settings import RunSettings
from shoal.job import Job
from shoal.launch.jobfile import job_file, load_class, make_job, make_settings
from shoal.launch.local import STOPPED, run_workers
from shoal.launch.lock import lock_folder
from shoal.launch.stop import STOP
from shoal.launch.watch import Beats
from shoal.launch.worker import open_beats, watch_joined
from shoal.launch.world import World, find_world, join, leave
from shoal.monitor.console import Console
from shoal.monitor.summary import summary as summary_text
from shoal.plan.batch import cut_batch

RESULT = "launch/result.json"


def train(
    job: Job | str, *, workers: int | None = None, restarts: int = 0, port: int | None = None, **settings: Any
) -> dict[str, Any]:
    """Train ``job`` (an instance, or the path of its file) and return the summary. Raises WorkerFailure.

    The weights are in the run's folder: a caller's own model object is not updated. Call it before the process has
    run torch operations on several threads (on CPU the workers are forked).
    """
    if isinstance(job, str):
        job = make_job(load_class(job), [])
    status, found = run_job(job, make_settings(type(job), settings), workers, restarts, port, quiet=True)
    if found is None or status not in (0, STOPPED):
        raise WorkerFailure(f"training ended with status {status}; the cause is on stderr, above")
    return found


def run_file(
    file: str,
    overrides: Sequence[str],
    given: dict[str, Any],
    *,
    workers: int | None,
    restarts: int,
    port: int | None,
    quiet: bool,
) -> tuple[int, dict[str, Any] | None]:
    """What the command does: exit status and summary (None where the run failed, or on ranks but the first)."""
    cls = load_class(file)
    faults: list[str] = []
    job = _tried(faults, lambda: make_job(cls, overrides))
    settings = _tried(faults, lambda: make_settings(cls, given))
    if job is None or settings is None:  # what else contradicts, in the same report
        batch = {name: given[name] for name in ("global_batch", "micro_batch") if name in given}
        _tried(faults, lambda: _layout(make_settings(cls, batch), workers))
        raise ConfigError("\n".join(dict.fromkeys("\n".join(faults).splitlines())))
    return run_job(job, settings, workers, restarts, port, quiet)


def _tried(faults: list[str], make: Callable[[], Any]) -> Any:
    """What ``make`` returns, or None and its fault on the list."""
    try:
        return make()
    except ConfigError as error:
        faults.append(str(error))
        return None


def run_job(
    job: Job, settings: RunSettings, workers: int | None, restarts: int, port: int | None, quiet: bool
) -> tuple[int, dict[str, Any] | None]:
    """Check what can be checked, then train in workers of our own or in the world that is there."""
    world, count = _layout(settings, workers)
    out = Path(settings.out)
    entry = Entry(job, settings, quiet)
    if world is not None:
        with lock_folder(out) if world.rank == 0 else nullcontext():
            status = entry.joined(world)
            leave()
        return status, read_result(out) if world.rank == 0 else None
    check_folder(out, job, settings)
    with lock_folder(out):
        (out / RESULT).unlink(missing_ok=True)
        status = run_workers(entry, count, out, restarts, _device(), port)
    return status, read_result(out)


def _layout(settings: RunSettings, workers: int | None) -> tuple[World | None, int]:
    """The world that is there, if any, and the number of ranks; ConfigError where the batch cannot be cut over them."""
    world = find_world()
    if world is not None and workers is not None and workers != world.size:
        raise ConfigError(f"--workers {workers} in a world of {world.size} ranks; leave --workers out")
    count = world.size if world is not None else _workers(workers, _device())
    cut_batch(settings.global_batch, settings.micro_batch, count)
    return world, count


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def read_result(out: Path) -> dict[str, Any] | None:
    """The summary that rank 0 left; None where the run did not get that far."""
    path = out / RESULT
    return read_json(path) if path.exists() else None


def _workers(asked: int | None, device: str) -> int:
    if device == "cuda":
        gpus = torch.cuda.device_count()
        if asked is not None and asked > gpus:
            raise ConfigError(f"--workers {asked}, but this machine has {gpus} GPUs; ask for {gpus} or fewer")
        return asked or gpus
    if asked is not None and asked < 1:
        raise ConfigError(f"--workers {asked}; at least 1")
    return asked or min(2, len(os.sched_getaffinity(0)))


@dataclass
class Entry:
    """What each worker runs. Picklable where the job comes from a file, which the worker then loads again."""

    job: Job
    settings: RunSettings
    quiet: bool

    def __getstate__(self) -> dict[str, Any]:
        return {
            "file": job_file(self.job),
            "fields": self.job.model_dump(),
            "settings": self.settings,
            "quiet": self.quiet,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.job = load_class(state["file"])(**state["fields"])
        self.settings, self.quiet = state["settings"], state["quiet"]

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
        device = join(world, _device(), debug_collectives=self.settings.debug_collectives)
        first = world.rank == 0
        settings = self.settings.model_copy(update={"resume": True}) if world.restart else self.settings
        hooks = Hooks(beat=beats.beat, stop_requested=STOP, tell=self._tell)
        sinks = (Console(),) if first and not self.quiet else ()
        run = build(self.job, settings, Place(device, world.restart), hooks, sinks)
        found = train_loop(run)
        run.record.row("end", **{name: value for name, value in found.items() if name != "parts"})
        run.close()
        if first:
            write_json(run.out / RESULT, found)
            self._say_end(run, found)
        return STOPPED if found["stopped"] else 0

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
                self.job.after(run.model, found)
