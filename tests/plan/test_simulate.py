"""Pipelines played from the very lists that run: bubbles and chunks in flight as the papers' formulas give them."""

import signal

import pytest

from shoal.core.errors import ConfigError
from shoal.plan import simulate
from shoal.plan.closed import chunks_in_flight
from shoal.plan.schedule import Action
from shoal.plan.simulate import StageTime, as_run, closed_form, play

pytestmark = pytest.mark.unit
F, B, W = 2.0, 5.0, 2.0
SPLIT = F + (B - W) - W  # forward, inputs' half, less the weights' half
#: (schedule, chunks per rank, bubble of P - 1 ranks at F = 2, I = 3, W = 2; at F = I = W = 2).
SCHEDULES = [
    ("gpipe", 1, F + B),
    ("1f1b", 1, F + B),
    ("looped-bfs", 2, F + B),
    ("interleaved-1f1b", 2, F + B),
    ("interleaved-1f1b", 3, F + B),
    ("interleaved-zero-bubble", 1, SPLIT),
    ("interleaved-zero-bubble", 2, SPLIT),
]


@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize(("schedule", "chunks", "bubble"), SCHEDULES)
def test_bubbles_are_those_of_the_formulas(schedule, chunks, bubble, pipeline):
    for micro in (2 * pipeline, 3 * pipeline):
        times = [StageTime(F, B, W)] * (pipeline * chunks)
        played = play(schedule, pipeline, chunks, micro, times)
        assert played.bubble == pytest.approx((pipeline - 1) * bubble)
        assert played.makespan == pytest.approx(micro * chunks * (F + B) + (pipeline - 1) * bubble)
        assert closed_form(schedule, pipeline, chunks, micro, times)[0] == pytest.approx(played.makespan)


@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_v_schedules_of_equal_thirds_wait_one_forward_per_further_rank(schedule, pipeline):
    times = [StageTime(2.0, 4.0, 2.0)] * (2 * pipeline)
    played = play(schedule, pipeline, 2, 3 * pipeline, times)
    assert played.bubble == pytest.approx((pipeline - 1) * 2.0)
    assert closed_form(schedule, pipeline, 2, 3 * pipeline, times)[0] == pytest.approx(played.makespan)


@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [*((name, chunks) for name, chunks, _ in SCHEDULES), ("zbv", 2), ("dualpipev", 2)]
)
def test_chunks_in_flight_are_those_of_the_formulas(schedule, chunks, pipeline):
    micro = 3 * pipeline
    played = play(schedule, pipeline, chunks, micro, [StageTime(F, B, W)] * (pipeline * chunks))
    by_formula = tuple(chunks_in_flight(schedule, pipeline, place, chunks, micro) for place in range(pipeline))
    assert played.chunks == by_formula


def test_sends_delay_each_micro_batch_of_1f1b_and_gpipe_only_at_its_ends():
    for pipeline, micro in ((2, 4), (4, 8), (4, 16), (8, 16)):
        times = [StageTime(F, B, W, 0.1)] * pipeline
        for schedule in ("1f1b", "gpipe"):
            makespan, sent = closed_form(schedule, pipeline, 1, micro, times)
            assert makespan == pytest.approx(play(schedule, pipeline, 1, micro, times).makespan)
            assert sent == pytest.approx(makespan - (micro + pipeline - 1) * (F + B))


def test_a_slow_stage_sets_the_pace_and_nothing_runs_before_what_it_needs():
    times = [StageTime(1, 2, 1, 0.25), StageTime(3, 6, 3, 0.25), StageTime(1, 2, 1, 0.25), StageTime(2, 4, 2)]
    played = play("1f1b", 4, 1, 12, times)
    assert played.makespan >= 12 * 9 + 1 + 2 + 0.25  # the slow stage's work, and a forward to it and a backward from it
    ends = {event.action: event.end for event in played.events}
    starts = {event.action: event.start for event in played.events}
    for action, start in starts.items():
        if action.kind == "F" and action.stage:
            assert start >= ends[Action(action.stage - 1, "F", action.micro)] + 0.25 - 1e-9
        if action.kind == "B" and action.stage < 3:
            assert start >= ends[Action(action.stage + 1, "B", action.micro)] + 0.25 - 1e-9
    for rank in range(4):
        mine = sorted((event.start, event.end) for event in played.events if event.rank == rank)
        assert all(second[0] >= first[1] - 1e-9 for first, second in zip(mine, mine[1:], strict=False))


