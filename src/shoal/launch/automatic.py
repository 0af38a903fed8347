"""A layout for a run that names none: planned from this machine as measured, and held against the run at its end."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shoal.blueprint.stored import Sketch
from shoal.cluster import cached, machine
from shoal.core.errors import ConfigError
from shoal.engine.record import PLAN, RECORD, read_json, write_json
from shoal.engine.resolve import OF_PLAN
from shoal.engine.run import Run
from shoal.engine.settings import RunSettings
from shoal.job import Job
from shoal.launch import measure
from shoal.launch.answer import Planned, answer
from shoal.launch.sketch import sketch_apart
from shoal.monitor.events import read_events
from shoal.monitor.summary import PARTS as MEASURED
from shoal.plan.candidate import Candidate, Cost
from shoal.plan.explain import EQUAL, PASSES, gib, layout, seconds, slower
from shoal.plan.memory import peak
from shoal.plan.mesh import Mesh
from shoal.plan.plan import Plan
from shoal.plan.search import Found

#: A model whose state is a smaller share of a worker's memory fits under any layout: no machine is measured for it.
SMALL = 1e-3
#: Of a weight, its gradient and two moments in float32.
STATE_BYTES = 16
#: What another layout must gain over plain replicate to be taken: predictions err by more than a smaller gain.
GAIN = 1.2
#: Of a run's rows, the first, which pay for warming up, are not held against the prediction.
WARM_UP = 2
#: A ratio that was learned stands for at most as many runs, so that a machine that changes is followed.
MOST_RUNS = 5
#: A ratio beyond this says that a run was disturbed or a part was near nothing, not how fast the machine is.
LARGEST_RATIO = 2.0
#: Of a predicted step, a part that is a smaller share teaches nothing.
SMALLEST_SHARE = 0.02
#: Which parts of a predicted step a run measures together, by the name of its row.
TOGETHER = {
    "forward_backward_s": (
        "compute_s", "rest_s", "tensor_s", "context_s", "expert_s", "pipeline_s", "bubble_s", "shard_s"
    ),
    "sync_exposed_s": ("replicate_s",),
    "optimizer_s": ("optimizer_s",),
}  # fmt: skip


class Decision(NamedTuple):
    """The settings with a layout, which one and why in words, the predicted seconds by measured part, and what the
    model computes: FLOPs of a sample's forward, where it was traced."""

    settings: RunSettings
    taken: str = ""
    why: str = ""
    note: str = ""
    predicted: dict[str, float] | None = None
    memory_bytes: float = 0.0
    learned: str = ""
    model_flops: float | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """What is said of it; nothing where it was asked for."""
        said = {"layout": self.taken, "why": self.why, "note": self.note}
        return tuple(f"{name}: {text}" for name, text in said.items() if text)


def asked_for(settings: RunSettings) -> bool:
    """Whether the settings themselves say how ranks are laid out."""
    given = settings.model_fields_set & {"schedule", "chunks", "shard_level", "recompute", "cpu_offload"}
    return settings.mesh is not None or settings.plan is not None or bool(given)


def decide(job: Job, settings: RunSettings, workers: int, nodes: int | None = None) -> Decision:
    """A layout for ``workers`` ranks, where the settings name none.

    A resumed run keeps its own where it has as many workers as before. ``nodes``: machines of the world that they are
    in; None: they are ours to start here, so that a machine that was never measured can be, quickly. Raises ConfigError
    where nothing fits, with the nearest change that would.
    """
    if workers < 2 or asked_for(settings):
        return Decision(settings)
    own = _own(settings) if settings.resume else None
    if own is not None and own.mesh.size == workers:
        return _kept(own, settings)
    found = _anew(job, settings, workers, nodes)
    if own is None:
        return found
    return found._replace(why=f"the run had {own.mesh}, and there are {workers} workers now; {found.why}")


def _anew(job: Job, settings: RunSettings, workers: int, nodes: int | None) -> Decision:
    """A layout for a run that has none."""
    plain = f"replicate={workers}, plain data parallel"
    for given, flag in ((settings.compile, "--compile"), (settings.compress, "--compress")):
        if given:
            return Decision(settings, plain, f"{flag} goes with no other")
    known, alone = _measured(workers, nodes or 1), nodes is None
    least = 0 if known else int(SMALL * machine.memory_bytes() / workers / STATE_BYTES)
    found = sketch_apart(job, settings, least) if known or alone else "this world was never measured (shoal measure)"
    if isinstance(found, int):
        why = f"its {found:,} weights fit under any layout, and this machine was never measured (shoal measure)"
    elif isinstance(found, str):
        why = f"no plan could be made: {found}"
    else:
        return _planned(found, settings, known or measure.quickly(workers))
    return Decision(settings, plain, why)


def _measured(workers: int, nodes: int) -> cached.Kept | None:
    """What was measured of these workers; of one machine in a hurry, where not in full."""
    return measure.kept(workers, nodes) or (measure.kept_quickly(workers) if nodes == 1 else None)


