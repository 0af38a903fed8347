"""The second way in: keep your own loop, hand Shoal the parts; unchanged under torchrun."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import PrivateAttr

from shoal.core.errors import ConfigError, nearest
from shoal.engine.build import Place, build
from shoal.engine.record import check_folder
from shoal.engine.resolve import follow
from shoal.engine.run import Hooks, Run
from shoal.engine.settings import RunSettings
from shoal.job import Job
from shoal.launch.lock import lock_folder
from shoal.launch.stop import STOP
from shoal.launch.worker import open_beats, watch_joined
from shoal.launch.world import World, find_world, join, leave

PARTS = ("model", "data", "loss", "optimizer", "lr_schedule", "eval_data", "metrics", "counts", "collate", "inputs")


class Parts(Job):
    """A job made of objects that exist already."""

    _parts: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model(self) -> Any:
        return self._parts["model"]

    def data(self) -> Any:
        return self._parts["data"]

    def eval_data(self) -> Any:
        return self._parts.get("eval_data")

    def loss(self, output: Any, targets: Any) -> Any:
        return self._parts["loss"](output, targets)

    def optimizer(self, model: Any) -> Any:
        return self._parts["optimizer"]

    def lr_schedule(self, optimizer: Any, steps: int) -> Any:
        return self._parts.get("lr_schedule")

    def metrics(self, output: Any, targets: Any) -> dict[str, Any]:
        found = self._parts.get("metrics")
        return found(output, targets) if found else {}

    def counts(self, inputs: Any, targets: Any) -> dict[str, Any] | None:
        found = self._parts.get("counts")
        return found(inputs, targets) if found else None

    def inputs(self, batch: Any) -> tuple[Any, Any]:
        found = self._parts.get("inputs")
        return found(batch) if found else super().inputs(batch)


class CollatedParts(Parts):
    """Parts with a collate function of their own."""

    def collate(self, samples: list[Any]) -> Any:
        return self._parts["collate"](samples)


def prepare(job: Job | None = None, *, on_note: Callable[[str], None] | None = None, **given: Any) -> Run:
    """A run for a loop of your own, in this process or in the world that torchrun or SLURM set up. Collective.

    Give a ``job``, or its parts: ``model`` (an ``nn.Module``), ``data``, ``loss``, ``optimizer`` (built over that
    model), and if wanted ``lr_schedule``, ``eval_data``, ``metrics``, ``counts``, ``collate``, ``inputs``. The other
    keywords are run settings (``global_batch``, ``steps``, ``epochs``, ``out``, ``precision``, ...). The parts are
    trained in place. SIGTERM and Ctrl-C end ``run.windows()`` after the step under way. Raises ConfigError.
    """
    parts = {name: given.pop(name) for name in PARTS if name in given}
    unknown = [name for name in given if name not in RunSettings.model_fields]
    if unknown:
        known = [*PARTS, *RunSettings.model_fields]
        raise ConfigError(f"prepare() has no argument {unknown[0]!r}; {nearest(unknown[0], known)}")
    if job is None:
        missing = [name for name in ("model", "data", "loss", "optimizer") if name not in parts]
        if missing:
            raise ConfigError(f"prepare() needs {', '.join(missing)}; give a job, or all of its parts")
        job = CollatedParts() if "collate" in parts else Parts()
        job._parts = parts
    elif parts:
        raise ConfigError(f"prepare() was given a job and {', '.join(parts)}; give one or the other")
    settings = follow(RunSettings.parse({"out": "runs/own_loop", **given}, "prepare()"), given)
    return _start(job, settings, on_note or (lambda text: print(f"note: {text}", file=sys.stderr, flush=True)))


def _start(job: Job, settings: RunSettings, tell: Callable[[str], None]) -> Run:
    out = Path(settings.out)
    world = find_world() or World(0, 0, 1, 0, launched=False)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = join(world, kind, debug_collectives=settings.debug_collectives)
    if world.rank == 0:
        check_folder(out, job, settings)
        lock = lock_folder(out)
        atexit.register(lock.close)
    (out / "launch").mkdir(parents=True, exist_ok=True)
    beats = open_beats(out, world)
    if world.launched:
        STOP.listen(ignore_interrupt=True)
    else:
        watch_joined(out, world, beats)
    if world.restart:
        settings = settings.model_copy(update={"resume": True})
    hooks = Hooks(beat=beats.beat, stop_requested=STOP, tell=tell if world.rank == 0 else lambda text: None)
    run = build(job, settings, Place(device, world.restart), hooks)
    atexit.register(leave)
    atexit.register(lambda: run.close(alone=not run.finished or hasattr(sys, "last_type")))  # set by an uncaught error
    return run
