"""The console: how often it speaks, and what it says."""

from __future__ import annotations

import io
from typing import Any

import pytest

from shoal.monitor.console import RECENT_STEPS, Console

pytestmark = pytest.mark.unit


class Screen(io.StringIO):
    """A terminal that keeps what is drawn."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(number: int, **values: Any) -> dict[str, Any]:
    row = {"kind": "step", "step": number, "loss": 2.5, "step_s": 0.1, "samples": 8, "tokens": None}
    return row | {"memory_bytes": 1_500_000_000} | values


def lines(rows: list[dict[str, Any]], every_s: float = 0.1, total: int | None = None) -> list[str]:
    file, clock = io.StringIO(), Clock()
    console = Console(file, clock)
    console.start({"out": "x", "step": 0, "steps": total})
    for row in rows:
        console.row(row)
        clock.now += every_s
    console.close()
    return file.getvalue().splitlines()


def test_plain_lines_come_at_most_once_a_second_with_first_and_last() -> None:
    shown = lines([step(k) for k in range(1, 36)], every_s=0.125, total=35)
    assert [line.split()[1] for line in shown] == ["1/35", "9/35", "17/35", "25/35", "33/35", "35/35"]


def test_the_last_step_is_shown_when_the_end_was_not_known() -> None:
    shown = lines([step(k) for k in range(1, 4)])
    assert [line.split("  ")[0] for line in shown] == ["step 1", "step 3"]


def test_a_line_says_step_loss_rate_time_left_and_memory() -> None:
    shown = lines([step(k) for k in range(1, 12)], every_s=0.125, total=41)
    assert shown[1] == "step 9/41  loss 2.5000  80 samples/s  4 s left  1.50 GB"


def test_tokens_are_counted_where_the_data_has_them() -> None:
    assert lines([step(1, tokens=1234, step_s=0.5)])[0] == "step 1  loss 2.5000  2,468 tokens/s  1.50 GB"


def test_rate_is_that_of_the_recent_steps() -> None:
    slow = [step(k, step_s=100.0) for k in range(1, 50)]
    fast = [step(k) for k in range(50, 50 + RECENT_STEPS)]
    assert "80 samples/s" in lines(slow + fast)[-1]


def test_a_loss_that_is_not_a_number_is_named() -> None:
    assert "loss nan" in lines([step(1, loss=None, loss_text="nan")])[0]


def test_other_rows_have_lines_of_their_own_at_once() -> None:
    rows = [
        step(1),
        step(2),
        {"kind": "eval", "step": 2, "loss": 2.25, "metrics.accuracy": 0.5},
        {"kind": "eval", "step": 2, "loss": None, "loss_text": "inf"},
        {"kind": "skip", "step": 3, "reason": "the gradient is not finite"},
        {"kind": "note", "text": "2 of 10 samples [dropped] each epoch"},
        {"kind": "checkpoint", "step": 2},
        {"kind": "end", "step": 3, "reason": "asked to stop"},
    ]
    assert lines(rows, every_s=0.0)[1:-1] == [
        "step 2: held-out loss 2.2500, accuracy 0.5000",
        "step 2: held-out loss inf",
        "step 3 skipped: the gradient is not finite",
        "2 of 10 samples [dropped] each epoch",
        "ended after step 3: asked to stop",
    ]


def test_a_terminal_gets_one_line_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    screen, clock = Screen(), Clock()
    console = Console(screen, clock)
    console.start({"out": "x", "step": 0, "steps": 20})
    for number in range(1, 21):
        console.row(step(number))
        clock.now += 0.05
    console.close()
    drawn = screen.getvalue()
    assert drawn.count("step 20/20") >= 1
    assert drawn.count("\n") == 1, "one line, ended once"
    assert "step 2/20" not in drawn, "not more often than the eye sees"
    assert "\x1b[?25h" in drawn, "the cursor is shown again"