def _own(settings: RunSettings) -> Plan | None:
    """The plan of the run in this folder; None where there is none."""
    record = Path(settings.out) / RECORD
    found = read_json(record).get("plan") if record.exists() else None
    return None if found is None else Plan.parse({**found, "mesh": Mesh(**found["mesh"])}, str(record))


def _kept(plan: Plan, settings: RunSettings) -> Decision:
    """A run's own plan, with what was given anew."""
    changes = {name: getattr(settings, name) for name in settings.model_fields_set & set(OF_PLAN)}
    if changes.get("micro_batch"):
        samples = changes["micro_batch"] * plan.mesh.replicate * plan.mesh.shard
        changes["accumulation"] = plan.global_batch // samples
    changes = {name: value for name, value in changes.items() if value is not None}
    plan = Plan.parse({**{name: getattr(plan, name) for name in Plan.model_fields}, **changes}, "the run's own plan")
    return Decision(_with(plan, settings), f"{plan.mesh}, as the run had it", "a resumed run keeps its own")


def _planned(found: Sketch, settings: RunSettings, known: cached.Kept) -> Decision:
    cluster, file = known.cluster, "" if known.unkept else str(known.path.with_suffix(".ratios.json"))
    ratios = read_ratios(Path(file))
    planned = answer(found, cluster, settings.global_batch, 8, settings.micro_batch)
    if not planned.best:
        told = "\n".join(planned.sentences())
        raise ConfigError(f"{told}\n--mesh replicate={cluster.world} runs it all the same")
    if not planned.work.traced:
        return _untraced(planned, settings)
    ranked = sorted(planned.best, key=lambda found: _corrected(found.cost, ratios))
    chosen, plain = ranked[0], _plain(planned)
    why = _why(planned, chosen, plain, ratios)
    if plain is not None and _corrected(plain.cost, ratios) < GAIN * _corrected(chosen.cost, ratios):
        whole = _uncut(planned, plain, settings.micro_batch) or chosen
        if _corrected(whole.cost, ratios) > (1 + EQUAL) * _corrected(plain.cost, ratios):
            cut = f"{layout(plain.candidate)}, {seconds(_corrected(plain.cost, ratios))}"
            why += f" (both cut finer: {cut}; which cut is fastest is not foretold well enough to cut what fits)"
        chosen = whole
    plan = planned.as_plan(chosen.candidate)
    parts = {name: value * ratios.get(name, 1.0) for name, value in _parts(chosen.cost).items()}
    step_s = sum(parts.values())
    taken = (
        f"{layout(chosen.candidate)}; predicted {seconds(step_s)} a step, {gib(chosen.memory.total_bytes)} of "
        f"{gib(cluster.device.memory_bytes)} a worker"
    )
    note = f"every run measures anew: {known.unkept}" if known.unkept else ""
    flops = planned.work.model_flops or None
    return Decision(_with(plan, settings), taken, why, note, parts, chosen.memory.total_bytes, file, flops)


def _untraced(planned: Planned, settings: RunSettings) -> Decision:
    """Plain data parallel where its state fits, else what holds least of it; of its step nothing is foretold, nor is
    anything learned of it."""
    chosen = _plain(planned) or min(planned.best, key=lambda found: found.memory.total_bytes)
    room = gib(planned.cluster.device.memory_bytes)
    plan = planned.as_plan(_whole(chosen, settings.micro_batch))
    taken = f"{plan.mesh}; its state alone needs {gib(chosen.memory.total_bytes)} of {room} a worker"
    return Decision(_with(plan, settings), taken, f"no step can be foretold: {'; '.join(planned.sketch.notes)}")


