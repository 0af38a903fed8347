"""The run's own account: its record file, its event rows, and the check that a resumed run is the same run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ConfigError
from shoal.engine.clock import Laps
from shoal.engine.settings import MAY_CHANGE, RunSettings
from shoal.engine.step import StepReport
from shoal.job import Job
from shoal.monitor.events import EventLog
from shoal.monitor.sinks import Sinks
from shoal.monitor.summary import RunTotals

RECORD = "run.json"
#: The plan that a run was last begun with, as ``--plan`` takes it.
PLAN = "plan.toml"


def module_name(cls: type[Job]) -> str:
    """The name of the job's file, also where that file is the program itself."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if cls.__module__ == "__main__" and file and Path(file).is_file():
        return Path(file).stem
    return cls.__module__.rpartition(".")[2]


def job_name(job: Job) -> str:
    """What identifies a job: the name of its module (its file's) and of its class."""
    return f"{module_name(type(job))}.{type(job).__name__}"


def job_fields(job: Job) -> dict[str, Any]:
    """The job's fields as JSON values; a function or an object by its name."""
    named = lambda value: getattr(value, "__qualname__", type(value).__qualname__)  # noqa: E731
    return job.model_dump(mode="json", serialize_as_any=True, fallback=named)


def read_json(path: Path) -> Any:
    """The JSON value in ``path``. Raises ConfigError where it cannot be read."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); use another --out") from None


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` whole: a reader sees the old value or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def check_folder(out: Path, job: Job, settings: RunSettings) -> list[str]:
    """Whether this job may run in ``out``. Returns notes on what changed. Raises ConfigError."""
    if not (out / RECORD).exists():
        return []
    found = read_json(out / RECORD)
    if found["job"] != job_name(job):
        raise ConfigError(f"{out} holds a run of {found['job']}, asked for {job_name(job)}; use another --out")
    if not settings.resume:
        raise ConfigError(
            f"{out} holds a run of {found['job']} already; go on with --resume (resume=True) or use another --out"
        )
    now = settings.model_dump(mode="json")
    fixed = [
        f"{name} was {found['settings'][name]!r}, asked for {value!r}"
        for name, value in now.items()
        if name not in MAY_CHANGE and name in found["settings"] and found["settings"][name] != value
    ]
    if fixed:
        raise ConfigError(
            f"a resumed run keeps these settings ({'; '.join(fixed)}); leave them, or start anew in another --out. "
            f"These may change: {', '.join(sorted(MAY_CHANGE))}, workers, and the job's fields"
        )
    fields = job_fields(job)
    return [
        f"{name} was {found['fields'][name]!r} and is now {value!r}"
        for name, value in fields.items()
        if name in found["fields"] and found["fields"][name] != value
    ]


class Record:
    """Writes this rank's rows and feeds rank 0's sinks. Observes; cannot change training."""

    def __init__(self, out: Path, rank: int, sinks: Sinks, tell: Callable[[str], None]) -> None:
        self.out = out
        self.rank = rank
        self.log = EventLog(out, rank)
        self.sinks = sinks
        self.totals = RunTotals()
        self._tell = tell
        self._pending: tuple[StepReport, Laps] | None = None

    def start(self, record: dict[str, Any]) -> None:
        """Before the first row; rows of steps that a resumed run takes again are cut away by rank 0 before this."""
        self.sinks.start(record)
        self.row("run", **record)

    def row(self, kind: Any, **values: Any) -> None:
        """One row to the event file, and to the sinks on rank 0."""
        row = self.log.row(kind, **values)
        if self.rank == 0:
            self.sinks.row(row)

    def note(self, text: str) -> None:
        """A sentence the user should know; told once on rank 0."""
        self.row("note", text=text)
        if self.rank == 0:
            self._tell(text)

    def step(self, report: StepReport, laps: Laps, late: bool) -> None:
        """Write a step's row; ``late``: when the next one comes, so that no device is waited for."""
        self.flush()
        self._pending = (report, laps)
        if not late:
            self.flush()

    def flush(self) -> None:
        """Write the row that waits for its times."""
        if self._pending is None:
            return
        report, laps = self._pending
        self._pending = None
        values = report._asdict()
        applied, reason = values.pop("applied"), values.pop("reason")
        for name in ("tokens", "padded_tokens"):
            values[name] = values[name] or None
        times = laps.seconds()
        row = {**values, **times, "memory_bytes": memory_bytes()}
        self.totals.add({"kind": "step", **row})
        self.row("step", **row)
        if not applied:
            self.totals.add({"kind": "skip"})
            self.row("skip", step=report.step, reason=reason)

    def close(self) -> None:
        """After the last row."""
        self.flush()
        self.sinks.close()
        self.log.close()
        for problem in [*self.sinks.problems, *filter(None, [self.log.problem])]:
            self._tell(problem)


def memory_bytes() -> int:
    """Peak allocated device memory, or the resident set of this process on CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
