"""Trial runs: a plan taken for a few steps on this machine, and its parts measured."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.launch.automatic import WARM_UP, measured
from shoal.launch.train import train
from shoal.launch.world import device_kind, worker_count
from shoal.plan.plan import Plan

#: Steps of a trial that count.
STEPS = 6


def run_plan(file: str, fields: Mapping[str, Any], plan: Plan) -> dict[str, float]:
    """Seconds by part of a plan's median step here. Raises ConfigError where the hardware is not at hand."""
    check_hardware(plan.mesh.size)
    with tempfile.TemporaryDirectory(prefix="shoal-trial-") as folder:
        path = Path(folder) / "plan.toml"
        plan.write(path)
        train(
            file, fields=fields, workers=plan.mesh.size, plan=str(path), out=str(Path(folder) / "run"),
            steps=WARM_UP + STEPS, epochs=None, eval_every=10**9, save_every=None, sinks=(),
        )  # fmt: skip
        found = measured(Path(folder) / "run")
    assert found is not None  # it took more steps than warm it up
    return found


def check_hardware(ranks: int) -> None:
    """Raises ConfigError unless so many ranks can be workers here."""
    kind = device_kind()
    most = worker_count(None, kind) if kind == "cuda" else None
    if most is not None and ranks > most:
        raise ConfigError(
            f"trials of {ranks} ranks were asked for, and this machine has {most} GPUs; plan for {most} or fewer, or "
            "leave --trials out"
        )
