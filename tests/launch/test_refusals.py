"""What the launcher refuses before it starts anything, and what a worker must give back."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest
import torch

from shoal.core.errors import ConfigError, LaunchError
from shoal.launch import local, worker
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