def test_stage_times_must_be_one_for_each_stage():
    with pytest.raises(ConfigError, match="3 stage times for pipeline=2 x 2 chunks; give 4"):
        play("interleaved-1f1b", 2, 2, 4, [StageTime(1, 2)] * 3)


def test_lists_that_wait_for_each_other_are_refused(monkeypatch):
    stuck = [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    monkeypatch.setattr(simulate, "action_lists", lambda *_: stuck)
    with pytest.raises(ConfigError, match="waits for itself"):
        play("1f1b", 2, 1, 2, [StageTime(1, 2)] * 2)


def test_ranks_that_share_processors_are_faster_while_others_wait():
    """Two ranks on one processor: nothing is lost in the bubble, and what is sent is still waited for."""
    times = [StageTime(F, B, W)] * 2
    assert play("1f1b", 2, 1, 4, times, sharing=2.0).makespan == pytest.approx(4 * (F + B) * 2 / 2)
    alone = 2 * (F + B) / 1.5  # each rank works through one bubble of the other, at 1.5 instead of 2
    assert play("1f1b", 2, 1, 4, times, sharing=1.5).makespan == pytest.approx(4 * (F + B) + alone / 4)
    sent = play("gpipe", 2, 1, 1, [StageTime(F, B, W, 1.0)] * 2, sharing=2.0)
    assert sent.makespan == pytest.approx((F + B) + 2 * 1.0)


def test_a_rank_that_waits_for_others_leaves_its_processor_and_is_no_faster():
    """Half of each pass is waiting: two ranks together need as much of the processor as there is, so that each computes
    its other half twice as fast whether the other waits or not."""
    half = StageTime(2.0, 4.0, 2.0, forward_waits=1.0, backward_waits=2.0)
    assert play("gpipe", 2, 1, 1, [half] * 2, sharing=2.0).makespan == pytest.approx(2 * (1 + 0.5 + 2 + 1))
    together = play("1f1b", 2, 1, 8, [half] * 2, sharing=2.0).makespan
    assert together == pytest.approx(0.75 * play("1f1b", 2, 1, 8, [half] * 2).makespan)
    gone = StageTime(
        2.0, 4.0, 2.0, forward_waits=2.0, backward_waits=4.0
    )  # nothing is computed: as fast as on processors of their own
    alone = play("1f1b", 2, 1, 8, [gone] * 2).makespan
    assert play("1f1b", 2, 1, 8, [gone] * 2, sharing=2.0).makespan == pytest.approx(alone)


def test_the_first_stage_works_out_all_its_gradients_in_the_weights_half():
    """As torch runs it: its inputs' half is empty. Other schedules have no halves."""
    times = [StageTime(F, B, W)] * 2
    assert as_run("1f1b", times) == times
    assert as_run("zbv", times) == [StageTime(F, B, B), times[1]]
    events = play("interleaved-zero-bubble", 2, 1, 4, as_run("interleaved-zero-bubble", times)).events
    lasted = {(one.action.stage, one.action.kind): one.end - one.start for one in events}
    assert lasted[0, "I"] == 0 and lasted[0, "W"] == pytest.approx(B)
    assert lasted[1, "I"] == pytest.approx(B - W)


@pytest.mark.parametrize(("schedule", "chunks", "bubble"), SCHEDULES)
def test_sharing_next_to_nothing_plays_as_no_sharing(schedule, chunks, bubble):
    times = [StageTime(F + stage % 3, B, W, 0.25) for stage in range(4 * chunks)]
    alone, shared = (play(schedule, 4, chunks, 8, times, sharing) for sharing in (1.0, 1 + 1e-12))
    assert shared.makespan == pytest.approx(alone.makespan) and shared.chunks == alone.chunks
    assert shared.busy == pytest.approx(alone.busy)


@pytest.mark.parametrize("sharing", [1.0, 1 + 1e-12])
def test_what_one_rank_sends_another_goes_one_after_the_other(sharing):
    """Two micro-batches arrive at 11 and 21, their gradients at 33 and 43."""
    times = [StageTime(1.0, 1.0, 0.5, 10.0), StageTime(1.0, 1.0, 0.5)]
    assert play("gpipe", 2, 1, 2, times, sharing).makespan == pytest.approx(44.0)


def test_an_action_too_short_to_move_the_clock_ends():
    """Planning on shared processors never ended: what was left of an action was less than the clock's last digit."""

    def late(*_):
        raise AssertionError("no end in 20 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        long, short = StageTime(1e6, 2e6, 1e6), StageTime(1e-12, 2e-12, 1e-12)
        found = play("1f1b", 2, 1, 4, [long, short], sharing=2.0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert found.makespan == pytest.approx(4 * 3e6 / 2)
