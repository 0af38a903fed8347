"""What a verification found, for people and for programs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

Status = Literal["equal", "different", "refused", "error"]
HALF = 0.5  # an axis that divides less of the weight bytes is not called split
STYLES = {"equal": "green", "different": "bold red", "refused": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class LayoutResult:
    """One layout against one device. Errors are None where nothing was compared; ``split``: see ``docs/verify.md``."""

    mesh: str
    status: Status
    max_rel_loss: float | None = None
    max_rel_grad: float | None = None
    max_rel_weight: float | None = None
    first_difference: str | None = None
    reason: str | None = None
    split: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values; an infinite error (a missing tensor, NaN on one side) is the largest float64."""
        return {name: _finite(getattr(self, name)) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Report:
    """All layouts, and what was done to make them comparable."""

    layouts: list[LayoutResult]
    notes: list[str]

    @property
    def ok(self) -> bool:
        """Whether nothing is different or broken."""
        return not any(layout.status in ("different", "error") for layout in self.layouts)

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {"layouts": [layout.as_json() for layout in self.layouts]}

    @property
    def verdict(self) -> str:
        """One sentence."""
        counts = {status: sum(one.status == status for one in self.layouts) for status in STYLES}
        bad = counts["different"] + counts["error"]
        refused = f"; {counts['refused']} refused" if counts["refused"] else ""
        if bad:
            return f"NOT THE SAME: {bad} of {len(self.layouts)} layouts differ from one device or failed{refused}"
        if not counts["equal"]:
            return f"nothing was compared: {counts['refused']} of {len(self.layouts)} layouts were refused"
        some = "the layout computes" if counts["equal"] == 1 else f"{counts['equal']} layouts compute"
        return f"the same: {some} what one device computes{refused}"

    def print(self, console: Console | None = None) -> None:
        """A table, what is to be said of single layouts, and the verdict."""
        table = Table(box=None, pad_edge=False)
        for title in ("layout", "status", "loss", "gradients", "weights", "divided"):
            table.add_column(
                title, justify="left" if title in ("layout", "status", "divided") else "right", no_wrap=True
            )
        for one in self.layouts:
            errors = (_figure(error) for error in (one.max_rel_loss, one.max_rel_grad, one.max_rel_weight))
            table.add_row(one.mesh, Text(one.status, STYLES[one.status]), *errors, _divided(one.split))
        said = [Text(f"note: {note}") for note in self.notes]
        said += [Text(f"{one.mesh}: {_said(one)}") for one in self.layouts if one.reason]
        console = console or Console()
        if not console.is_terminal:
            console.width = 160
        console.print(Group(table, *said, Text(self.verdict, "bold")), soft_wrap=True)


def _said(one: LayoutResult) -> str:
    return f"{one.first_difference}: {one.reason}" if one.first_difference else one.reason or ""


def _figure(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _divided(split: dict[str, float]) -> str:
    return ", ".join(f"{axis} {share:.0%}{'' if share >= HALF else ' (not split)'}" for axis, share in split.items())


def _finite(value: Any) -> Any:
    return 1.7976931348623157e308 if isinstance(value, float) and not math.isfinite(value) else value