def _whole(found: Found, micro_batch: int | None) -> Candidate:
    """A plan at the micro-batch that was asked for, or without cutting the batch."""
    own = found.candidate
    samples = own.micro_batch * own.accumulation
    wanted = micro_batch or samples
    return own._replace(micro_batch=wanted, accumulation=samples // wanted)


def _why(planned: Planned, chosen: Found, plain: Found | None, ratios: Mapping[str, float]) -> str:
    best_s = _corrected(chosen.cost, ratios)
    if plain is None:
        return next(
            (s for s in planned.sentences() if s.startswith("Plain data parallel")), "it is the fastest that fits"
        )
    plain_s = _corrected(plain.cost, ratios)
    if chosen.candidate.mesh == plain.candidate.mesh:
        others = [found for found in planned.best if found.candidate.mesh != plain.candidate.mesh]
        if not others:
            return "no other layout divides this job"
        other = min(others, key=lambda found: _corrected(found.cost, ratios))
        return (
            f"the fastest mesh of {planned.asked:,} plans on this machine as measured; next {layout(other.candidate)}, "
            f"{slower(_corrected(other.cost, ratios), best_s)}"
        )
    if plain_s < (1 + EQUAL) * best_s:
        return f"plain data parallel is as good as equal to {layout(chosen.candidate)}, and kept"
    if plain_s < GAIN * best_s:
        return (
            f"{layout(chosen.candidate)} would gain {plain_s / best_s - 1:.0%}, less than predictions err; plain data "
            "parallel is kept"
        )
    return f"plain data parallel would take {seconds(plain_s)} a step ({plain_s / best_s - 1:.0%} more)"


def _plain(planned: Planned) -> Found | None:
    tried = next((each for each in planned.tried if each.name == "Plain data parallel"), None)
    return tried.found if tried else None


def _uncut(planned: Planned, plain: Found, micro_batch: int | None) -> Found | None:
    """Plain data parallel at the micro-batch that was asked for, or without cutting the batch where that fits: which
    one computes fastest is beyond what a quick measurement tells. None where the one asked for does not fit."""
    own, search = plain.candidate, planned.search
    made = _whole(plain, micro_batch)._replace(recompute="none")
    memory = peak(search.profiles[1, False], made, planned.cluster.device)
    if made.global_batch != own.global_batch or memory.total_bytes > search.usable_bytes:
        return None if micro_batch else plain
    return Found(made, search.prices[1, False].price(made), memory)


def _parts(cost: Cost) -> dict[str, float]:
    return {name: sum(getattr(cost, part) for part in parts) for name, parts in TOGETHER.items()}


def _corrected(cost: Cost, ratios: Mapping[str, float]) -> float:
    return sum(value * ratios.get(name, 1.0) for name, value in _parts(cost).items())


def _with(plan: Plan, settings: RunSettings) -> RunSettings:
    """The settings with the plan, written beside the run."""
    path = Path(settings.out) / PLAN
    plan.model_copy(update={"clip": settings.clip, "bucket_mb": settings.bucket_mb}).write(path)
    return settings.model_copy(update={"plan": str(path)})


# Prediction against measurement


def measured(out: Path) -> dict[str, float] | None:
    """Medians of a run's parts over its steps once warm; None where it took too few."""
    rows = list(read_events(out, 0, "step"))[WARM_UP:]
    if not rows:
        return None
    return {name: statistics.median(row[name] for row in rows) for name in (*MEASURED, "step_s")}


def account(decision: Decision | None, out: Path) -> dict[str, dict[str, float]] | None:
    """The prediction beside what was measured, seconds by part; what is learned is kept for the next plan. None where
    nothing was predicted, or the run took too few steps."""
    if decision is None or decision.predicted is None:
        return None
    found = measured(out)
    if found is None:
        return None
    if decision.learned:
        with contextlib.suppress(OSError):  # a closed or full disk: the run itself has ended well
            learn(Path(decision.learned), decision.predicted, found)
    others = max(0.0, found["step_s"] - sum(found[name] for name in decision.predicted))
    predicted = {**decision.predicted, "other_s": 0.0, "step_s": sum(decision.predicted.values())}
    return {
        "predicted": predicted,
        "measured": {
            **{name: found[name] for name in decision.predicted},
            "other_s": others,
            "step_s": found["step_s"],
        },
    }


def utilisation(
    decision: Decision | None, run: Run, samples_per_s: float | None, nodes: int = 1
) -> dict[str, float | None]:
    """FLOP/s of all workers together, and their share of the workers' measured matrix peak, as ``shoal plan`` counts.

    None where not known: the FLOPs of a model that nothing had traced, the peak of a machine that was never measured.
    """
    flops = (decision.model_flops if decision else None) or run.model_flops
    rate = PASSES * flops * samples_per_s if flops and samples_per_s else None
    peak = _peak_flops_per_s(run, nodes) if rate else None
    return {"model_flops_per_s": rate, "utilisation": rate / (peak * run.ranks) if rate and peak else None}


def _peak_flops_per_s(run: Run, nodes: int) -> float | None:
    """A worker's, in the run's precision."""
    try:
        known = _measured(run.ranks, nodes)
    except ConfigError as error:  # damaged; the run itself has ended well
        run.record.note(f"utilisation is not known: {error}")
        return None
    return known.cluster.device.flops_per_s.get(run.layout.plan.precision) if known else None


def read_ratios(path: Path) -> dict[str, float]:
    """What earlier runs measured over what was predicted for them, by part."""
    return _learned(path)[1]


def _learned(path: Path) -> tuple[int, dict[str, float]]:
    """How many runs were learned from, and the ratios; a file that holds anything else taught nothing."""
    try:
        values = json.loads(path.read_text())
        runs = int(values["runs"])
        found = {name: float(values["ratios"][name]) for name in TOGETHER if name in values["ratios"]}
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return 0, {}
    if runs < 1 or not all(math.isfinite(ratio) for ratio in found.values()):
        return 0, {}
    return runs, {name: _bounded(ratio) for name, ratio in found.items()}


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / LARGEST_RATIO), LARGEST_RATIO)


def learn(path: Path, predicted: Mapping[str, float], found: Mapping[str, float]) -> None:
    """Keep by how much a run's parts were off: the geometric mean over the last runs."""
    before, ratios = _learned(path)
    runs = min(MOST_RUNS, before + 1)
    for name, value in predicted.items():
        if value > SMALLEST_SHARE * sum(predicted.values()) and found[name] > 0:
            now = _bounded(ratios.get(name, 1.0) * found[name] / value)
            ratios[name] = math.exp(math.log(ratios.get(name, 1.0)) * (1 - 1 / runs) + math.log(now) / runs)
    write_json(path, {"runs": runs, "ratios": ratios})
