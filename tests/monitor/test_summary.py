"""Totals over a run and the text at its end."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import pytest

from shoal.monitor.console import Console
from shoal.monitor.events import EventLog
from shoal.monitor.sinks import Sinks
from shoal.monitor.summary import RunTotals, duration, start_text, summary
from shoal.monitor.tensorboard import TensorBoard

pytestmark = pytest.mark.unit


def test_rates_leave_out_the_first_step() -> None:
    totals = RunTotals()
    assert (totals.samples_per_s, totals.tokens_per_s, totals.parts()) == (None, None, {})
    totals.add({"kind": "step", "step_s": 10.0, "samples": 8, "tokens": 80, "other_s": 10.0})
    assert totals.samples_per_s == 0.8
    for _ in range(4):
        totals.add({"kind": "step", "step_s": 0.5, "samples": 8, "tokens": 100, "data_wait_s": 0.5})
    totals.add({"kind": "eval", "step_s": 99.0, "samples": 99})
    totals.add({"kind": "skip", "step": 5})
    assert (totals.steps, totals.samples, totals.tokens, totals.skipped) == (5, 40, 480, 1)
    assert (totals.samples_per_s, totals.tokens_per_s) == (16.0, 200.0)
    assert totals.parts()["other_s"] == 2.0
    assert sum(totals.parts().values()) == pytest.approx(totals.seconds / totals.steps)


def test_data_without_tokens_has_no_token_rate() -> None:
    totals = RunTotals()
    totals.add({"kind": "step", "step_s": 1.0, "samples": 8, "tokens": None})
    assert (totals.tokens, totals.tokens_per_s) == (None, None)


def test_history_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """What records a step keeps nothing of it for good.

    https://github.com/flagos-ai/FlagScale/pull/1215
    """
    totals, log, console, board = RunTotals(), EventLog(tmp_path, 0), Console(io.StringIO()), TensorBoard()
    console._console.file = open("/dev/null", "w")  # noqa: SIM115 - what is printed is no history
    sinks = Sinks([console])
    sinks.start({"out": str(tmp_path), "step": 0, "steps": None})
    board.start({"out": str(tmp_path), "step": 0, "steps": None})
    row = log.row("step", step=1, loss=1.0, grad_norm=1.0, step_s=0.1, samples=8, tokens=80, data_wait_s=0.1)

    def record(first: int, last: int) -> None:
        for number in range(first, last):
            now = {**row, "step": number, "step_s": 0.1 + number * 1e-9}
            totals.add(now)
            sinks.row(now)
            if number % 100 == 0:
                log.row("step", **{name: value for name, value in now.items() if name not in ("kind", "time")})
                board.row(now)

    record(0, 1_000)
    tracemalloc.start()
    try:
        record(1_000, 26_000)
        before, _ = tracemalloc.get_traced_memory()
        record(26_000, 51_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        console._console.file.close()
        board.close()
        log.close()
    assert after - before < 25_000, "a byte a step"


def test_summary_is_text_for_a_person() -> None:
    result = {
        "steps": 1200,
        "loss": 2.34567,
        "eval": 2.25,
        "metrics": {"accuracy": 0.5, "none": None},
        "samples_per_s": 41.23,
        "tokens_per_s": 10_555.1,
        "out": "runs/gpt",
        "seconds": 75.2,
        "skipped": 2,
        "parts": {"forward_backward_s": 0.048, "optimizer_s": 0.002, "other_s": 0.0},
    }
    assert summary(result).splitlines() == [
        "1,200 steps in 1 min 15 s, 2 of them skipped (their loss or gradients were not finite)",
        "  loss 2.346, held-out loss 2.25, accuracy 0.5",
        "  10,555 tokens/s, 41.2 samples/s over all workers",
        "  mean step 50 ms: forward and backward 96%, optimizer 4%",
        "  in runs/gpt",
    ]


def test_a_resumed_run_says_how_many_steps_it_took_itself() -> None:
    assert summary({"steps": 256, "steps_here": 64, "seconds": 2.0}) == "256 steps, 64 of them now, in 2 s"
    assert (
        summary({"steps": 9, "steps_here": 0, "seconds": 2.0})
        == "9 steps, all of them done before: nothing was left to do"
    )
    assert summary({"steps": 9, "steps_here": 9, "seconds": 2.0}) == "9 steps in 2 s"


def test_summary_leaves_out_what_there_is_not() -> None:
    assert summary({"steps": 1, "loss": None, "metrics": None, "parts": {}, "skipped": 0}) == "1 step"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (3.0, "3 s"), (59.99, "60 s"), (75, "1 min 15 s"), (7300, "2 h 01 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_end_says_what_was_reached_of_the_peak() -> None:
    reached = {"steps": 1, "model_flops_per_s": 1.234e12, "utilisation": 0.41}
    assert "  1.23 TFLOP/s over all workers, 41% of their matrix peak (3 x a forward's model FLOPs)" in summary(reached)
    assert "  12 MFLOP/s over all workers (3 x" in summary({"model_flops_per_s": 1.2e7, "utilisation": None})
    assert "FLOP" not in summary({"steps": 1, "model_flops_per_s": None, "utilisation": None})


def test_the_end_says_in_which_codec_gradients_travelled() -> None:
    coded = {"codec": "topk:0.01", "sent_bytes": 166_720, "plain_bytes": 3_501_056}
    text = "  gradients as topk:0.01: a worker sends 0.167 MB a step, 3.5 MB without"
    assert text in summary({"steps": 1, "compress": coded}).splitlines()
    assert "gradients" not in summary({"steps": 1, "compress": None})


def test_the_start_says_the_batch_the_length_and_where_every_value_is_from() -> None:
    """https://github.com/modelscope/ms-swift/pull/9691 https://github.com/huggingface/accelerate/pull/1013"""
    record = {
        "batch": {"global_batch": 16, "micro_batch": 4, "ranks": 2, "accumulation": 2},
        "windows_per_epoch": 4, "steps": 12,
        "fields": {"a": {"x": 5, "y": "b "}, "lr": 0.1}, "settings": {"clip": None, "save_every": 3, "epochs": 3},
        "origins": {
            "fields": {"a.x": "given", "a.y": "job", "lr": "job"},
            "settings": {"clip": "default", "save_every": "given", "epochs": "job"},
        },
    }  # fmt: skip
    assert start_text(record) == [
        "global batch 16 = 2 worker(s) x 2 micro-batch(es) of 4; 4 steps per epoch; 12 steps in all",
        "given: a.x=5 --save-every=3",
        "from the job's file: a.y='b ' lr=0.1 --epochs=3",
        "by default: --clip=None",
    ]
    assert start_text({"out": "x", "steps": None}) == []


def test_the_start_says_what_a_plans_file_decided_with_its_values() -> None:
    """Settings that a file decides are None themselves: ``--mesh=None`` was said of a run on two replicas."""
    record = {
        "settings": {"mesh": None, "precision": None, "clip": 1.0},
        "plan": {"mesh": {"pipeline": 1, "replicate": 2, "shard": 1, "context": 1, "tensor": 2}, "precision": "bf16"},
        "origins": {"settings": {"mesh": "plan", "precision": "plan", "clip": "given"}},
    }
    assert start_text(record) == [
        "given: --clip=1.0",
        "decided by the plan's file: --mesh=replicate=2,tensor=2 --precision=bf16",
    ]
