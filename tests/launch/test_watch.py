"""When a run counts as standing still, and who is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from shoal.launch.watch import PHASES, Beats, Computing, Slot, Watch, behind, overdue, percentile
from shoal.launch.worker import awaits_others

pytestmark = pytest.mark.unit
READY = "import time; print('ready', flush=True)"
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


def test_before_its_first_step_a_run_stands_still_only_where_no_rank_computes():
    silent, first = Slot(1, 0, 0, 0, "none", 0.0, 0.0), slot(0, step=0)
    assert overdue([silent], 299.0, 0.0, WATCH, 0.0) is None
    assert overdue([silent], 1e6, 0.0, WATCH, 1e6 - 299) is None
    found = overdue([silent, silent], 1e6, 0.0, WATCH, 1e6 - 301)
    assert found is not None and (found.waited_s, found.deadline_s) == (301.0, 300.0)
    assert overdue([first, slot(1)], 500.0, 0.0, WATCH, 400.0) is None
    assert overdue([first, slot(1)], 500.0, 0.0, WATCH, 379.0) is not None
    assert overdue([first, silent], 500.0, 0.0, WATCH, 379.0) is None


def test_a_step_in_want_of_a_processor_is_left_alone_for_two_minutes():
    """A worker beside fifteen others was ended after 10 s, ready to run."""
    assert overdue([slot(0), slot(1)], 60.0, 0.0, WATCH, 60.0) is None
    assert overdue([slot(0), slot(1)], 60.0, 0.0, WATCH, 49.0) is not None
    found = overdue([slot(0), slot(1)], 121.0, 0.0, WATCH, 121.0)
    assert found is not None and found.waited_s == 121.0


def test_a_first_step_that_computes_ends_at_some_time():
    assert overdue([slot(0, step=0)], 1799.0, 0.0, WATCH, 1799.0) is None
    found = overdue([slot(0, step=0)], 1801.0, 0.0, WATCH, 1801.0)
    assert found is not None and found.waited_s == 1801.0


@pytest.mark.parametrize(
    ("code", "computes"),
    [
        (f"{READY}\nwhile True: pass", True),
        (f"{READY}; time.sleep(60)", False),
        (f"import subprocess, sys; subprocess.run([sys.executable, '-c', {READY!r} + '\\nwhile True: pass'])", True),
    ],
    ids=["computing", "asleep", "its child computing"],
)
def test_who_computes_is_seen_from_outside(code, computes):
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(0.2)
            seen, now_s = Computing(), time.monotonic()
            looks = []
            for at in range(1, 5):
                looks.append(seen.look([process.pid], now_s + at) == now_s + at)
                time.sleep(0.1)
            assert looks == [computes] * 4
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_who_waits_in_a_collective_is_told_from_the_stack_of_the_thread_that_was_asked():
    waiting = (
        'Current thread 0x7 (most recent call first):\n  File "/a/torch/distributed/c10d.py", line 1 in all_reduce'
    )
    busy = 'Current thread 0x7 (most recent call first):\n  File "/a/job.py", line 1 in data'
    other = 'Thread 0x8 (most recent call first):\n  File "/a/torch/distributed/c10d.py", line 1 in x\n'
    assert awaits_others(waiting) and not awaits_others(busy)
    assert not awaits_others(other + busy) and not awaits_others(f"{busy}\n\n{other}") and not awaits_others("")


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
