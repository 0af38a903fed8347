"""Why a plan is the best one, in sentences with numbers. Pure: values in, text out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.cluster.facts import Cluster
from shoal.plan.candidate import Candidate, Cost, Memory
from shoal.plan.search import USABLE, Found

#: What each part of a step's time is called.
PARTS = {
    "compute_s": "compute",
    "tensor_s": "tensor traffic",
    "context_s": "context traffic",
    "expert_s": "expert traffic",
    "pipeline_s": "sends between stages",
    "shard_s": "gathering and scattering shards",
    "replicate_s": "summing gradients over copies",
    "bubble_s": "waiting in the pipeline",
    "optimizer_s": "optimizer",
    "rest_s": "launches",
}
#: What each part of a device's memory is called.
HELD = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits and loss",
    "buffers": "buffers of collectives",
    "overhead": "what the device keeps for itself",
}
#: A step's model FLOPs over those of its forward: backward counts twice, recompute not at all.
PASSES = 3
#: Of what makes a plan slower, a part that is a smaller share is not spoken of.
TOLD = 0.1
#: Steps closer than this share are called equal: no model is better.
EQUAL = 0.02


class Work(NamedTuple):
    """What a step is for: ``model_flops`` of a whole sample's forward, ``tokens`` of a sample, parameters in all.
    ``traced``: else nothing is known of its arithmetic and activations, and a step takes and holds more than is said.
    """

    name: str
    parameters: int
    tokens: int
    model_flops: float
    peak_flops_per_s: float
    traced: bool = True


class Rates(NamedTuple):
    """Of all devices together. ``utilisation``: model FLOPs, attention in full, backward twice the forward, nothing
    counted for recompute, over the devices' matrix peak in the plan's precision."""

    samples_per_s: float
    tokens_per_s: float
    utilisation: float


def rates(candidate: Candidate, step_s: float, work: Work) -> Rates:
    """How fast a plan is."""
    samples = candidate.global_batch / step_s
    flops = PASSES * work.model_flops * samples
    return Rates(samples, samples * work.tokens, flops / (work.peak_flops_per_s * candidate.world))


def seconds(value: float) -> str:
    """``0.0123 -> '12.3 ms'``."""
    return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"


def gib(value: float, room: bool = False) -> str:
    """Bytes as GiB; ``room``: rounded up, so that they fit in as much as is said."""
    size = value / 2**30
    digits = 2 if size < 10 else 1 if size < 1000 else 0
    return f"{math.ceil(size * 10**digits) / 10**digits if room else size:,.{digits}f} GiB"


def count(value: float) -> str:
    """``70.6e9 -> '70.6 B'``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def layout(candidate: Candidate) -> str:
    """A plan in one line."""
    mesh = candidate.mesh
    words = [str(mesh), f"{candidate.accumulation} x {candidate.micro_batch}"]
    if mesh.pipeline > 1:
        words.append(f"{candidate.schedule}" + (f" x {candidate.chunks}" if candidate.chunks > 1 else ""))
    if mesh.shard > 1:
        words.append(f"shard level {candidate.shard_level}")
    if candidate.recompute != "none":
        words.append(f"recompute {candidate.recompute}")
    if candidate.sequence_parallel:
        words.append("sequence parallel")
    if candidate.cpu_offload:
        words.append("offload")
    if candidate.codec is not None:
        words.append(f"gradients as {candidate.codec}")
    return ", ".join(words)


def parts(values: Cost | Memory, names: Mapping[str, str], least: float = 0.005) -> list[tuple[str, float, float]]:
    """(name, value, share) of the parts that count, largest first."""
    found = {name: getattr(values, name) for name in names}
    total = sum(found.values()) or 1.0
    shown = sorted(found.items(), key=lambda pair: -pair[1])
    return [(names[name], value, value / total) for name, value in shown if value / total >= least]


def step_text(cost: Cost) -> str:
    """``step 6.06 s = compute 5.74 s (95 %) + ...``."""
    told = [f"{name} {seconds(value)} ({share:.0%})" for name, value, share in parts(cost, PARTS)]
    return f"step {seconds(cost.step_s)} = {' + '.join(told)}"


def memory_text(memory: Memory, cluster: Cluster) -> str:
    """``memory 61.2 of 80.0 GiB (at the loss): activations 40 %, ...``."""
    told = [f"{name} {share:.0%}" for name, _, share in parts(memory, HELD, 0.02)]
    return (
        f"memory {gib(memory.total_bytes)} of {gib(cluster.device.memory_bytes)} on the fullest device (most in its "
        f"{memory.moment}): {', '.join(told)}"
    )


def lost(best: Found, other: Found) -> str:
    """Why another plan is slower, part by part."""
    changes = {name: getattr(other.cost, name) - getattr(best.cost, name) for name in PARTS}
    least = TOLD * sum(change for change in changes.values() if change > 0)
    worse = sorted(((change, name) for name, change in changes.items() if change > least), reverse=True)[:2]
    better = sorted((change, name) for name, change in changes.items() if change < -least)[:2]
    text = " and ".join(f"{seconds(change)} more {PARTS[name]}" for change, name in worse)
    if better:
        text += ", though " + " and ".join(f"{seconds(-change)} less {PARTS[name]}" for change, name in better)
    return f"{layout(other.candidate)} is {slower(other.cost.step_s, best.cost.step_s)}" + (f": {text}" if text else "")


