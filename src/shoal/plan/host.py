"""What a step costs besides on a host that also computes: nothing hides the engine's own work, and shards have no
streams to hide on.

Counts of kernel starts come from steps of three models over four links, each model and link held out in turn
(docs/planning.md, "This machine").
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cluster.facts import Cluster, Device
from shoal.plan.candidate import Candidate
from shoal.plan.collectives import Span, span
from shoal.plan.profile import Numbers
from shoal.plan.rates import stream_seconds
from shoal.plan.schedule import SPLIT

#: In starts of a kernel (device.launch_s): each tensor, context or expert collective; each gathering or scattering of a
#: shard; each action of a pipeline, and on top of that each backward of weights apart; each weight that is updated;
#: each step; and each step in which ranks meet before its end.
CALL, UNIT, ACTION, WEIGHTS, UPDATE, STEP, MEETING = 47, 34, 32, 481, 2, 754, 1996
#: Bytes of what ranks tell each other once a step: loss, count, norm, signals (engine/step.py).
FIGURES_BYTES = 2048


def computes(device: Device) -> bool:
    """Whether the host itself is the device."""
    return device.kernels == "cpu"


def action_starts(candidate: Candidate, stage: int, device: Device) -> tuple[int, int]:
    """Of a forward and of a backward of a stage in a pipeline; the first stage's backward is never taken apart."""
    if candidate.mesh.pipeline == 1 or not computes(device):
        return 0, 0
    return ACTION, ACTION + WEIGHTS * (candidate.schedule in SPLIT and stage > 0)


def once_s(candidate: Candidate, cluster: Cluster) -> float:
    """Seconds that a step costs its ranks once, besides waiting in it: the sum of a few figures over all ranks, after
    which the optimizer may begin, and the engine's own work."""
    if candidate.world == 1 or not computes(cluster.device):
        return 0.0
    meets = candidate.world > candidate.mesh.replicate
    starts = STEP + MEETING * meets
    return span(cluster, 1, candidate.world).seconds("all_reduce", FIGURES_BYTES) + starts * cluster.device.launch_s


def summed(where: Span, nbytes: float, candidate: Candidate, backward_s: float, slowdown: float) -> float:
    """Exposed seconds of summing ``nbytes`` of gradients in the engine's buckets, in turn, each from when the last
    backward has completed it; in a pipeline from its end on. The first bucket is small."""
    sizes, left = [], nbytes
    while left > 0:
        limit = candidate.bucket_bytes if sizes else min(candidate.first_bucket_bytes, candidate.bucket_bytes)
        sizes.append(min(left, limit))
        left -= sizes[-1]
    made = ended = hidden = 0.0
    for size in sizes:
        made += size
        ready = backward_s * (made / nbytes if candidate.mesh.pipeline == 1 else 1.0)
        start, ended = max(ready, ended), max(ready, ended) + where.seconds("all_reduce", size)
        hidden += max(0.0, min(ended, backward_s) - start)
    return max(0.0, ended - backward_s) + hidden * (slowdown - 1)


def in_turn(
    units: Sequence[Numbers], rest: Numbers, candidate: Candidate, shard: Span, copies: Span, device: Device
) -> tuple[float, float]:
    """Seconds of gathering and scattering shards, and of summing them over their copies, on the axes shard and
    replicate. ``units``: every block that is gathered by itself; ``rest``: what lies in none, gathered together; in a
    pipeline that rest is held whole and summed, and all is gathered and scattered once a step. Gradients are of what is
    trained alone."""
    states, staged = candidate.states, candidate.mesh.pipeline > 1
    anew = candidate.shard_level == 3 and not staged
    calls = [(numbers, 1 + anew) for numbers in units] + ([] if staged else [(rest, 1)])
    wire = beside = 0.0
    for numbers, gathers in calls:
        whole, sent = numbers.all * states.weight, numbers.trained * states.sent
        wire += gathers * (shard.seconds("all_gather", whole) + _copied(whole, device))
        if numbers.trained:
            wire += shard.seconds("reduce_scatter", sent) + _copied(numbers.trained * states.weight, device)
            beside += copies.seconds("all_reduce", sent / candidate.mesh.shard)
    times = candidate.accumulation if anew else 1
    if staged and rest.trained:
        wire += shard.seconds("all_reduce", rest.trained * states.sent)
        beside += copies.seconds("all_reduce", rest.trained * states.sent)
    return times * wire, times * beside


def _copied(nbytes: float, device: Device) -> float:
    """Seconds of what a gathering or scattering does besides sending."""
    return UNIT * device.launch_s + stream_seconds(device, 2 * nbytes)
