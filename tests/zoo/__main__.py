"""Runs the zoo and prints its table: ``python -m tests.zoo [--write docs/zoo.md] [FAMILY ...]``."""

from __future__ import annotations

import argparse
import datetime
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

from tests.zoo.cells import BOUND, LAYOUTS, NOT_DIVIDED, STEPS, Cell, cell
from tests.zoo.families import FAMILIES

COMMAND = "python -m tests.zoo --write docs/zoo.md"
INTRODUCTION = """# The zoo: families of models under layouts

Models as `transformers` and plain PyTorch give them, tiny, with random weights, dropout 0, in training mode. Each cell
is a run of {steps} AdamW steps in float64 on gloo, whose losses, gradient norms and final weights are held against one
process with the same micro-batches; the bound is {bound:.0e}. (An error is max|a - b| / max(max|a|, 1e-3 of the largest
such value over all tensors). Casts to float32 in the models' own code are lifted to float64 on both sides.)

Written by `{command}` on {date}, torch {torch}, transformers {transformers}.

A cell says what happened, the largest error, and the largest share of the weights that one rank holds. *split*: it
trained, and the layout divides what it says. *whole*: it trained and is right, but the tensor axis divides less than
half of the weights' bytes, so it is not called split; the share is told. *refused*: before the first step, with the
reason below. Mixtral runs with `experts_implementation="batched_mm"`; the Fourier operator keeps its complex weights as
pairs of real numbers.
"""


def text(found: Cell) -> str:
    """A cell in words."""
    if found.status == "split":
        return f"split, {found.error:.0e}, {found.held:.0%}"
    if found.status == "whole":
        return f"whole ({found.divided:.0%} divided), {found.error:.0e}, {found.held:.0%}"
    return found.status


def table(cells: dict[tuple[str, str], Cell]) -> str:
    """The cells and their numbers, in Markdown."""
    families = list(dict.fromkeys(family for family, _ in cells))
    lines = ["| family | " + " | ".join(f"`{layout}`" for layout in LAYOUTS) + " |", "|---" * (len(LAYOUTS) + 1) + "|"]
    for family in families:
        lines.append(f"| {family} | " + " | ".join(text(cells[family, layout]) for layout in LAYOUTS) + " |")
    statuses = [found.status for found in cells.values()]
    counts = {status: statuses.count(status) for status in ("split", "whole", "refused", "wrong", "failed")}
    summed = ", ".join(f"{count} {status}" for status, count in counts.items())
    lines += ["", f"{len(cells)} cells: {summed}; {counts['split'] / len(cells):.1%} are split."]
    return "\n".join(lines)


def reasons(cells: dict[tuple[str, str], Cell]) -> str:
    """What was not split, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for (family, layout), one in cells.items():
        if one.status == "refused":
            found.setdefault((family, one.told), []).append(f"`{layout}`")
    told = [f"- {family}, {', '.join(layouts)}: {reason}" for (family, reason), layouts in found.items()]
    why = [f"- {family}: {reason}" for family, (_, reason) in NOT_DIVIDED.items() if any(f == family for f, _ in cells)]
    return "\n".join(["## What the tensor axis does not divide", "", *why, "", "## Refusals", "", *(told or ["None."])])


def main() -> None:
    """Run the cells, print the table as they come, and write it where asked."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all, if none is named")
    parser.add_argument("--write", type=Path, help="a Markdown file")
    asked = parser.parse_args()
    cells: dict[tuple[str, str], Cell] = {}
    for family in asked.families or FAMILIES:
        with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
            for layout in LAYOUTS:
                found = cells[family, layout] = cell(family, layout, Path(folder))
                told = f": {found.told}" if found.status in ("wrong", "failed") else ""
                print(f"{family:18}{layout:24}{text(found)}{told}", flush=True)
    print(table(cells), reasons(cells), sep="\n\n")
    if asked.write:
        head = INTRODUCTION.format(
            steps=STEPS, bound=BOUND, command=COMMAND, date=datetime.date.today(), torch=version("torch"),
            transformers=version("transformers"),
        )  # fmt: skip
        asked.write.write_text("\n".join([head, table(cells), "", reasons(cells), ""]))


if __name__ == "__main__":
    main()
