"""The TensorBoard sink, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shoal.monitor.tensorboard import TensorBoard, as_record

pytestmark = pytest.mark.unit


def attempt(out: Path, begin: int, end: int) -> None:
    sink = TensorBoard()
    sink.start({"out": str(out), "step": begin, "steps": 10, "job.width": 8})
    for number in range(begin + 1, end + 1):
        sink.row(
            {
                "kind": "step",
                "time": 1e9 + number,
                "step": number,
                "loss": 1 / number,
                "lr": 0.1,
                "tokens": None,
            }
        )
    sink.close()


def read(out: Path) -> Any:
    read = EventAccumulator(str(out / "tensorboard"))
    read.Reload()
    return read


def test_numbers_of_step_and_eval_rows_are_scalars(tmp_path: Path) -> None:
    sink = TensorBoard()
    sink.start({"out": str(tmp_path), "step": 0, "steps": 1, "job.width": 8})
    sink.row({"kind": "note", "time": 1.0, "text": "passed over"})
    sink.row({"kind": "step", "time": 2.5, "step": 1, "loss": None, "loss_text": "nan", "lr": 0.5, "tokens": None})
    sink.row({"kind": "eval", "time": 3.0, "step": 1, "loss": 2.0, "metrics.accuracy": 0.75})
    sink.close()
    board = read(tmp_path)
    assert sorted(board.Tags()["scalars"]) == ["eval/loss", "eval/metrics/accuracy", "step/loss", "step/lr"]
    (rate,) = board.Scalars("step/lr")
    assert (rate.step, rate.value, rate.wall_time) == (1, 0.5, 2.5)
    assert math.isnan(board.Scalars("step/loss")[0].value)
    assert board.Scalars("eval/metrics/accuracy")[0].value == 0.75
    assert b"| job.width | `8` |" in board.Tensors("run")[0].tensor_proto.string_val[0]


def test_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """A crash after step 7 and a resume from step 5 must not leave steps 6 and 7 twice.

    https://github.com/allenai/tango/issues/152 ,
    https://github.com/Shreeyak/pytorch-lightning-segmentation-template/issues/61
    """
    attempt(tmp_path, 0, 7)
    attempt(tmp_path, 5, 10)
    assert [scalar.step for scalar in read(tmp_path).Scalars("step/loss")] == list(range(1, 11))


def test_attempts_within_a_second_are_read_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.monitor.tensorboard.time.time", lambda: 1e9)
    for pid, (begin, end) in zip((900, 20, 1), ((0, 4), (2, 6), (5, 9)), strict=True):
        monkeypatch.setattr("shoal.monitor.tensorboard.os.getpid", lambda pid=pid: pid)
        attempt(tmp_path, begin, end)
    assert [scalar.step for scalar in read(tmp_path).Scalars("step/loss")] == list(range(1, 10))


def test_a_torn_file_of_a_killed_attempt_is_no_hindrance(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 7)
    (torn,) = (tmp_path / "tensorboard").iterdir()
    torn.write_bytes(torn.read_bytes()[:-9])
    attempt(tmp_path, 5, 10)
    assert [scalar.step for scalar in read(tmp_path).Scalars("step/loss")] == list(range(1, 11))


def test_record_is_that_of_tensorboards_own_writer(tmp_path: Path) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    for data in (b"", b"123456789", bytes(range(256)) * 3):
        with (tmp_path / "theirs").open("wb") as file:
            RecordWriter(file).write(data)
        assert (tmp_path / "theirs").read_bytes() == as_record(data)
