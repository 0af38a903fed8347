"""How far a job scales: the best plan on more and more devices, where it stops paying, and on what the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.cluster.facts import Cluster
from shoal.cluster.picture import Panel, Series, drawn
from shoal.plan.explain import PARTS, Work, aligned, gib, layout, rates, seconds, speed_text
from shoal.plan.search import Found

#: A device does less than this share of what it does in the smallest world: scaling is said to break.
BREAKS = 0.8


class Point(NamedTuple):
    """The best plan on ``world`` devices; None, and why."""

    world: int
    found: Found | None
    why: str = ""


def efficiency(points: Sequence[Point], point: Point) -> float:
    """What a device does, over what it does in the smallest world that fits."""
    first = next(each for each in points if each.found is not None)
    assert first.found is not None and point.found is not None
    return (first.found.cost.step_s * first.world) / (point.found.cost.step_s * point.world)


def lines(points: Sequence[Point], work: Work, cluster: Cluster) -> list[str]:
    """The curve as a table, and where and why it breaks."""
    rows = [["devices", "tokens/s" if work.tokens > 1 else "samples/s", "efficiency", "step", "memory", "plan"]]
    for point in points:
        if point.found is None:
            rows.append([f"{point.world:,}", "-", "-", "-", "-", point.why])
            continue
        rate = rates(point.found.candidate, point.found.cost.step_s, work)
        speed = rate.tokens_per_s if work.tokens > 1 else rate.samples_per_s
        share = point.found.memory.total_bytes / cluster.device.memory_bytes
        rows.append([
            f"{point.world:,}", speed_text(speed, work),
            f"{efficiency(points, point):.0%}" if work.traced else "unknown", seconds(point.found.cost.step_s),
            f"{gib(point.found.memory.total_bytes)} ({share:.0%})", layout(point.found.candidate),
        ])  # fmt: skip
    if not work.traced:
        return [*aligned(rows), "How it scales is not known: the model cannot be traced, so what it computes is not."]
    return [*aligned(rows), *([breaks(points)] if any(point.found for point in points) else [])]


def breaks(points: Sequence[Point]) -> str:
    """Where a device's work falls off, and which part of the step took its place."""
    fitting = [point for point in points if point.found is not None]
    first = fitting[0]
    low = next((point for point in fitting if efficiency(points, point) < BREAKS), None)
    if low is None:
        end = fitting[-1]
        missing = [point for point in points if point.found is None and point.world > end.world]
        if missing:
            return f"Scaling ends at {end.world:,} devices: {missing[0].why}."
        return (
            f"Scaling holds to {end.world:,} devices: each does {efficiency(points, end):.0%} of what it does among "
            f"{first.world:,}."
        )
    assert low.found is not None and first.found is not None
    more = {
        name: getattr(low.found.cost, name) * low.world - getattr(first.found.cost, name) * first.world
        for name in PARTS
    }
    worst = max(more, key=lambda name: more[name])
    share = getattr(low.found.cost, worst) / low.found.cost.step_s
    name = PARTS[worst] if worst != "compute_s" else "compute (small micro-batches use less of a device)"
    return (
        f"Scaling breaks at {low.world:,} devices, where each does {efficiency(points, low):.0%} of what it does among "
        f"{first.world:,}: {name} grew most, to {seconds(getattr(low.found.cost, worst))} ({share:.0%}) of "
        f"a step of {seconds(low.found.cost.step_s)}."
    )


def picture(points: Sequence[Point], work: Work, cluster: Cluster) -> str:
    """Throughput against what the smallest world's devices would do, efficiency, and memory, as an SVG's text."""
    fitting = [point for point in points if point.found is not None]
    speeds, memory, parts = [], [], {name: [] for name in PARTS}
    for point in fitting:
        assert point.found is not None
        rate = rates(point.found.candidate, point.found.cost.step_s, work)
        speeds.append((point.world, rate.tokens_per_s if work.tokens > 1 else rate.samples_per_s))
        memory.append((point.world, point.found.memory.total_bytes))
        for name, found in parts.items():
            if (value := getattr(point.found.cost, name)) > 1e-3 * point.found.cost.step_s:
                found.append((point.world, value))
    ideal = [(world, speeds[0][1] * world / speeds[0][0]) for world, _ in speeds]
    capacity = [(world, cluster.device.memory_bytes) for world, _ in speeds]
    unit = "tok/s" if work.tokens > 1 else "1/s"
    return drawn([
        Panel("throughput", ("", unit), [Series("predicted", speeds, speeds), Series("in proportion", (), ideal)]),
        Panel("efficiency", ("", ""), [
            Series("of a device", shares := [(p.world, efficiency(points, p)) for p in fitting], shares)
        ]),
        Panel("memory of a device", ("", "B"), [Series("predicted", memory, memory), Series("capacity", (), capacity)]),
        Panel("parts of a step", ("", "s"), [Series(PARTS[n], found, found) for n, found in parts.items() if found]),
    ])  # fmt: skip
