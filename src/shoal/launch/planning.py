"""``shoal plan`` as a Python call: from a job, or a blueprint in a file, to the best plans and why. No torch itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_args

from shoal.blueprint.stored import Sketch
from shoal.cluster import picture, presets
from shoal.cluster.facts import Cluster
from shoal.core.errors import ConfigError, nearest
from shoal.core.toml import check_writable, write_text
from shoal.launch.answer import Planned, answer
from shoal.launch.comparing import compared, cost_lines, cost_values, priced, scaled, trial_lines, tried
from shoal.plan import scale, timeline
from shoal.plan.explain import layout
from shoal.plan.mesh import Mesh
from shoal.plan.plan import Plan, Precision


class Extras(NamedTuple):
    """What else is asked of a plan: two plans' files, numbers of devices and their picture's file, a device-hour's
    price, a step's picture's file, how many plans to run; files for the best plan and for the blueprint; the one mesh
    that is planned. ``plans``: the two plans, once they are read."""

    compare: tuple[str, str] | None = None
    scale: str | None = None
    scale_plot: str | None = None
    price: float | None = None
    timeline: str | None = None
    trials: int = 0
    out: str | None = None
    save_blueprint: str | None = None
    mesh: str | None = None
    plans: tuple[Plan, ...] = ()


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
    mesh: str | None = None,
) -> Planned:
    """The best plans for ``job`` (an instance, or the path of its file), or for a saved ``blueprint``.

    ``cluster``: a preset's name, a TOML file or a value; None: this machine as measured, which takes up to a minute
    where it was not before. ``world``: devices of it. ``global_batch`` samples and ``precision``: the job's own, unless
    given. ``mesh``: plans of this mesh alone (``"pipeline=2,tensor=2"``; what is left of the devices goes to replicate)
    in place of each mesh's best. Raises ConfigError.
    """
    if (job is None) == (blueprint is None):
        raise ConfigError("plan() takes a job or a blueprint's file; give one of them")
    for name, value in (("global_batch", global_batch), ("top", top), ("world", world)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}; give 1 or more")
    if precision is not None and precision not in get_args(Precision):
        raise ConfigError(f"--precision {precision} is none that is run; {nearest(precision, get_args(Precision))}")
    sketch = Sketch.read(blueprint) if blueprint else import_module("shoal.launch.sketch").sketch_of(
        job, fields or {}, precision
    )  # fmt: skip
    if precision not in (None, sketch.precision):
        raise ConfigError(
            f"--precision {precision}, and {blueprint} was traced in {sketch.precision}; plan the job's own file, or "
            f"save its blueprint with --precision {precision}"
        )
    whole = find_cluster(cluster, None if cluster is not None else world)
    sized = whole if world is None else whole.resized(world)
    return answer(sketch, sized, global_batch, top, whole=whole, mesh=_mesh(mesh, sized.world))


def _mesh(asked: str | None, world: int) -> Mesh | None:
    if asked is None:
        return None
    mesh = Mesh.parse(asked, "--mesh", world)
    if mesh.context > 1:
        raise ConfigError(f"--mesh {mesh}: sequences cannot be split over ranks yet; leave context out")
    return mesh


def find_cluster(cluster: str | Cluster | None, world: int | None) -> Cluster:
    """The hardware that was named, or this machine. Raises ConfigError."""
    if isinstance(cluster, Cluster):
        return cluster if world is None else cluster.resized(world)
    if cluster is not None:
        return presets.find(cluster, world)
    measuring = import_module("shoal.launch.measure")
    kept = measuring.kept(world)
    return kept.cluster if kept is not None else measuring.measure(workers=world, quiet=False)


def checked(extras: Extras, file: str | None) -> Extras:
    """Before anything is planned: the plans' files are read. Raises ConfigError for what cannot be asked, whatever the
    plan."""
    if extras.price is not None and not (math.isfinite(extras.price) and extras.price > 0):
        raise ConfigError(f"--price {extras.price:g} is no price of a device-hour; give a number above 0")
    if extras.scale is not None:
        _worlds(extras.scale)
    if extras.scale_plot is not None:
        if extras.scale is None:
            raise ConfigError(f"--scale-plot {extras.scale_plot} without --scale; add for example --scale 8,64,512")
        picture.check(extras.scale_plot)
    if extras.timeline is not None and Path(extras.timeline).suffix.lower() not in timeline.ENDINGS:
        asked = f"--timeline {extras.timeline}"
        raise ConfigError(f"{asked}: end the name in .html or .svg for a picture, or in .json for a trace")
    for name, value in (("--scale", extras.scale), ("--compare", extras.compare)):
        if extras.mesh is not None and value is not None:
            raise ConfigError(f"--mesh {extras.mesh} with {name}, which has meshes of its own; leave one of them out")
    if extras.trials and file is None:
        raise ConfigError("--trials run the job, and a saved blueprint is none; give the job's FILE")
    for path, folders in (
        (extras.scale_plot, False), (extras.timeline, False), (extras.out, True), (extras.save_blueprint, True),
    ):  # fmt: skip
        if path is not None:
            check_writable(path, folders)
    return extras._replace(plans=extras.plans or tuple(Plan.read(path) for path in extras.compare or ()))


def shared(plans: Sequence[Plan], field: str, asked: Any) -> Any:
    """What was asked for, or else what all plans that are compared have."""
    values = {getattr(plan, field) for plan in plans}
    return values.pop() if asked is None and len(values) == 1 else asked


class Told(NamedTuple):
    """What else was asked: in lines, and in plain values."""

    lines: list[str]
    values: dict[str, Any]

    def add(self, name: str, lines: Sequence[str], values: Any) -> None:
        """One of the answers, after an empty line."""
        self.lines.extend(["", *lines])
        self.values[name] = values


def more(planned: Planned, extras: Extras, file: str | None, fields: Any) -> Told:
    """What else was asked. Raises ConfigError."""
    extras = checked(extras, file)
    told = Told([], {})
    if extras.price is not None and planned.best and not planned.work.traced:
        told.add(
            "price", ["What a run costs is not known: the model cannot be traced, so how long it takes is not."], None
        )
    elif extras.price is not None and planned.best:
        told.add("price", cost_lines(planned, extras.price), cost_values(planned, extras.price))
    if extras.compare is not None:
        found = [priced(planned, plan, path) for plan, path in zip(extras.plans, extras.compare, strict=True)]
        lines = compared(planned, extras.compare, extras.plans, found)
        told.add("compare", lines, [planned.found_json(each) for each in found])
    if extras.scale is not None:
        _scale(told, planned, _worlds(extras.scale), extras.scale_plot)
    if extras.timeline is not None and planned.best:
        _timeline(planned, Path(extras.timeline))
    if extras.trials and planned.best and file is not None:
        _trials(told, planned, extras.trials, file, fields)
    return told


def _timeline(planned: Planned, path: Path) -> None:
    """The best plan's step, drawn or as a trace. Raises ConfigError."""
    best = planned.best[0].candidate
    found = timeline.spans(planned.search.prices[best.mesh.tensor, best.sequence_parallel], best)
    write_text(path, timeline.text(found, layout(best), path.suffix.lower()))


