"""Event files: what a row becomes, what a crash and a resume leave behind."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.monitor.events import EventLog, cut_back, event_file, read_events

pytestmark = pytest.mark.unit


def write_steps(out: Path, first: int, last: int, rank: int = 0) -> None:
    log = EventLog(out, rank)
    for step in range(first, last + 1):
        log.row("step", step=step, loss=1.0 / step, grad_norm=1.0)
    log.close()


def steps(out: Path, rank: int = 0) -> list[int]:
    return [row["step"] for row in read_events(out, rank, "step")]


def test_rows_are_flat_json_objects_one_per_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 3)
    log.row("run", out=tmp_path, job={"width": 8, "optimizer": {"lr": 0.1}}, betas=(0.9, 0.95), clip=None)
    log.row("step", step=1, loss=0.1 + 0.2, grad_norm=2.0)
    lines = (tmp_path / "events" / "rank-00003.jsonl").read_text().splitlines()
    run, step = (json.loads(line) for line in lines)
    assert run["job.width"] == 8
    assert run["job.optimizer.lr"] == 0.1
    assert run["betas"] == [0.9, 0.95]
    assert run["clip"] is None
    assert run["out"] == str(tmp_path)
    assert step["loss"] == 0.1 + 0.2, "the loss is not rounded"
    assert not any(isinstance(value, dict) for value in run.values())


def test_rank_0_sorts_first_with_many_ranks(tmp_path: Path) -> None:
    names = sorted(event_file(tmp_path, rank).name for rank in (10, 0, 2, 12345))
    assert names == ["rank-00000.jsonl", "rank-00002.jsonl", "rank-00010.jsonl", "rank-12345.jsonl"]


def test_numbers_that_json_lacks_become_null_with_their_text(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    row = log.row("step", step=1, loss=float("nan"), grad_norm=float("-inf"), betas=[float("inf")])
    line = event_file(tmp_path, 0).read_text()

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    assert json.loads(line, parse_constant=refuse) == row
    assert (row["loss"], row["loss_text"]) == (None, "nan")
    assert (row["grad_norm"], row["grad_norm_text"]) == (None, "-inf")
    assert row["betas"] == ["inf"]


def test_zero_dimensional_arrays_are_written_as_numbers(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    row = EventLog(tmp_path, 0).row("eval", step=1, loss=np.float32(0.5), metrics={"right": np.int64(3)})
    assert (row["loss"], row["metrics.right"]) == (0.5, 3)


def test_each_row_is_on_disk_when_row_returns(tmp_path: Path) -> None:
    write = (
        "import os, sys; from pathlib import Path; from shoal.monitor.events import EventLog\n"
        "log = EventLog(Path(sys.argv[1]), 0)\n"
        "[log.row('step', step=k) for k in range(1, 8)]; os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", write, str(tmp_path)], timeout=60)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def test_resumed_run_has_each_step_once_on_every_rank(tmp_path: Path) -> None:
    """A crash after step 7 and a resume from step 5 must not leave steps 6 and 7 twice.

    https://github.com/allenai/tango/issues/152 ,
    https://github.com/Shreeyak/pytorch-lightning-segmentation-template/issues/61
    """
    for rank in (0, 1):
        write_steps(tmp_path, 1, 7, rank)
    EventLog(tmp_path, 0).row("eval", step=6, loss=1.0)
    EventLog(tmp_path, 0).row("note", text="before the crash")
    assert cut_back(tmp_path, 5) == 2 + 2 + 1
    for rank in (0, 1):
        write_steps(tmp_path, 6, 10, rank)
        assert steps(tmp_path, rank) == list(range(1, 11))
    assert [row["text"] for row in read_events(tmp_path, kind="note")] == ["before the crash"]
    assert not list(read_events(tmp_path, kind="eval"))
    assert sorted(path.name for path in (tmp_path / "events").iterdir()) == [
        "rank-00000.jsonl",
        "rank-00001.jsonl",
    ]


def test_cutting_back_drops_a_torn_last_line(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3)
    whole = event_file(tmp_path, 0).read_bytes()
    for torn in range(1, len(whole.splitlines()[-1]) + 1):
        event_file(tmp_path, 0).write_bytes(whole[:-torn])
        assert steps(tmp_path) == [1, 2], "a torn line is no row"
        assert cut_back(tmp_path, 3) == 1
        write_steps(tmp_path, 3, 3)
        assert steps(tmp_path) == [1, 2, 3]


def test_appending_after_a_torn_line_loses_no_row(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3)
    path = event_file(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-5])
    write_steps(tmp_path, 4, 5)
    assert steps(tmp_path) == [1, 2, 4, 5]


def test_cutting_back_nothing_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    assert cut_back(tmp_path, 0) == 0, "a run without events has nothing to cut"
    write_steps(tmp_path, 1, 3)
    before = event_file(tmp_path, 0).stat().st_ino
    assert cut_back(tmp_path, 3) == 0
    assert event_file(tmp_path, 0).stat().st_ino == before


def test_a_full_disk_loses_rows_but_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path, 0)
    log.row("step", step=1)
    write, left = os.write, [10]

    def full(file: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(file, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", full)
    log.row("step", step=2)
    log.row("step", step=3)
    monkeypatch.undo()
    assert log.lost == 2
    assert log.problem is not None and "2 event row(s) could not be written" in log.problem
    assert "No space left on device" in log.problem
    log.row("step", step=4)
    assert steps(tmp_path) == [1, 4]


def test_one_value_per_step_reaches_the_file(tmp_path: Path) -> None:
    """One row for a step, holding the window's mean, however many micro-batches it had.

    https://github.com/karpathy/nanochat/pull/52 , https://github.com/Lightning-AI/pytorch-lightning/issues/5306
    """
    log = EventLog(tmp_path, 0)
    sums, counts = [4.0 * 3, 1.0 * 3, 8.0 * 3, 2.0 * 3], [3, 3, 3, 3]
    log.row("step", step=1, loss=sum(sums) / sum(counts), grad_norm=1.0)
    assert [(row["step"], row["loss"]) for row in read_events(tmp_path, kind="step")] == [(1, 3.75)]


def test_events_import_no_torch() -> None:
    modules = "shoal.monitor, shoal.monitor.console, shoal.monitor.tensorboard"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