def slower(step_s: float, best_s: float) -> str:
    """``25% slower (1.25 s)``, or that no model tells the two apart."""
    share = step_s / best_s - 1
    return f"{'as good as equal' if share < EQUAL else f'{share:.0%} slower'} ({seconds(step_s)})"


#: What plans of a model that was not traced are ranked by, in place of what binds.
UNTRACED = (
    "Ranked by what is known without a trace: gradients and shards on the links, the optimizer, and the state's "
    "memory; a step takes, and holds, what the model computes and keeps on top."
)


def percent(share: float) -> str:
    """``0.482 -> '48%'``; near nothing and near all with a tenth: ``'99.6%'``."""
    return f"{share:.0%}" if 0.05 <= share <= 0.95 else f"{share:.1%}"


def binds(best: Found, free: Found | None, cluster: Cluster) -> str:
    """What keeps the best plan from being faster: memory, or else the part that is more than all others together; where
    none is, the largest. ``free``: the best one if memory did not bind."""
    step = best.cost.step_s
    if free is not None and free.cost.step_s < step * (1 - EQUAL):
        gain = step / free.cost.step_s - 1
        return (
            f"Memory binds: with room for {gib(free.memory.total_bytes)} per device instead of "
            f"{gib(cluster.device.memory_bytes * USABLE)}, {layout(free.candidate)} would be {gain:.0%} faster "
            f"({seconds(free.cost.step_s)})."
        )
    (name, value, share), *others = parts(best.cost, PARTS, 0.0)
    if share > 0.9995:
        return f"What binds is {name}: it is all of the step ({seconds(value)})."
    other = f"{others[0][0]} with {percent(others[0][2])}"
    if share > 0.5:
        return (
            f"What binds is {name}: {percent(share)} of the step ({seconds(value)}), all else together "
            f"{percent(1 - share)}; the largest other part is {other}."
        )
    most = f"{name} with {percent(share)} of the step ({seconds(value)})"
    return f"No part binds alone: the largest is {most}, then {other}."


class Tried(NamedTuple):
    """An obvious choice: the best plan of its kind that fits, or what its least would need, or why there is none."""

    name: str
    found: Found | None
    least: tuple[Candidate, Memory] | None
    why: str


def obvious(best: Found, tried: Tried, cluster: Cluster) -> str:
    """Why an obvious choice is not the plan."""
    if tried.found is not None:
        if tried.found.candidate.mesh == best.candidate.mesh:
            return f"{tried.name} is what was chosen."
        return f"{tried.name}: {lost(best, tried.found)}."
    if tried.least is not None:
        candidate, memory = tried.least
        name, value, _ = parts(memory, HELD)[0]
        return (
            f"{tried.name} does not fit: even {layout(candidate)} needs {gib(memory.total_bytes)} of "
            f"{gib(cluster.device.memory_bytes * USABLE)} usable per device, {gib(value)} of it {name}."
        )
    return f"{tried.name} is not possible: {tried.why}."


def elsewhere(best: Found, other: Found | None) -> str:
    """The best plan of a mesh that was asked for beside the best of all meshes."""
    if other is None or other.cost.step_s > best.cost.step_s * (1 - EQUAL):
        return "No other mesh is faster."
    return (
        f"The fastest of all meshes is {layout(other.candidate)} ({seconds(other.cost.step_s)}); {lost(other, best)}."
    )


def table(found: Sequence[Found], work: Work, cluster: Cluster) -> list[list[str]]:
    """A head and one row for each plan."""
    rows = [["", "plan", "memory", "step", "tokens/s" if work.tokens > 1 else "samples/s", "MFU"]]
    over = "" if work.traced else "over "
    for number, each in enumerate(found, 1):
        rate = rates(each.candidate, each.cost.step_s, work)
        speed = rate.tokens_per_s if work.tokens > 1 else rate.samples_per_s
        share = each.memory.total_bytes / cluster.device.memory_bytes
        rows.append([
            str(number), layout(each.candidate), f"{over}{gib(each.memory.total_bytes)} ({share:.0%})",
            f"{over}{seconds(each.cost.step_s)}", speed_text(speed, work),
            f"{rate.utilisation:.1%}" if work.model_flops else "unknown",
        ])  # fmt: skip
    return rows


def speed_text(speed: float, work: Work) -> str:
    """Samples or tokens in a second, where the step is known."""
    return "unknown" if not work.traced else f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with columns that stand under each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def cluster_text(cluster: Cluster) -> str:
    """What the hardware is, in a line."""
    device = cluster.device
    links = [
        f"{link.name or 'a link'} {link.bytes_per_s / 1e9:,.3g} GB/s {where}"
        for link, where, there in (
            (cluster.inside, "inside a node", cluster.devices_per_node > 1),
            (cluster.between, "between nodes", cluster.nodes > 1),
        )
        if link is not None and there
    ]
    nodes = f"{cluster.nodes} x {cluster.devices_per_node}" if cluster.nodes > 1 else str(cluster.devices_per_node)
    return f"{cluster.name}: {nodes} {device.name}, {gib(device.memory_bytes)} each" + "".join(f"; {x}" for x in links)
