"""When a run counts as standing still, and who is named."""

from __future__ import annotations

import pytest

from shoal.launch.watch import PHASES, Beats, Slot, Watch, behind, overdue, percentile

pytestmark = pytest.mark.unit
WATCH = Watch(least_s=10.0, pause_s=120.0)


def slot(rank: int, step: int = 5, phase: str = "forward_backward", time_s: float = 0.0, slow_s: float = 0.1):
    return Slot(rank, 100 + rank, step, 0, phase, time_s, slow_s)


def test_a_run_with_short_steps_may_stand_ten_seconds():
    slots = [slot(0), slot(1)]
    assert overdue(slots, 9.9, 0.0, WATCH) is None
    assert overdue(slots, 10.1, 0.0, WATCH) is not None


def test_the_deadline_follows_the_runs_own_steps():
    slots = [slot(0, slow_s=20.0), slot(1, slow_s=1.0)]
    assert overdue(slots, 99.0, 0.0, WATCH) is None
    found = overdue(slots, 101.0, 0.0, WATCH)
    assert found is not None and found.deadline_s == 100.0


@pytest.mark.parametrize("phase", ["evaluate", "save", "checkpoint_stall", "start"])
def test_ranks_wait_longer_for_one_in_a_known_pause(phase):
    slots = [slot(0, phase=phase), slot(1)]
    assert overdue(slots, 119.0, 0.0, WATCH) is None
    assert overdue(slots, 121.0, 0.0, WATCH) is not None


def test_the_first_step_gets_the_long_deadline():
    slots = [slot(0, step=0), slot(1, step=0)]
    assert overdue(slots, 119.0, 0.0, WATCH) is None


def test_a_run_that_never_beats_is_not_watched_and_ended_ranks_are_not():
    silent = Slot(0, 0, 0, 0, "none", 0.0, 0.0)
    assert overdue([silent], 1e6, 0.0, WATCH) is None
    assert overdue([slot(0, phase="end")], 1e6, 0.0, WATCH) is None


def test_beats_of_an_earlier_run_count_from_the_start():
    assert overdue([slot(0), slot(1)], 1000.0, 995.0, WATCH) is None


def test_those_behind_are_named_by_step_then_phase_then_state():
    assert behind([slot(0), slot(1, step=4), slot(2)]) == (1,)
    assert behind([slot(0), slot(1, phase="data_wait"), slot(2), slot(3, phase="data_wait")]) == (1, 3)
    assert behind([slot(0), slot(1)]) == ()
    assert behind([slot(0), slot(1)], {0: "S", 1: "T"}) == (1,)
    assert behind([slot(0), Slot(1, 0, 0, 0, "none", 0.0, 0.0)]) == (1,)


def test_a_beat_is_seen_through_the_file(tmp_path):
    watcher = Beats(tmp_path / "beats", 2)
    writer = Beats(tmp_path / "beats", 2, rank=1)
    writer.beat(7, "start")
    assert not watcher.slots()[1].progressed
    writer.beat(8, "optimizer")
    writer.beat(9, "a phase of tomorrow")
    first, second = watcher.slots()
    assert first.pid == 0
    assert (second.step, second.first_step, second.phase) == (9, 7, "other")
    assert second.progressed and 0 < second.slow_step_s < 1
    assert second.phase in PHASES


def test_percentile_of_a_hundred_values():
    assert percentile([float(v) for v in range(1, 101)], 0.99) == 100.0
    assert percentile([], 0.99) == 0.0
