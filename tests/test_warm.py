"""A command that starts warm is what a fresh one is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm import Command

pytestmark = pytest.mark.unit

TELL = """
import __main__, json, multiprocessing.process, os, signal, sys, tempfile
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1, signal.SIGCHLD)
print(json.dumps({
    "argv": sys.argv, "name": __name__, "main": vars(__main__) is globals(), "file": globals().get("__file__"),
    "path": sys.path[:2], "cwd": os.getcwd(), "env": dict(os.environ), "parent": os.getppid(), "group": os.getpgid(0),
    "session": os.getsid(0), "handlers": [str(signal.getsignal(number)) for number in numbers],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "temporary": tempfile.gettempdir(),
    "open": sorted(os.listdir("/proc/self/fd")), "home": multiprocessing.process.ORIGINAL_DIR,
    "threads": len(os.listdir("/proc/self/task")), "children": sorted(map(str, multiprocessing.active_children())),
    "shown": [word for word in open("/proc/self/cmdline").read().split("\\0")[1:] if word],
}))
print("to the other stream", file=sys.stderr)
sys.exit(7)
"""
WAYS = {"script": ("tell.py",), "module": ("-m", "tell"), "code": ("-c", TELL), "standard input": ("-",)}


@pytest.mark.parametrize("way", WAYS)
def test_a_command_finds_what_it_would_find_in_a_fresh_process(tmp_path: Path, way: str) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    command = [sys.executable, *WAYS[way], "one", "two words"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "TMPDIR": str(tmp_path)}
    env["LC_ALL"] = "C.UTF-8"  # else an interpreter sets a variable of its own
    pipe, found = subprocess.PIPE, []
    for kind in (subprocess.Popen, Command):
        process = kind(command, cwd=tmp_path, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        out, err = process.communicate(TELL if way == "standard input" else None, timeout=60)
        found.append({"status": process.returncode, "err": err, **json.loads(out)})
    fresh, warm = found
    assert fresh["status"] == 7 and fresh["err"] == "to the other stream\n"
    assert warm == fresh


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_dies_of_signals_and_its_death_is_seen(number: int) -> None:
    process = Command([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "1\n" and process.poll() is None
    process.send_signal(number)
    assert process.wait(timeout=10) == -number


def test_an_error_is_told_with_status_1_and_what_was_to_run_at_the_end_runs() -> None:
    code = "import atexit; atexit.register(print, 'the end'); raise ValueError('boom')"
    process = Command([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (1, "the end\n")
    assert err.startswith("Traceback") and err.endswith("ValueError: boom\n")


def test_code_is_loaded_before_the_command_starts() -> None:
    """What this is for: the imports are there, and torch has not run on threads that a fork would lack."""
    code = """
import sys
loaded = {"torch", "shoal.launch.train", "shoal.verify.verify"} <= sys.modules.keys()
from shoal.launch.spawn import fork_runs_torch
print(loaded, fork_runs_torch(2))
"""
    process = Command([sys.executable, "-c", code], stdout=-1, text=True)
    assert process.communicate(timeout=60)[0].split() == ["True", "True"]
