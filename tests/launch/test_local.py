"""Local workers from outside: exit codes, what is said last, stop, kill, restart, hang."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.warm import Command

pytestmark = pytest.mark.ranks
SCRIPT = Path(__file__).with_name("scripts.py")


def start(case: str, out: Path, workers: int = 2, restarts: int = 0, *more: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), case, str(out), str(workers), str(restarts), *map(str, more)]
    (out / "tmp").mkdir(parents=True)
    env = {**os.environ, "TMPDIR": str(out / "tmp")}
    return Command(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def finish(process: subprocess.Popen[str], out: Path) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=50)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert not alive(pids(stdout)), "workers are left"
    assert not list((out / "tmp").iterdir()), "temporary files are left"
    assert not (out / "launch" / "elastic").exists()
    return process.returncode, stdout, stderr


def run(case: str, out: Path, *more: object) -> tuple[int, str, str]:
    return finish(start(case, out, *more), out)


def pids(stdout: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid=(\d+)", stdout)]


def alive(found: list[int]) -> list[int]:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""

    return [pid for pid in found if state(pid) not in ("", "Z")]


def until(process: subprocess.Popen[str], word: str) -> str:
    """What the process printed up to the first line with ``word``."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if word in line:
            break
    return seen


def test_two_runs_at_once_meet_at_ports_of_their_own_with_the_usual_one_taken(tmp_path):
    """https://github.com/pytorch/pytorch/issues/126510"""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        outs = [tmp_path / "a", tmp_path / "b"]
        processes = [start("ok", out) for out in outs]
        ends = [finish(process, out) for process, out in zip(processes, outs, strict=True)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    ports = [set(re.findall(r"port=(\d+)", stdout)) for _, stdout, _ in ends]
    assert len(ports[0] | ports[1]) == 2
    assert all(stdout.count("sum=3") == 2 and not stderr for _, stdout, stderr in ends)


def test_a_busy_port_fails_the_whole_launch_at_once(tmp_path):
    """https://github.com/pytorch/pytorch/issues/129367"""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, stderr = run("ok", tmp_path, 4, 0, port)
    assert code != 0
    assert stderr.count("in use") == 1 and str(port) in stderr


def test_the_first_failing_rank_is_said_last_and_once(tmp_path):
    """https://github.com/pytorch/pytorch/issues/60910"""
    code, _, stderr = run("boom", tmp_path, 3)
    assert code == 1
    assert "rank 2 of 3 failed" in stderr and "scripts.py" in stderr
    assert stderr.rstrip().endswith("ValueError: boom") and stderr.count("ValueError: boom") == 1
    assert "onnection closed" not in stderr and "local.py" not in stderr


def test_an_error_of_ours_is_its_message_alone_and_is_not_tried_again(tmp_path):
    code, stdout, stderr = run("config", tmp_path, 2, 3)
    assert code == 1 and len(pids(stdout)) <= 2
    assert stderr.splitlines()[-1] == "error: asked for 3, found 2: change it"
    assert "Traceback" not in stderr


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    """https://github.com/sgl-project/sglang/pull/16484"""
    code, _, stderr = run("kill", tmp_path)
    assert code == 128 + 9
    assert "rank 1 of 2 was killed by signal 9 (SIGKILL) after step 2" in stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_ends_with_a_code_of_its_own_after_the_save(tmp_path, number):
    """https://github.com/ai2cm/ace/pull/1407"""
    process = start("long", tmp_path)
    until(process, "step")
    process.send_signal(number)
    code, stdout, stderr = finish(process, tmp_path)
    assert code == 75 and stdout.count("saved by") == 2
    assert stderr.count("stopping") == 1


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)]
)
def test_where_there_is_nothing_to_save_a_stop_request_ends_all_at_once(tmp_path, number, status):
    """Measuring and verifying said that they would save at the step's end, and went on to theirs."""
    process = start("unsaved", tmp_path)
    until(process, "step")
    process.send_signal(number)
    code, stdout, stderr = finish(process, tmp_path)
    assert code == status and "saved" not in stdout and "stopping" not in stderr


def test_a_request_that_comes_more_than_once_at_once_is_one(tmp_path):
    """`timeout make train` hands it on to the group and make hands it on again, also when the workers have just saved
    and the launcher is about to leave."""
    process = start("long", tmp_path)
    until(process, "step")
    until_s = time.monotonic() + 0.45
    while process.poll() is None and time.monotonic() < until_s:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    code, stdout, stderr = finish(process, tmp_path)
    assert code == 75 and stdout.count("saved by") == 2, stderr


