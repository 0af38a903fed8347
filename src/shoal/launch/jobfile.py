"""From a Python file and ``field=value`` words to a Job."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, nearest
from shoal.core.fields import flat, nest
from shoal.core.settings import split_override
from shoal.engine.record import RECORD, job_fields, module_name, read_json
from shoal.engine.resolve import OF_PLAN, follow
from shoal.engine.settings import RunSettings
from shoal.job import Job


class LoadingStops(BaseException):
    """Ends the loading of a job's file where the file itself starts a run: that run is under way already."""


_loading: list[str] = []  # the files being loaded


def loading() -> bool:
    """Whether a job's file is being loaded right now."""
    return bool(_loading)


def load_class(file: str, name: str | None = None) -> type[Job]:
    """The Job class in ``file``: the one called ``name``, else the only one, or the one called Job.

    The file may end by starting a run without a main guard; loading stops there. Raises ConfigError.
    """
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
    _loading.append(file)
    stopped = ""
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in sys.modules:
            raise
        package = error.name.partition(".")[0]
        raise ConfigError(
            f"{file} imports {error.name}, which is not here; install it (pip install {package}) into the environment "
            f"that runs shoal, or put {package}.py beside the file"
        ) from None
    except LoadingStops:
        stopped = "; loading it stopped at its call of shoal.train"
    finally:
        _loading.pop()
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Job) and value is not Job and value.__module__ == path.stem
    ]
    wanted = [value for value in found if value.__name__ == (name or "Job")]
    chosen = wanted or ([] if name else found)
    if len(chosen) != 1:
        what = "no Job" if not chosen else f"{len(chosen)} Jobs ({', '.join(value.__name__ for value in chosen)})"
        raise ConfigError(f"{file} has {what}; write one `class {name or 'Job'}(shoal.Job)` at its top level{stopped}")
    return chosen[0]


def make_job(cls: type[Job], overrides: Sequence[str] | Mapping[str, Any]) -> Job:
    """A job with ``field=value`` overrides, or a mapping of them, each of the field's type.

    ``a.x=5`` changes x alone in the field a. Raises ConfigError, all faults in one.
    """
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else map(split_override, overrides))
    flags = [pair for pair in pairs if pair[0] not in cls.model_fields and pair[0] in RunSettings.model_fields]
    faults = [f"{name!r} is a setting of the run; write --{name.replace('_', '-')} {value}" for name, value in flags]
    values, twice = nest(pair for pair in pairs if pair not in flags)
    try:
        job = cls(**values)
    except ConfigError as error:
        raise ConfigError("\n".join([*faults, *twice, str(error)])) from None
    if faults or twice:
        raise ConfigError("\n".join([*faults, *twice]))
    return job


def make_settings(cls: type[Job], given: Mapping[str, Any]) -> RunSettings:
    """Run settings: the job's own ``defaults`` below what a plan's file decides, below what was ``given``.

    A layout that was given (a mesh, a plan) goes before the other one of the defaults. Raises ConfigError."""
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
    own = dict(defaults)
    if given.get("mesh") is not None:
        own.pop("plan", None)
    settings = follow(RunSettings.parse({**own, **given}, "settings"), given)
    return _as_begun(settings.model_copy(update={"out": settings.out.replace("{job}", module_name(cls))}), given)


def _as_begun(settings: RunSettings, given: Mapping[str, Any]) -> RunSettings:
    """A resumed run keeps what a plan's file once decided in place of the job's defaults."""
    decided = _decided_before(settings)
    return settings.model_copy(update={name: value for name, value in decided.items() if name not in given})


def _decided_before(settings: RunSettings) -> dict[str, Any]:
    """Of a run that is resumed without a plan's file: the settings that such a file decided, as they were then."""
    record = Path(settings.out) / RECORD
    if not settings.resume or settings.plan is not None or not record.exists():
        return {}
    found = read_json(record)
    sources = (found.get("origins") or {}).get("settings", {})
    return {name: found["settings"][name] for name in OF_PLAN if sources.get(name) == "plan"}


def origins(
    job: Job, overrides: Iterable[str], given: Iterable[str], run: RunSettings | None = None
) -> dict[str, dict[str, str]]:
    """Where each field of the job and each setting of the run has its value from: given, plan (a plan's file, which
    the ``run`` was asked for or begun with), job or default."""
    paths = list(overrides)
    fields = {
        name: "given" if any(f"{name}.".startswith(f"{path}.") for path in paths) else "job"
        for name, _ in flat(job_fields(job))
    }
    defaults, asked = getattr(type(job), "defaults", {}), set(given)
    decided: Collection[str] = ()
    if run is not None:
        decided = {"mesh", *OF_PLAN} if run.plan is not None else _decided_before(run)
    settings = {
        name: "given" if name in asked else "plan" if name in decided else "job" if name in defaults else "default"
        for name in RunSettings.model_fields
    }
    return {"fields": fields, "settings": settings}


def job_file(job: Job) -> str | None:
    """The file that a job's class stands in; None for one typed into a session."""
    file = getattr(sys.modules.get(type(job).__module__), "__file__", None)
    return str(Path(file).resolve()) if file and Path(file).is_file() else None  # "<stdin>" is none
