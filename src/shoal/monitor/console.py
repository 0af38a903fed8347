"""The console sink: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from shoal.monitor.summary import duration, start_text

PLAIN_EVERY_S = 1.0
LIVE_EVERY_S = 0.1
RECENT_STEPS = 50


class Console:
    """Shows step, loss, tokens or samples per second over all workers, time left, rank 0's memory.

    A terminal gets a line that is drawn anew; anything else gets at most one such line per second, the first
    and the last step included. Evaluations, skipped steps, notes and ends have lines of their own, always.
    """

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._console = rich.console.Console(file=file or sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._total: int | None = None
        self._recent: deque[tuple[float, int, int | None]] = deque(maxlen=RECENT_STEPS)
        self._shown_s: float | None = None
        self._first: tuple[float, int] | None = None
        self._waiting: dict[str, Any] | None = None

    def start(self, record: dict[str, Any]) -> None:
        """Say what begins, then begin the live line; ``record['steps']`` is where it ends."""
        for text in start_text(record):
            self._say(text)
        self._total = record.get("steps")
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            live.start()
            self._live = live

    def row(self, row: dict[str, Any]) -> None:
        """Show a row, if it is its turn."""
        if row["kind"] == "step":
            self._step(row)
            return
        text = line_of(row)
        if text is not None:
            self._say(text)

    def close(self) -> None:
        """Show the last step if it was not, and leave the line as it is."""
        if self._waiting is not None:
            self._show(self._waiting, self._clock())
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _step(self, row: dict[str, Any]) -> None:
        now = self._clock()
        if self._first is None:
            self._first = (now, row["step"])
        self._recent.append((row.get("step_s") or 0.0, row.get("samples") or 0, row.get("tokens")))
        every_s = PLAIN_EVERY_S if self._live is None else LIVE_EVERY_S
        if self._shown_s is None or row["step"] == self._total or now - self._shown_s >= every_s:
            self._show(row, now)
        else:
            self._waiting = row

    def _show(self, row: dict[str, Any], now: float) -> None:
        self._waiting, self._shown_s = None, now
        fields = self._fields(row, now)
        if self._live is None:
            self._say("  ".join(fields))
            return
        grid = Table.grid(padding=(0, 2))
        bar = [ProgressBar(total=self._total, completed=row["step"], width=20)] if self._total else []
        grid.add_row(fields[0], *bar, *fields[1:])
        self._live.update(grid, refresh=True)

    def _fields(self, row: dict[str, Any], now: float) -> list[str]:
        of = f"/{self._total:,}" if self._total else ""
        loss = row.get("loss")
        fields = [
            f"step {row['step']:,}{of}",
            f"loss {row.get('loss_text', '-') if loss is None else format(loss, '.4f')}",
        ]
        rate = self._rate()
        if rate is not None:
            fields.append(rate)
        left_s = self._left_s(row["step"], now)
        if left_s is not None:
            fields.append(f"{duration(left_s)} left")
        if row.get("memory_bytes"):
            fields.append(f"{row['memory_bytes'] / 1e9:.2f} GB")
        return fields

    def _rate(self) -> str | None:
        seconds = sum(step_s for step_s, _, _ in self._recent)
        if seconds <= 0:
            return None
        tokens = [tokens for _, _, tokens in self._recent if tokens is not None]
        if len(tokens) == len(self._recent):
            return _per_second(sum(tokens) / seconds, "tokens")
        return _per_second(sum(samples for _, samples, _ in self._recent) / seconds, "samples")

    def _left_s(self, step: int, now: float) -> float | None:
        if self._total is None or self._first is None or not self._first[1] < step < self._total:
            return None
        begun_s, first = self._first
        return (self._total - step) * (now - begun_s) / (step - first)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)
        self._console.file.flush()


def line_of(row: dict[str, Any]) -> str | None:
    """The line that a row of another kind than step gets, None where it gets none."""
    match row["kind"]:
        case "eval":
            values = [f"held-out loss {_value(row, 'loss')}"] if "loss" in row else []
            names = [name for name in row if name.startswith("metrics.") and not name.endswith("_text")]
            values += [f"{name.removeprefix('metrics.')} {_value(row, name)}" for name in names]
            return f"step {row['step']:,}: {', '.join(values)}"
        case "skip":
            return f"step {row['step']:,} skipped: {row.get('reason')}"
        case "note":
            return row.get("text")
        case "end":
            return None if row.get("reason") is None else f"ended after step {row.get('step')}: {row['reason']}"
        case _:
            return None


def _value(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if value is None:
        return row.get(f"{name}_text", "-")
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _per_second(rate: float, unit: str) -> str:
    return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2f} {unit}/s"
