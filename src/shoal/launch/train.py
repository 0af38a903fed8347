"""``shoal train`` as a Python call: start workers here, or join the world that is there."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ConfigError
from shoal.engine.build import Place, build
from shoal.engine.loop import train_loop
from shoal.engine.record import check_folder, read_json, write_json
from shoal.engine.run import Hooks
from shoal.engine.settings import RunSettings
from shoal.job import Job
from shoal.launch.jobfile import load_class, make_job, make_settings
from shoal.launch.local import run_workers
from shoal.launch.lock import lock_folder
from shoal.launch.worker import WorkerContext, serve
from shoal.launch.world import World, find_world
from shoal.monitor.console import Console
from shoal.monitor.summary import summary as summary_text
from shoal.plan.batch import cut_batch

STOPPED = 75  # exit status of a run that was asked to stop and saved (EX_TEMPFAIL)
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
    _, found = run_job(job, make_settings(type(job), settings), workers, restarts, port, quiet=True)
    return found or {}


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
    return run_job(make_job(cls, overrides), make_settings(cls, given), workers, restarts, port, quiet)


def run_job(
    job: Job, settings: RunSettings, workers: int | None, restarts: int, port: int | None, quiet: bool
) -> tuple[int, dict[str, Any] | None]:
    """Check what can be checked, then train in workers of our own or in the world that is there."""
    world = find_world()
    out = Path(settings.out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if world is not None:
        if workers is not None and workers != world.size:
            raise ConfigError(f"--workers {workers} in a world of {world.size} ranks; leave --workers out")
        return serve(lambda context: _work(job, settings, context, quiet), world, out, device)
    count = _workers(workers, device)
    cut_batch(settings.global_batch, settings.micro_batch, count)
    check_folder(out, job, settings)
    (out / RESULT).unlink(missing_ok=True)
    with lock_folder(out):
        status = run_workers(lambda context: _work(job, settings, context, quiet), count, out, restarts, device, port)
    return status, read_result(out)


def read_result(out: Path) -> dict[str, Any] | None:
    """The summary that rank 0 left."""
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


def _work(job: Job, settings: RunSettings, context: WorkerContext, quiet: bool) -> int:
    """One rank's whole life. Collective."""
    world = context.world
    first = world.rank == 0
    if world.restart:
        settings = settings.model_copy(update={"resume": True})
    hooks = Hooks(
        beat=context.beat,
        stop_requested=context.stop_requested,
        tell=lambda text: print(f"note: {text}", file=sys.stderr if quiet else sys.stdout, flush=True),
    )
    sinks = (Console(),) if first and not quiet else ()
    run = build(job, settings, Place(context.device, world.restart), hooks, sinks)
    found = train_loop(run)
    run.record.row("end", **{name: value for name, value in found.items() if name != "parts"})
    run.close()
    if first:
        write_json(run.out / RESULT, found)
        if not quiet:
            print(summary_text(found), flush=True)
        if found["stopped"]:
            print(f"stopped on request after step {run.step_count}, saved; go on with --resume", flush=True)
        else:
            job.after(run.model, found)
    return STOPPED if found["stopped"] else 0
