"""Which ranks are slower than the others, and for long: one pause, or one that all ranks take, makes no straggler."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from shoal.monitor.events import event_file

OWN_PARTS = ("data_wait_s", "forward_backward_s", "optimizer_s", "other_s")
"""A rank's own work: neither waiting for other ranks nor copying for checkpoints; evaluation is in no step."""
STEPS = 100
_ROW_BYTES = 1024  # more than a step row has
_SLOW = 1.5  # times the other ranks' median, in one step
_SHARE = 0.2  # of the steps
_LEAST_STEPS = 10
_TOTAL = 1.1  # times the other ranks' median, over all steps


class Straggler(NamedTuple):
    """A rank that was slow in ``slow_steps`` of ``steps``; times are seconds of own work in the mean step."""

    rank: int
    slow_steps: int
    steps: int
    own_s: float
    others_s: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} was slower than the others in {self.slow_steps} of the last {self.steps} steps: "
            f"{self.own_s * 1e3:.3g} ms of its own work per step, theirs {self.others_s * 1e3:.3g} ms; "
            "look at its data, its cores and what else runs there"
        )


def find_stragglers(own_s: Mapping[int, Sequence[float]]) -> list[Straggler]:
    """The ranks that were slow in a fifth of the steps and at least 10, and by a tenth over all of them.

    ``own_s``: by rank, the seconds of its own work in each of the same steps. A step is slow at 1.5 times the median
    of the other ranks. With two ranks that are slow in turns, neither is a straggler.
    """
    found = []
    for rank, mine in own_s.items():
        others = [times for other, times in own_s.items() if other != rank]
        if not others or not mine:
            continue
        usual = [median(step) for step in zip(*others, strict=True)]
        slow = sum(own > _SLOW * other for own, other in zip(mine, usual, strict=True))
        if slow >= max(_LEAST_STEPS, _SHARE * len(mine)) and sum(mine) > _TOTAL * sum(usual):
            found.append(Straggler(rank, slow, len(mine), sum(mine) / len(mine), sum(usual) / len(mine)))
    return found


def stragglers(out: Path, ranks: int) -> list[Straggler]:
    """The stragglers of the last 100 steps that the event files of all ranks have; none where a file is not here."""
    rows = [_last_steps(event_file(out, rank)) for rank in range(ranks)]
    common = sorted(set.intersection(*(set(steps) for steps in rows)))[-STEPS:] if rows else []
    own_s = {
        rank: [sum(steps[step].get(part) or 0.0 for part in OWN_PARTS) for step in common]
        for rank, steps in enumerate(rows)
    }
    return find_stragglers(own_s)


def _last_steps(path: Path) -> dict[int, dict[str, Any]]:
    """Step rows at the end of an event file, by step; an attempt's first step, which warms up, is left out."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 2 * STEPS * _ROW_BYTES))
        lines = file.read().split(b"\n")
    found: dict[int, dict[str, Any]] = {}
    warm = size > 2 * STEPS * _ROW_BYTES
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # torn, or cut by where reading began
        if row.get("kind") == "run":
            warm = False
        if row.get("kind") == "step":
            if warm:
                found[row["step"]] = row
            warm = True
    return found
