"""What the launcher refuses before it starts anything, and what a worker must give back."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest
import torch

from shoal.core.errors import ConfigError, LaunchError
from shoal.engine.resolve import resolve
from shoal.engine.settings import RunSettings
from shoal.launch import local, worker
from shoal.launch.watch import Overdue, Slot, describe
from shoal.launch.world import World

pytestmark = pytest.mark.unit


def refused(out, **asked):
    """Ask for workers whose entry must never run."""

    def entry(world: World) -> int:
        raise AssertionError("started")

    local.run_workers(entry, asked.pop("workers", 1), out, **asked)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"workers": 0}, "asked for 0 workers: give at least 1"),
        ({"device": "tpu"}, "asked for workers on 'tpu': use cpu or cuda"),
        ({"workers": 3, "device": "cuda"}, r"asked for 3 workers, found 2 GPU\(s\): give at most 2"),
    ],
)
def test_what_cannot_be_started_is_refused_with_what_to_change(tmp_path, monkeypatch, asked, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=said):
        refused(tmp_path, **asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mesh", ["shard=2", "tensor=2", "pipeline=2", "replicate=2,shard=2"])
def test_compile_is_refused_where_a_layout_divides_the_model(mesh):
    """torch's compiler broke on each of them, in four ways, in the first step."""
    said = f"--compile was asked for under {mesh.rpartition(',')[2]}, but torch.compile takes no .* leave --compile out"
    with pytest.raises(ConfigError, match=said):
        resolve(RunSettings(mesh=mesh, compile=True), 2 if "," not in mesh else 4)
    assert resolve(RunSettings(mesh="replicate=2", compile=True), 2).mesh.size == 2


def test_a_thread_that_is_not_the_main_one_cannot_start_workers(tmp_path):
    found = []

    def ask():
        try:
            refused(tmp_path)
        except LaunchError as error:
            found.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == ["asked to start workers from a thread that is not the main one: call from there"]


def test_a_taken_port_is_refused_and_so_is_one_that_is_taken_meanwhile(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"meet at port {port}, found: address already in use; give another"):
            refused(tmp_path, port=port)
        with pytest.raises(LaunchError, match=f"cannot listen on 127.0.0.1 port {port}: .*; give another port"):
            local._listen(port)


def test_an_entry_that_returns_no_exit_code_is_a_failure_that_says_so(tmp_path, monkeypatch):
    class Ended(Exception):
        pass

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(worker, "_end", end)
    for name in ("_reset_signals", "die_with_parent", "register_stacks"):
        monkeypatch.setattr(worker, name, lambda *_: None)
    with pytest.raises(Ended):
        worker.work(lambda world: None, World(1, 1, 2, 0, launched=True), tmp_path, os.getppid(), None)  # type: ignore
    row = json.loads(worker.error_path(tmp_path, 1).read_text())
    assert row["plain"] and row["text"] == (
        "error: rank 1's entry was to return its exit code, found None; return 0 at its end"
    )
    assert not worker.done_path(tmp_path, 1).exists()


def test_a_forked_ranks_stack_ends_where_its_work_begins():
    work = f'  File "{worker.__file__}", line 9 in work'
    launcher = '  File "/x/shoal/verify/verify.py", line 7 in _run'
    text = f'Thread 0x1 (most recent call first):\n  File "/x/job.py", line 3 in loss\n{work}\n{launcher}\n{launcher}\n'
    other = 'Thread 0x2 (most recent call first):\n  File "/x/loader.py", line 5 in wait'
    found = worker.own_frames(f"{text}\n{other}\n")
    assert "job.py" in found and work in found and "verify.py" not in found and found.endswith(other)


def test_a_rank_that_computes_or_is_kept_from_it_is_told_from_one_that_waits():
    slots = [Slot(rank, 7, 0, 0, "forward_backward", 0.0, 0.0) for rank in (0, 1)]
    said = describe(Overdue(120.0, 120.0), slots, {0: "R", 1: "S"}).splitlines()
    assert said[1:] == [
        "  rank 0: after step 0, in forward_backward, computing or in want of a processor (state R)",
        "  rank 1: after step 0, in forward_backward",
    ]
