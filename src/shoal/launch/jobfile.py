"""From a Python file and ``field=value`` words to a Job."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, nearest
from shoal.core.settings import checked, split_override
from shoal.engine.settings import RunSettings
from shoal.job import Job


def load_class(file: str) -> type[Job]:
    """The Job class in ``file``: the only one, or the one called Job. Raises ConfigError."""
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{file}: no such file; give the Python file with your Job")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} is not a Python file; give the Python file with your Job")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Job) and value is not Job and value.__module__ == path.stem
    ]
    named = [value for value in found if value.__name__ == "Job"]
    chosen = named or found
    if len(chosen) != 1:
        what = "no Job" if not chosen else f"{len(chosen)} Jobs ({', '.join(value.__name__ for value in chosen)})"
        raise ConfigError(f"{file} has {what}; write one `class Job(shoal.Job)` in it")
    return chosen[0]


def make_job(cls: type[Job], overrides: Sequence[str]) -> Job:
    """A job with ``field=value`` overrides, each of the field's type. Raises ConfigError, all faults in one."""
    values = dict(split_override(text) for text in overrides)
    flags = [name for name in values if name not in cls.model_fields and name in RunSettings.model_fields]
    if flags:
        raise ConfigError(
            "; ".join(
                f"{name!r} is a setting of the run; write --{name.replace('_', '-')} {values[name]}" for name in flags
            )
        )
    return checked(cls, values, cls.__name__)


def make_settings(cls: type[Job], given: Mapping[str, Any]) -> RunSettings:
    """Run settings: the job's own ``defaults`` below what was ``given``. Raises ConfigError."""
    defaults = getattr(cls, "defaults", {})
    if not isinstance(defaults, Mapping):
        raise ConfigError(
            f"{cls.__name__}.defaults is {type(defaults).__name__}; make it a ClassVar dict of run settings"
        )
    unknown = [name for name in defaults if name not in RunSettings.model_fields]
    if unknown:
        raise ConfigError(
            f"{cls.__name__}.defaults: no setting {unknown[0]!r}; {nearest(unknown[0], RunSettings.model_fields)}"
        )
    settings = RunSettings.parse({**defaults, **given}, "settings")
    return settings.model_copy(update={"out": settings.out.replace("{job}", cls.__module__.rpartition(".")[2])})


def job_file(job: Job) -> str:
    """The file that a job's class stands in. Raises ConfigError for one typed into a session."""
    file = getattr(sys.modules.get(type(job).__module__), "__file__", None)
    if file is None:
        raise ConfigError(f"{type(job).__name__} stands in no file; put it in one, so that workers can load it")
    return file
