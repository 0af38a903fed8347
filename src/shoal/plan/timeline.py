"""A step as spans on a timeline, written as a Chrome trace (also read by Perfetto) or as one self-contained page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import NamedTuple

from shoal.plan.candidate import Candidate
from shoal.plan.host import once_s
from shoal.plan.schedule import Action
from shoal.plan.simulate import Event
from shoal.plan.time import Prices, Work, straggling

COLOURS = {
    "F": "#4c78a8",
    "B": "#f58518",
    "I": "#e45756",
    "W": "#72b7b2",
    "waiting": "#9d9da1",
    "gradients": "#b279a2",
    "optimizer": "#54a24b",
}
WORDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
WIDTH, LANE, LEFT = 1200, 26, 70


class Span(NamedTuple):
    """What pipeline coordinate ``rank`` does from ``start_s`` to ``end_s``; ``parts``: of it, in seconds."""

    rank: int
    kind: str
    name: str
    start_s: float
    end_s: float
    parts: dict[str, float]


def spans(prices: Prices, candidate: Candidate) -> list[Span]:
    """A step of the candidate: every action of the pipeline, the wait for the slowest device and for
    what all ranks tell each other, what of gradients and
    shards nothing hides, then the optimizer; the last one ends at the step's end."""
    cost, works = prices.price(candidate), prices.stages(candidate)
    found = [_action(event, works[event.action.stage]) for event in prices.played(candidate)]
    end = max(span.end_s for span in found)
    slowest = end * straggling(candidate.world) + once_s(candidate, prices.cluster)
    sync = cost.shard_s + cost.replicate_s
    for rank in range(candidate.mesh.pipeline):
        parts = {"shard": cost.shard_s, "replicate": cost.replicate_s}
        at = end + slowest
        found.append(Span(rank, "waiting", "waiting for the slowest device", end, at, {}))
        found.append(Span(rank, "gradients", "gradients and shards, exposed", at, at + sync, parts))
        found.append(Span(rank, "optimizer", "optimizer", at + sync, at + sync + cost.optimizer_s, {}))
    return [span for span in found if span.end_s > span.start_s]


def _action(event: Event, work: Work) -> Span:
    kind, length = event.action.kind, event.end - event.start
    side = work.forward if kind == "F" else work.backward
    share = length / side.total if side.total else 0.0
    parts = {name: value * share for name, value in side._asdict().items() if value}
    return Span(event.rank, kind, _name(event.action), event.start, event.end, parts)


def _name(action: Action) -> str:
    return f"{WORDS[action.kind]}, stage {action.stage}, micro-batch {action.micro}"


def to_trace(found: Sequence[Span]) -> str:
    """Chrome's trace event format (JSON), microseconds:
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    events = [
        {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"pipeline rank {rank}"}}
        for rank in sorted({span.rank for span in found})
    ]
    for span in found:
        times = {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
        head = {"ph": "X", "pid": 0, "tid": span.rank, "name": span.name, "cat": span.kind}
        events.append({**head, **times, "args": {f"{name}_s": value for name, value in span.parts.items()}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def to_html(found: Sequence[Span], title: str) -> str:
    """One page with the picture inside; hovering over a span names it."""
    end = max((span.end_s for span in found), default=0.0)
    ranks = sorted({span.rank for span in found})
    scale = WIDTH / end if end else 0.0
    boxes = "\n".join(_box(span, scale) for span in found)
    labels = "\n".join(f'<text x="0" y="{rank * LANE + 17}" font-size="12">rank {rank}</text>' for rank in ranks)
    ticks = "\n".join(
        f'<text x="{LEFT + WIDTH * part / 10:.0f}" y="{len(ranks) * LANE + 16}" font-size="11" text-anchor="middle">'
        f"{end * part / 10:.4g} s</text>"
        for part in range(0, 11, 2)
    )
    kinds = [kind for kind in COLOURS if any(span.kind == kind for span in found)]
    legend = " ".join(
        f'<span style="background:{COLOURS[kind]};color:#fff;padding:2px 8px">{WORDS.get(kind, kind)}</span>'
        for kind in kinds
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<body style="font-family:sans-serif"><h1 style="font-size:18px">{html.escape(title)}</h1>\n<p>{legend}</p>\n'
        f'<svg width="{LEFT + WIDTH + 40}" height="{len(ranks) * LANE + 24}">\n{labels}\n{boxes}\n{ticks}\n</svg>'
        "</body></html>\n"
    )


def _box(span: Span, scale: float) -> str:
    width = (span.end_s - span.start_s) * scale
    parts = "".join(f"\n{name} {value:.4g} s" for name, value in span.parts.items() if value)
    text = html.escape(f"{span.name}: {span.start_s:.4g} to {span.end_s:.4g} s{parts}")
    return (
        f'<rect x="{LEFT + span.start_s * scale:.2f}" y="{span.rank * LANE + 2}" width="{max(width, 0.3):.2f}" '
        f'height="{LANE - 4}" fill="{COLOURS[span.kind]}" stroke="#fff" stroke-width="0.3"><title>{text}</title></rect>'
    )