def test_a_run_that_was_stopped_whole_goes_on(tmp_path):
    """A machine that sleeps, a frozen container: the time in which the launcher stood still counts for nobody."""
    process = start("long", tmp_path)
    everyone = [process.pid, *pids(until(process, "step"))]
    for number, wait_s in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 0.7), (signal.SIGTERM, 0.0)):
        for pid in everyone if number != signal.SIGTERM else everyone[:1]:
            os.kill(pid, number)
        time.sleep(wait_s)
    code, _, stderr = finish(process, tmp_path)
    assert code == 75, stderr


def test_workers_end_soon_after_their_launcher_was_killed(tmp_path):
    process = start("long", tmp_path)
    found = pids(until(process, "step"))
    assert len(found) == 2 and alive(found)
    process.kill()
    until_s = time.monotonic() + 2
    while alive(found) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not alive(found)
    process.communicate()
    assert not list((tmp_path / "tmp").iterdir()) and not (tmp_path / "launch" / "elastic").exists()


def test_what_was_left_by_a_launcher_killed_at_its_start_goes_with_the_next_run(tmp_path):
    (tmp_path / "launch" / "elastic" / "shoal_1").mkdir(parents=True)
    code, _, stderr = run("ok", tmp_path)
    assert code == 0, stderr


def test_a_failure_before_the_first_step_is_not_restarted(tmp_path):
    """https://github.com/pytorch/pytorch/issues/60910"""
    code, stdout, stderr = run("early", tmp_path, 2, 3)
    assert code == 1 and set(re.findall(r"restart=(\d)", stdout)) == {"0"}
    assert "not restarted" in stderr and stderr.rstrip().endswith("ImportError: no such module")


def test_all_workers_see_the_same_restart_count(tmp_path):
    """https://github.com/pytorch/pytorch/issues/108158"""
    code, stdout, stderr = run("twice", tmp_path, 2, 2)
    assert code == 0, stderr
    for rank in (0, 1):
        assert re.findall(rf"rank={rank} restart=(\d)", stdout) == ["0", "1", "2"]


def test_the_restart_limit_holds(tmp_path):
    """https://github.com/pytorch/pytorch/issues/147064"""
    code, stdout, stderr = run("twice", tmp_path, 2, 1)
    assert code == 1 and re.findall(r"rank=0 restart=(\d)", stdout) == ["0", "1"]
    assert "all 1 restarts are used" in stderr and stderr.rstrip().endswith("OSError: attempt 1")


def test_the_ranks_that_others_wait_for_are_named_with_every_stack(tmp_path):
    """https://github.com/pytorch/pytorch/issues/52876"""
    code, _, stderr = run("hang", tmp_path, 4)
    assert code == 1
    assert "error: ranks 1, 3 stopped moving" in stderr
    assert all(f"rank {rank}'s stack:" in stderr for rank in range(4))
    assert "in fault" in stderr and "all_reduce" in stderr


def test_workers_are_forks_of_a_process_without_other_threads(tmp_path):
    """A fork waits forever for what another thread held: a lock of a C library, half an initialisation."""
    code, stdout, _ = run("twice", tmp_path, 2, 2)
    assert code == 0
    assert re.findall(r"threads=\d+", stdout) == ["threads=1"] * 6


def test_a_rank_that_never_begins_is_named(tmp_path):
    code, _, stderr = run("unborn", tmp_path, 2)
    assert code == 1
    assert stderr.splitlines()[-1] == "error: rank 1 did not begin, and no rank computed in 2 s; start again"


def test_a_rank_that_stands_still_before_it_tells_of_itself_is_named_with_every_stack(tmp_path):
    code, _, stderr = run("unbegun", tmp_path, 3)
    assert code == 1
    assert "error: rank 1 stopped moving: no progress for 2 s (deadline 2 s, in which no rank computed)" in stderr
    assert stderr.count("has not begun") == 3 and all(f"rank {rank}'s stack:" in stderr for rank in range(3))
    assert "in begin" in stderr.partition("rank 1's stack:")[2].partition("rank 2's stack:")[0]


def test_a_start_that_takes_long_is_left_alone_as_long_as_a_rank_computes(tmp_path):
    code, stdout, stderr = run("slow", tmp_path, 2)
    assert code == 0 and stdout.count("sum=3") == 2, stderr


def test_a_frozen_process_is_named_and_does_not_hold_up_the_end(tmp_path):
    code, _, stderr = run("frozen", tmp_path, 2)
    assert code == 1
    assert "error: rank 1 stopped moving" in stderr and "stopped by a signal (state T)" in stderr
