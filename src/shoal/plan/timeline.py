"""A step as spans on a timeline, written as a Chrome trace (also read by Perfetto) or as a picture."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.plan.candidate import Candidate
from shoal.plan.host import once_s
from shoal.plan.schedule import Action
from shoal.plan.simulate import Event
from shoal.plan.time import Prices
from shoal.plan.work import Work, straggling

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
ENDINGS = (".html", ".svg", ".json")
WIDTH, LANE, LEFT, TOP = 1200, 26, 70, 50


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


def text(found: Sequence[Span], title: str, ending: str) -> str:
    """What a file of that ending (of ``ENDINGS``) holds."""
    if ending == ".json":
        return to_trace(found)
    return to_html(found, title) if ending == ".html" else to_svg(found, title)


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
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<body>{to_svg(found, title)}</body></html>\n"
    )


def to_svg(found: Sequence[Span], title: str) -> str:
    """The picture: a lane for each pipeline coordinate, seconds to the right."""
    end = max((span.end_s for span in found), default=0.0)
    ranks = sorted({span.rank for span in found})
    scale = WIDTH / end if end else 0.0
    bottom = TOP + len(ranks) * LANE
    parts = [f'<text x="0" y="18" font-size="15">{html.escape(title)}</text>', *_legend(found)]
    parts += [f'<text x="0" y="{TOP + rank * LANE + 17}">rank {rank}</text>' for rank in ranks]
    parts += [_box(span, scale) for span in found]
    for part in range(0, 11, 2):
        at, told = LEFT + WIDTH * part / 10, f"{end * part / 10:.4g} s"
        parts.append(f'<text x="{at:.0f}" y="{bottom + 16}" text-anchor="middle">{told}</text>')
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40}" height="{bottom + 24}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>\n{inside}\n</svg>'
    )


def _legend(found: Sequence[Span]) -> Iterator[str]:
    at = 0
    for kind in (kind for kind in COLOURS if any(span.kind == kind for span in found)):
        yield f'<rect x="{at}" y="28" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield f'<text x="{at + 17}" y="38">{WORDS.get(kind, kind)}</text>'
        at += 130


def _box(span: Span, scale: float) -> str:
    width = (span.end_s - span.start_s) * scale
    parts = "".join(f"\n{name} {value:.4g} s" for name, value in span.parts.items() if value)
    text = html.escape(f"{span.name}: {span.start_s:.4g} to {span.end_s:.4g} s{parts}")
    return (
        f'<rect x="{LEFT + span.start_s * scale:.2f}" y="{TOP + span.rank * LANE + 2}" width="{max(width, 0.3):.2f}" '
        f'height="{LANE - 4}" fill="{COLOURS[span.kind]}" stroke="#fff" stroke-width="0.3"><title>{text}</title></rect>'
    )
