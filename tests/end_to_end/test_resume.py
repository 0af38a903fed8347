"""A run that was interrupted, however it was, goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import (
    Result,
    assert_same_bits,
    children,
    finish,
    losses,
    processes_of,
    rows,
    shoal,
    start,
    until,
    write_job,
)

from shoal.checkpoint import verify_checkpoints

pytestmark = pytest.mark.ranks

#: Dropout, shuffled data, AdamW with a schedule, clipping, two micro-batches a step; 60 samples: 7.5 batches an epoch.
RUN = (
    "dropout=0.1", "--workers", 2, "--global-batch", 8, "--micro-batch", 2, "--clip", 0.5, "--steps", 30,
    "--save-every", 6, "--kernels", "default",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_job(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Result:
    """The run that nothing interrupts."""
    result = shoal("train", "tiny.py", *RUN, "--out", "whole", "--json", cwd=folder)
    assert result.status == 0, result.err
    return result


def test_a_finished_run_says_so(whole: Result, folder: Path) -> None:
    """The last line of stdout is one JSON object, and says what the events say."""
    summary = whole.summary
    assert {"steps", "loss", "eval", "samples_per_s", "tokens_per_s", "out"} <= summary.keys()
    assert summary["steps"] == 30 and summary["out"] == "whole"
    assert summary["eval"] is None and summary["tokens_per_s"] is None
    assert summary["loss"] == rows(folder / "whole")[-1]["loss"]
    assert summary["samples_per_s"] > 0


def test_the_parts_of_a_step_add_up_to_its_time(whole: Result, folder: Path) -> None:
    parts = ("data_wait_s", "forward_backward_s", "sync_exposed_s", "optimizer_s", "checkpoint_stall_s", "other_s")
    for rank in range(2):
        found = rows(folder / "whole", rank=rank)
        assert [row["step"] for row in found] == list(range(1, 31))
        for row in found:
            assert sum(row[part] for part in parts) == pytest.approx(row["step_s"], rel=0.01)
            assert row["memory_bytes"] > 0
    assert losses(folder / "whole") == [row["loss"] for row in rows(folder / "whole", rank=1)], "the loss is global"


def test_an_error_of_the_user_ends_the_run_and_resume_repeats_it_to_the_bit(whole: Result, folder: Path) -> None:
    """https://github.com/huggingface/transformers/issues/33336 and
    https://github.com/huggingface/transformers/issues/17157: moments, randomness, place in the data, schedule."""
    failed = shoal("train", "tiny.py", *RUN, "fault=raise", "at=31", "--out", "raised", cwd=folder)
    assert failed.status == 1
    assert failed.err.rstrip().endswith("ValueError: the user's own mistake"), "the first cause is what one sees last"
    assert "rank 1 of 2 failed" in failed.err and 'raise ValueError("the user' in failed.err
    assert failed.err.count("Traceback") == 1, "and it stands there once"
    assert processes_of("raised") == []
    resumed = shoal("train", "tiny.py", *RUN, "--resume", "--out", "raised", cwd=folder)
    assert resumed.status == 0, resumed.err
    assert re.search(r"after step (4|8|12)\b", resumed.out + resumed.err), "whichever save was written when it failed"
    assert_same_bits(folder / "whole", folder / "raised")


def test_a_killed_worker_is_restarted_and_the_run_ends_with_the_same_bits(whole: Result, folder: Path) -> None:
    words = (*RUN, "fault=kill", "at=40", "marker=killed.txt", "--out", "killed")
    result = shoal("train", "tiny.py", *words, "--restarts", 1, cwd=folder)
    assert result.status == 0, result.err
    assert "rank 1 of 2 was killed by signal 9 (SIGKILL)" in result.err and "restart 1 of 1" in result.err
    assert_same_bits(folder / "whole", folder / "killed")


def test_without_restarts_a_killed_worker_fails_the_run(folder: Path) -> None:
    """https://github.com/ai2cm/ace/pull/1407: exit codes tell success, failure, death by signal and a stop apart."""
    result = shoal("train", "tiny.py", *RUN, "fault=kill", "marker=dead.txt", "--out", "dead", cwd=folder)
    assert result.status == 128 + signal.SIGKILL
    assert "rank 1 of 2 was killed by signal 9 (SIGKILL)" in result.err.splitlines()[-1]
    assert processes_of("dead") == []


