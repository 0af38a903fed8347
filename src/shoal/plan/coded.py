"""Seconds of summing gradients in a codec, beside the backward that makes them."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.cluster.facts import Device
from shoal.plan.candidate import Candidate
from shoal.plan.codec import traffic
from shoal.plan.collectives import Span, bucketed, exposed
from shoal.plan.profile import Weight
from shoal.plan.rates import stream_seconds

#: Bytes that a codec reads and writes for each float32 number that it carries, besides what it sends: counted from
#: compress/. The search for the largest values counts as two readings of them.
STREAMED_BYTES = {"bf16": 20, "int8": 64, "topk": 44, "powersgd": 56}


def coded(weights: Iterable[Weight], candidate: Candidate, copies: Span, device: Device, backward_s: float) -> float:
    """Exposed seconds of summing the gradients of ``weights`` over their ``copies`` in the candidate's codec, and of
    the codec's own work, which nothing hides."""
    number_bytes, codec = candidate.states.gradient, candidate.codec
    trained = [weight.matrix for weight in {w.tie or w.name: w for w in weights if w.trains}.values()]
    told = traffic(codec, trained, copies.ranks, number_bytes)
    made = sum(of.numel for of in trained) * number_bytes
    worked = made - told.plain
    calls = max(1, round(worked / candidate.bucket_bytes))
    sending = sum(calls * copies.seconds(wire.collective, wire.bytes / calls) for wire in told.coded)
    sending += bucketed(copies, "all_reduce", told.plain, candidate.bucket_bytes)
    tail = sending * min(1.0, candidate.bucket_bytes / made) if made else 0.0
    own = stream_seconds(device, STREAMED_BYTES[codec.name] * worked / number_bytes) if codec and worked else 0.0
    return exposed(sending, backward_s, device.overlap_slowdown, tail, candidate.overlap_gradients) + own