def _scale(told: Told, planned: Planned, worlds: Sequence[int], plot: str | None) -> None:
    points = scaled(planned.sketch, planned.whole or planned.cluster, worlds, planned.question.global_batch)
    lines = scale.lines(points, planned.work, planned.cluster)
    if plot is not None and any(point.found for point in points):
        drawing = scale.picture(points, planned.work, planned.cluster)
        picture.save(drawing, plot, planned.work.name, "\n".join([*planned.lines()[:2], "", *lines]))
    values = [
        {
            "world": point.world,
            "why": point.why,
            "efficiency": scale.efficiency(points, point) if point.found and planned.work.traced else None,
        }
        | (planned.found_json(point.found) if point.found else {})
        for point in points
    ]
    told.add("scale", lines, values)


def _worlds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--scale {text!r}: give numbers of devices between commas, for example 8,64,512")
    return sorted({int(word) for word in words})


def _trials(told: Told, planned: Planned, most: int, file: str, fields: Any) -> None:
    trials, automatic = import_module("shoal.launch.trials"), import_module("shoal.launch.automatic")
    trials.check_hardware(planned.question.world)
    given = dict(text.split("=", 1) for text in fields) if isinstance(fields, Sequence) else fields

    def run(plan: Plan) -> Mapping[str, float]:
        return trials.run_plan(file, given, plan)

    done, ranked = tried(planned, most, run, automatic.TOGETHER)
    planned.best = tuple(found for found, _ in ranked)
    values = [
        {"plan": layout(each.found.candidate), "step_s": None if each.why else each.step_s, "why": each.why}
        for each in done
    ]
    told.add("trials", trial_lines(done, ranked), values)