def test_sigterm_saves_and_ends_with_75_and_resume_goes_on(whole: Result, folder: Path) -> None:
    """https://github.com/ai2cm/ace/pull/1407: a stop that saved has an exit code of its own."""
    process = start("train", "tiny.py", *RUN, "slow=0.05", "--out", "stopped", "--json", cwd=folder)
    until(lambda: rows(folder / "stopped"), what="a first step")
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)
    assert stopped.status == 75, stopped.err
    steps = stopped.summary["steps"]
    assert 1 <= steps < 30 and stopped.summary["stopped"]
    assert f"stopped on request after step {steps} and saved; go on with --resume" in stopped.err
    assert (folder / "stopped" / "checkpoints" / f"step-{steps}").is_dir()
    resumed = shoal("train", "tiny.py", *RUN, "--resume", "--out", "stopped", cwd=folder)
    assert resumed.status == 0, resumed.err
    assert_same_bits(folder / "whole", folder / "stopped")


def test_a_killed_launcher_leaves_no_process_and_resume_goes_on(whole: Result, folder: Path) -> None:
    process = start("train", "tiny.py", *RUN, "slow=0.05", "--out", "launcher_killed", cwd=folder)
    until(lambda: len(rows(folder / "launcher_killed")) > 1, what="a second step")
    assert len(processes_of("launcher_killed")) >= 3, "the launcher and two workers"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not processes_of("launcher_killed"), timeout_s=3, what="the workers' end")
    resumed = shoal("train", "tiny.py", *RUN, "--resume", "--out", "launcher_killed", cwd=folder)
    assert resumed.status == 0, resumed.err
    assert_same_bits(folder / "whole", folder / "launcher_killed")


@pytest.mark.parametrize("victim", ["worker", "launcher"])
def test_processes_that_read_data_end_with_whom_they_read_for(folder: Path, victim: str) -> None:
    """Loader processes are the workers' own children, which nobody else would end."""
    out = f"readers_of_{victim}"
    process = start("train", "tiny.py", *RUN, "slow=0.05", "--loader-workers", 1, "--out", out, cwd=folder)
    until(lambda: len(rows(folder / out)) > 1, what="a second step")
    workers = children(process.pid)
    readers = [children(worker) for worker in workers]
    assert [len(found) for found in readers] == [1, 1]
    os.kill(workers[0] if victim == "worker" else process.pid, signal.SIGKILL)
    soon = readers[0] if victim == "worker" else sum(readers, [])
    until(lambda: not set(soon) & set(processes_of(out)), timeout_s=3, what="the readers' end")
    status = finish(process).status
    assert status == (128 + signal.SIGKILL if victim == "worker" else -signal.SIGKILL)
    until(lambda: not processes_of(out), timeout_s=3, what="the end of all processes")


def no_space(result: Result, step: int) -> re.Match[str]:
    """The run failed because a shard of ``step`` did not fit; bytes needed and free."""
    assert result.status == 1, result.err
    assert "Traceback" not in result.err
    said = re.search(
        rf"error: rank \d: cannot write rank \d's shard of step {step} in .*No space left on device; "
        r"it needs (\d+) bytes, (\d+) bytes are free; free space, keep fewer, or use another --out",
        result.err,
    )
    assert said, result.err
    return said


def test_a_full_disk_ends_the_run_with_the_numbers_and_keeps_the_last_checkpoint(whole: Result, folder: Path) -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/pull/2177 https://github.com/facebookresearch/mmf/issues/870
    https://github.com/bghira/SimpleTuner/pull/2989"""
    failed = shoal("train", "tiny.py", *RUN, "fault=full disk", "at=12", "--out", "full", cwd=folder)
    no_space(failed, 12)
    assert [path.name for path in (folder / "full" / "checkpoints").iterdir()] == ["step-6"]
    assert [found.problem for found in verify_checkpoints(folder / "full")] == [None]
    resumed = shoal("train", "tiny.py", *RUN, "--resume", "--out", "full", cwd=folder)
    assert resumed.status == 0, resumed.err
    assert_same_bits(folder / "whole", folder / "full")


