"""What else is asked of a planned job: two plans beside each other, more and more devices, its cost, trial runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.blueprint.stored import Sketch
from shoal.cluster.facts import Cluster
from shoal.core.errors import ConfigError, WorkerFailure, nearest
from shoal.launch.answer import Planned, profiles_of, question_of
from shoal.plan import explain
from shoal.plan.candidate import Candidate, Cost, States
from shoal.plan.codec import Codec
from shoal.plan.fingerprint import Parameter, check_model, fingerprint
from shoal.plan.memory import peak
from shoal.plan.plan import Plan
from shoal.plan.scale import Point
from shoal.plan.search import Found, Search
from shoal.plan.space import Core


def priced(planned: Planned, plan: Plan, where: str) -> Found:
    """What a given plan costs on the planned cluster, whether it fits its memory or not. Raises ConfigError."""
    plan.fits(planned.cluster.world, where)
    if plan.precision != planned.question.precision:
        raise ConfigError(
            f"{where} computes in {plan.precision}, and this was planned in {planned.question.precision}; plan the job "
            f"with --precision {plan.precision}"
        )
    if plan.model:
        parameters = (p for p in planned.sketch.blueprint.parameters if not p.buffer)
        check_model(plan.model, fingerprint(Parameter(p.name, p.shape, p.dtype) for p in parameters), where)
    search, key = planned.search, (plan.mesh.tensor, plan.sequence_parallel)
    if key not in search.profiles:
        why = search.refused.get(plan.mesh.tensor, f"tensor={plan.mesh.tensor} was not looked at on this cluster")
        raise ConfigError(f"{where}: tensor={plan.mesh.tensor}: {why}; choose another degree")
    profile = search.profiles[key]
    made = candidate_of(plan, _starts(search, plan, where), planned.question.states)
    return Found(made, search.prices[key].price(made), peak(profile, made, planned.cluster.device))


def candidate_of(plan: Plan, starts: tuple[int, ...], states: States) -> Candidate:
    """A plan as it is priced. ``starts``: the first block of every stage."""
    return Candidate(
        mesh=plan.mesh, micro_batch=plan.micro_batch, accumulation=plan.accumulation,
        starts=starts, schedule=plan.schedule, chunks=plan.chunks, shard_level=plan.shard_level,
        recompute=plan.recompute, sequence_parallel=plan.sequence_parallel, cpu_offload=plan.cpu_offload,
        precision=plan.precision, states=states, bucket_bytes=plan.bucket_mb * 2**20,
        codec=Codec.parse(plan.compress) if plan.compress else None,
    )  # fmt: skip


def _starts(search: Search, plan: Plan, where: str) -> tuple[int, ...]:
    paths = [block.path for block in search.profiles[plan.mesh.tensor, plan.sequence_parallel].blocks]
    for cut in plan.cuts:
        if cut not in paths:
            raise ConfigError(
                f"{where}: cut before {cut!r}, where the model has no place to cut; {nearest(cut, paths)}"
            )
    if plan.cuts or plan.stages == 1:
        return (0, *(paths.index(cut) for cut in plan.cuts))
    data = plan.mesh.replicate * plan.mesh.shard
    core = Core(
        plan.mesh.pipeline, plan.mesh.tensor, plan.sequence_parallel, data, plan.micro_batch, plan.accumulation,
        plan.schedule, plan.chunks, plan.recompute,
    )  # fmt: skip
    if plan.stages > len(paths):
        raise ConfigError(
            f"{where}: {plan.stages} stages, and the model has {len(paths)} places to cut; use at most {len(paths)} "
            "stages (pipeline x chunks)"
        )
    return search.starts(core)


def compared(planned: Planned, files: Sequence[str], plans: Sequence[Plan], found: Sequence[Found]) -> list[str]:
    """Two plans beside each other: what each costs (``found``, as ``priced``), and where they differ; one of them where
    they do not."""
    first, second = files
    same = plans[0] == plans[1]
    files, found = (files[:1], found[:1]) if same else (files, found)
    told = explain.aligned(explain.table(found, planned.work, planned.cluster))
    for path, each in zip(files, found, strict=True):
        told += ["", path, explain.step_text(each.cost), explain.memory_text(each.memory, planned.cluster)]
        if each.memory.total_bytes > planned.search.usable_bytes:
            told.append(f"It does not fit: {explain.gib(planned.search.usable_bytes)} are usable.")
    if same:
        return [*told, "", f"{first} and {second} hold the same plan."]
    per_sample = [each.cost.step_s / plan.global_batch for each, plan in zip(found, plans, strict=True)]
    at = per_sample.index(min(per_sample))
    if plans[0].global_batch == plans[1].global_batch:
        why = f"{explain.lost(found[at], found[1 - at])}."
    else:
        quick, slow = (explain.speed_text(1 / per_sample[place], planned.work) for place in (at, 1 - at))
        why = f"{quick} samples/s, and {files[1 - at]} {slow}. Their steps are of other batches."
    return [*told, "", f"{files[at]} is faster; {why}", *plans[0].diff(plans[1])]


def scaled(sketch: Sketch, cluster: Cluster, worlds: Sequence[int], global_batch: int | None) -> list[Point]:
    """The best plan for every world, with the same global batch; why there is none where nothing fits, or the cluster
    cannot have so many devices."""
    points = []
    for world in worlds:
        try:
            sized = cluster.resized(world)
        except ConfigError as error:
            points.append(Point(world, None, str(error)))
            continue
        question = question_of(sketch, sized, global_batch)
        best = Search(profiles_of(sketch, sized), sized, question).run(1).best
        why = f"nothing fits {world:,} devices and divides a global batch of {question.global_batch:,}"
        points.append(Point(world, best[0] if best else None, "" if best else why))
    return points


def cost_values(planned: Planned, price_per_hour: float) -> dict[str, Any]:
    """What the best plan costs, in the unit that ``price_per_hour`` of a device is in; of an epoch None where the data
    does not tell its length."""
    best = planned.best[0]
    per_s = price_per_hour * planned.question.world / 3600
    rate = explain.rates(best.candidate, best.cost.step_s, planned.work)
    samples = planned.sketch.dataset_samples
    epoch_s = None if samples is None else samples / rate.samples_per_s
    return {
        "per_device_hour": price_per_hour,
        "per_billion_tokens": 1e9 / rate.tokens_per_s * per_s if planned.work.tokens > 1 else None,
        "per_million_samples": 1e6 / rate.samples_per_s * per_s,
        "epoch_samples": samples,
        "epoch_s": epoch_s,
        "per_epoch": epoch_s and epoch_s * per_s,
    }


def cost_lines(planned: Planned, price_per_hour: float) -> list[str]:
    """``cost_values`` in sentences."""
    values = cost_values(planned, price_per_hour)
    cost, unit = (
        (values["per_million_samples"], "million samples")
        if values["per_billion_tokens"] is None
        else (values["per_billion_tokens"], "billion tokens")
    )
    told = [f"At {price_per_hour:g} per device-hour: {_money(cost)} per {unit}"]
    if values["per_epoch"] is not None:
        hours = values["epoch_s"] / 3600
        samples = values["epoch_samples"]
        told.append(f"  {_money(values['per_epoch'])} per epoch of {samples:,} samples ({hours:.3g} hours)")
    return told


def _money(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"


class Trial(NamedTuple):
    """A plan that was run for a few steps: seconds by measured part and of the whole step, or ``why`` it did not."""

    found: Found
    parts: Mapping[str, float]
    step_s: float
    why: str = ""


def tried(
    planned: Planned, most: int, run: Callable[[Plan], Mapping[str, float]], together: Mapping[str, Sequence[str]]
) -> tuple[list[Trial], list[tuple[Found, float]]]:
    """Run ``most`` of the best plans in turn; after each, what was measured corrects the others' predictions.

    ``run``: measured seconds by part and ``step_s``; WorkerFailure: the plan does not run here, and is left out.
    ``together``: which predicted parts a measured one holds. Returns the trials and all other plans by the seconds that
    are believed now.
    """
    trials: list[Trial] = []

    def believed(found: Found) -> float:
        own = next((trial.step_s for trial in trials if trial.found is found), None)
        return own if own is not None else _corrected(found.cost, [t for t in trials if not t.why], together)

    while len(trials) < min(most, len(planned.best)):
        left = [found for found in planned.best if all(trial.found is not found for trial in trials)]
        nxt = min(left, key=believed)
        try:
            parts = run(planned.as_plan(nxt.candidate))
            trials.append(Trial(nxt, parts, parts["step_s"]))
        except WorkerFailure as error:
            trials.append(Trial(nxt, {}, math.inf, str(error)))
    ranked = sorted(((found, believed(found)) for found in planned.best), key=lambda pair: pair[1])
    return trials, [(found, step_s) for found, step_s in ranked if math.isfinite(step_s)]


def _corrected(cost: Cost, trials: Sequence[Trial], together: Mapping[str, Sequence[str]]) -> float:
    """A predicted step with each part times the mean ratio that trials measured for it."""
    total = 0.0
    for name, parts in together.items():
        value = sum(getattr(cost, part) for part in parts)
        ratios = [
            trial.parts[name] / own
            for trial in trials
            if (own := sum(getattr(trial.found.cost, part) for part in parts)) > 0 and trial.parts[name] > 0
        ]
        total += value * (math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0)
    others = [trial.step_s - sum(trial.parts[name] for name in together) for trial in trials]
    return total + max(0.0, sum(others) / len(others) if others else 0.0)


def trial_lines(trials: Sequence[Trial], ranked: Sequence[tuple[Found, float]]) -> list[str]:
    """What was run and how the plans rank now."""
    told = [
        f"did not run: {explain.layout(trial.found.candidate)}: {trial.why}"
        if trial.why
        else f"ran {explain.layout(trial.found.candidate)}: predicted {explain.seconds(trial.found.cost.step_s)}, "
        f"measured {explain.seconds(trial.step_s)}"
        for trial in trials
    ]
    ran = {id(trial.found) for trial in trials}
    order = [
        f"{explain.layout(found.candidate)} {explain.seconds(step)} ({'measured' if id(found) in ran else 'corrected'})"
        for found, step in ranked
    ]
    return [*told, "ranked anew: " + ("; ".join(order) or "none of them ran")]
