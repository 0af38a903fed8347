"""What sending adds to a step beside computing: in buckets, and hidden as far as it can be."""

from __future__ import annotations

from shoal.plan.collectives import Span


def bucketed(where: Span, collective: str, nbytes: float, bucket: float) -> float:
    """Seconds of reducing or gathering ``nbytes`` in equal calls of about ``bucket`` bytes each; of nothing, none."""
    if not nbytes:
        return 0.0
    calls = max(1, round(nbytes / bucket)) if bucket else 1
    return calls * where.seconds(collective, nbytes / calls)


def exposed(sending: float, computing: float, slowdown: float, tail: float = 0.0, overlaps: bool = True) -> float:
    """Seconds that a collective of ``sending`` seconds adds beside ``computing``: what is longer, the ``tail`` that
    only starts when all is computed, and what computing loses while both run (factor ``slowdown``)."""
    if not overlaps:
        return sending
    hidden = min(max(0.0, sending - tail), computing)
    return sending - hidden + hidden * (slowdown - 1)