def test_a_disk_that_fills_up_leaves_a_run_that_goes_on_once_there_is_space(folder: Path) -> None:
    """On a real file system of 2.5 MB, of which a checkpoint takes 1.4; see the test above.
    https://github.com/axolotl-ai-cloud/axolotl/pull/2177"""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        words = ("train", "tiny.py", *RUN, "width=20000", "--steps", 12, "--out", "disk/run")
        said = no_space(shoal(*words, cwd=folder), 12)
        assert int(said[1]) > 500_000 > int(said[2])
        assert [path.name for path in (disk / "run" / "checkpoints").iterdir()] == ["step-6"]
        assert [found.problem for found in verify_checkpoints(disk / "run")] == [None]
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        resumed = shoal(*words, "--resume", cwd=folder)
        assert resumed.status == 0, resumed.err
        assert [found.step for found in verify_checkpoints(disk / "run")] == [12, 6]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_sigterm_is_heard_during_a_long_evaluation(folder: Path) -> None:
    """https://github.com/goodfire-ai/spd/issues/677 and https://github.com/goodfire-ai/spd/issues/741."""
    process = start(
        "train", "tiny.py", "--workers", 2, "--global-batch", 8, "--steps", 9, "--eval-every", 3, "held_out=240",
        "slow_eval=0.2", "marker=evaluates.txt", "--out", "evaluation", cwd=folder,
    )  # fmt: skip
    until((folder / "evaluates.txt").exists, what="an evaluation")
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    stopped = finish(process)
    assert time.monotonic() - started < 5
    assert stopped.status == 75, stopped.err
    assert (folder / "evaluation" / "checkpoints" / "step-3").is_dir()
    assert rows(folder / "evaluation", "eval") == [], "half an evaluation is none"


@pytest.fixture(scope="module")
def at_four(folder: Path) -> Path:
    """A float64 run of 12 steps by 4 workers, with checkpoints after steps 6 and 12."""
    four = shoal("train", "tiny.py", *FP64, "--workers", 4, "--out", "four", cwd=folder)
    assert four.status == 0, four.err
    return folder / "four"


FP64 = ("--global-batch", 8, "--steps", 12, "--save-every", 6, "--precision", "fp64", "--clip", 0.5)


def test_saved_by_four_workers_it_goes_on_in_one_two_and_eight(at_four: Path, folder: Path) -> None:
    """Same losses within 1e-10. At one worker the newest checkpoint is torn, at two a bit of it is flipped: both
    are skipped by name."""
    for workers in (1, 2, 8):
        shutil.copytree(at_four, folder / f"by_{workers}")
        shutil.rmtree(folder / f"by_{workers}" / "launch")
    newest = "checkpoints/step-12/shard-00000-of-00004.safetensors"
    torn = folder / "by_1" / newest
    os.truncate(torn, torn.stat().st_size - 5)
    data = bytearray((folder / "by_2" / newest).read_bytes())
    data[-3] ^= 4
    (folder / "by_2" / newest).write_bytes(data)
    shutil.rmtree(folder / "by_8" / "checkpoints" / "step-12")

    def resume(workers: int) -> Result:
        words = (*FP64, "--workers", workers, "--resume", "--out", f"by_{workers}")
        return shoal("train", "tiny.py", *words, cwd=folder)

    with ThreadPoolExecutor(2) as pool:
        results = dict(zip((1, 2, 8), pool.map(resume, (1, 2, 8)), strict=True))
    expected = losses(at_four, first=7)
    assert len(expected) == 6
    for workers, result in results.items():
        assert result.status == 0, result.err
        said = result.out + result.err
        assert "after step 6" in said
        assert ("step-12 is skipped" in said.replace("\n", "")) == (workers != 8)
        assert losses(folder / f"by_{workers}", first=7) == pytest.approx(expected, rel=1e-10, abs=0)
