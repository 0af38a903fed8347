"""A straggler is slow for long; a pause, or what all ranks wait for, is none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shoal.launch.watch import Slot, Watch, overdue
from shoal.monitor.events import EventLog, event_file
from shoal.monitor.stragglers import find_stragglers, stragglers
from shoal.monitor.summary import summary

pytestmark = pytest.mark.unit

STEP_S = 0.01


def write(out: Path, extra: dict[int, dict[int, dict[str, float]]], ranks: int = 2, steps: int = 101) -> None:
    """Event files of ``steps`` steps of 10 ms; ``extra[rank][step]``: seconds more, by part."""
    for rank in range(ranks):
        log = EventLog(out, rank)
        log.row("run", steps=steps)
        for step in range(1, steps + 1):
            parts = {"data_wait_s": 0.001, "forward_backward_s": 0.007, "sync_exposed_s": 0.001, "optimizer_s": 0.001,
                     "checkpoint_stall_s": 0.0, "other_s": 0.0}  # fmt: skip
            for part, seconds in extra.get(rank, {}).get(step, {}).items():
                parts[part] += seconds
            log.row("step", step=step, loss=1.0, step_s=sum(parts.values()), **parts)
        log.close()


def test_one_pause_and_an_evaluation_of_all_raise_no_alarm(tmp_path: Path) -> None:
    """A single hiccup (save, evaluation, garbage collection) was reported as a straggler or hang.

    https://github.com/traceopt-ai/traceml/issues/374
    """
    pause = {60: {"other_s": 1.0}}
    saves = {step: {"checkpoint_stall_s": 0.5} for step in range(2, 101, 3)}  # one rank's disk is slow
    on_all = {40: {"other_s": 2.0}}  # an evaluation inside a loop of one's own
    write(tmp_path, {0: {**on_all}, 1: {**on_all, **pause, **{s: saves[s] for s in saves if s not in (40, 60)}}})
    assert stragglers(tmp_path, 2) == []
    slots = [Slot(rank, 100, 40, 0, phase, 0.0, STEP_S) for rank, phase in ((0, "evaluate"), (1, "evaluate"))]
    assert overdue(slots, 2.0, 0.0, Watch()) is None
    assert overdue([Slot(0, 100, 60, 0, "sync_exposed", 0.0, STEP_S), slots[1]], 1.0, 0.0, Watch()) is None


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("part", ["forward_backward_s", "data_wait_s", "other_s"])
def test_thirty_slow_steps_of_a_hundred_raise_the_alarm(tmp_path: Path, part: str, ranks: int) -> None:
    """https://github.com/traceopt-ai/traceml/issues/374"""
    slow = random.Random(0).sample(range(2, 102), 30)
    waits = {step: {"sync_exposed_s": 0.01} for step in slow}
    extra = {rank: waits for rank in range(ranks) if rank != 1}  # the others wait for it, and are not slow
    write(tmp_path, {**extra, 1: {step: {part: 0.01} for step in slow}}, ranks)
    (found,) = stragglers(tmp_path, ranks)
    assert (found.rank, found.slow_steps, found.steps) == (1, 30, 100)
    assert found.own_s == pytest.approx(0.009 + 0.3 * 0.01) and found.others_s == pytest.approx(0.009)
    said = summary({"steps": 101, "stragglers": [str(found)]})
    assert "rank 1 was slower than the others in 30 of the last 100 steps: 12 ms of its own work per step" in said


def test_the_verdict_is_about_the_last_hundred_steps(tmp_path: Path) -> None:
    write(tmp_path, {1: {step: {"data_wait_s": 0.02} for step in range(1, 200)}}, steps=400)
    assert stragglers(tmp_path, 2) == []


def test_few_slow_steps_and_ranks_that_are_slow_in_turns_are_none() -> None:
    assert find_stragglers({0: [1.0] * 12, 1: [2.0] * 9 + [1.0] * 3}) == [], "fewer than ten"
    assert find_stragglers({0: [1.0] * 100, 1: [2.0] * 19 + [1.0] * 81}) == [], "less than a fifth"
    turns = [[1.0, 2.0] * 50, [2.0, 1.0] * 50]
    assert find_stragglers(dict(enumerate(turns))) == []
    assert find_stragglers({0: [1.0] * 100}) == [] and find_stragglers({}) == []


def test_the_first_step_of_an_attempt_and_missing_or_torn_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {1: {1: {"forward_backward_s": 5.0}}}, steps=12)
    assert stragglers(tmp_path, 2) == []
    assert stragglers(tmp_path, 3) == [], "no file of rank 2 here"
    with event_file(tmp_path, 1).open("a") as file:
        file.write('{"kind": "step", "step": 13')
    assert stragglers(tmp_path, 2) == []
