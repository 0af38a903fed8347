"""``shoal plan`` as a Python call: from a job, or a blueprint in a file, to the best plans and why. No torch itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from shoal.blueprint.stored import Sketch
from shoal.cluster import picture, presets
from shoal.cluster.facts import Cluster
from shoal.core.errors import ConfigError
from shoal.launch.answer import Planned, answer
from shoal.launch.comparing import compared, cost_lines, scaled, trial_lines, tried
from shoal.plan import scale, timeline
from shoal.plan.explain import layout
from shoal.plan.plan import Plan


class Extras(NamedTuple):
    """What else is asked of a plan: two plans' files, numbers of devices and their picture's file, a device-hour's
    price, a step's picture's file, how many plans to run."""

    compare: tuple[str, str] | None = None
    scale: str | None = None
    scale_plot: str | None = None
    price: float | None = None
    timeline: str | None = None
    trials: int = 0


def plan(
    job: Any = None,
    *,
    fields: Mapping[str, Any] | Sequence[str] | None = None,
    blueprint: str | None = None,
    cluster: str | Cluster | None = None,
    world: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    top: int = 5,
) -> Planned:
    """The best plans for ``job`` (an instance, or the path of its file), or for a saved ``blueprint``.

    ``cluster``: a preset's name, a TOML file or a value; None: this machine as measured, which takes up to a minute
    where it was not before. ``world``: devices of it. ``global_batch`` samples and ``precision``: the job's own, unless
    given. Raises ConfigError.
    """
    if (job is None) == (blueprint is None):
        raise ConfigError("plan() takes a job or a blueprint's file; give one of them")
    sketch = Sketch.read(blueprint) if blueprint else import_module("shoal.launch.sketch").sketch_of(
        job, fields or {}, precision
    )  # fmt: skip
    if precision not in (None, sketch.precision):
        raise ConfigError(
            f"--precision {precision}, and {blueprint} was traced in {sketch.precision}; plan the job's own file, or "
            f"save its blueprint with --precision {precision}"
        )
    return answer(sketch, find_cluster(cluster, world), global_batch, top)


def find_cluster(cluster: str | Cluster | None, world: int | None) -> Cluster:
    """The hardware that was named, or this machine. Raises ConfigError."""
    if isinstance(cluster, Cluster):
        return cluster if world is None else cluster.resized(world)
    if cluster is not None:
        return presets.find(cluster, world)
    measuring = import_module("shoal.launch.measure")
    kept = measuring.kept(world)
    return kept.cluster if kept is not None else measuring.measure(workers=world, quiet=False)


def more(planned: Planned, extras: Extras, file: str | None, fields: Any) -> list[str]:
    """What else was asked, in lines. Raises ConfigError."""
    told: list[str] = []
    if extras.price is not None and planned.best:
        told += ["", *cost_lines(planned, extras.price)]
    if extras.compare is not None:
        told += ["", *compared(planned, *extras.compare)]
    if extras.scale is not None:
        told += ["", *_scale(planned, extras.scale, extras.scale_plot)]
    elif extras.scale_plot is not None:
        raise ConfigError(f"--scale-plot {extras.scale_plot} without --scale; add for example --scale 8,64,512")
    if extras.timeline is not None and planned.best:
        _timeline(planned, Path(extras.timeline))
    if extras.trials and planned.best:
        told += ["", *_trials(planned, extras.trials, file, fields)]
    return told


def _timeline(planned: Planned, path: Path) -> None:
    """The best plan's step, drawn or as a trace. Raises ConfigError."""
    if path.suffix.lower() not in (".html", ".json"):
        raise ConfigError(f"--timeline {path}: end the name in .html for a picture, or in .json for a trace")
    best = planned.best[0].candidate
    found = timeline.spans(planned.search.prices[best.mesh.tensor, best.sequence_parallel], best)
    text = timeline.to_trace(found) if path.suffix.lower() == ".json" else timeline.to_html(found, layout(best))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; name a file in a folder that is there"
        ) from None


def _scale(planned: Planned, worlds: str, plot: str | None) -> list[str]:
    numbers = _worlds(worlds)
    if plot is not None:
        picture.check(plot)
    points = scaled(planned.sketch, planned.cluster, numbers, planned.question.global_batch)
    told = scale.lines(points, planned.work, planned.cluster)
    if plot is not None and any(point.found for point in points):
        drawing = scale.picture(points, planned.work, planned.cluster)
        picture.save(drawing, plot, planned.work.name, "\n".join([*planned.lines()[:2], "", *told]))
    return told


def _worlds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--scale {text!r}: give numbers of devices between commas, for example 8,64,512")
    return sorted({int(word) for word in words})


def _trials(planned: Planned, most: int, file: str | None, fields: Any) -> list[str]:
    if file is None:
        raise ConfigError("--trials run the job, and a saved blueprint is none; give the job's FILE")
    trials, automatic = import_module("shoal.launch.trials"), import_module("shoal.launch.automatic")
    trials.check_hardware(planned.question.world)
    given = dict(text.split("=", 1) for text in fields) if isinstance(fields, Sequence) else fields

    def run(plan: Plan) -> Mapping[str, float]:
        return trials.run_plan(file, given, plan)

    done, ranked = tried(planned, most, run, automatic.TOGETHER)
    planned.best = tuple(found for found, _ in ranked)
    return trial_lines(done, ranked)
