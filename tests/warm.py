"""Commands for tests without their imports: each is a fork of one process that has torch and shoal loaded.

``Command`` is a ``subprocess.Popen`` of ``[sys.executable, SCRIPT | "-m" MODULE | "-c" CODE | "-", ...]``. The fork is
made this process's own child, gets its folder, environment, streams and ``sys.argv``, and runs as ``__main__``, so that
signals, exit statuses, ``/proc`` and the processes it starts are what they would be of a fresh interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import multiprocessing.process
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

_LOADED = ("shoal.cli", "shoal.launch.train", "shoal.verify", "shoal.checkpoint.export", "shoal.monitor.tensorboard")
_PR_SET_CHILD_SUBREAPER = 36
_ROOM = 4096  # bytes for a command's words, as /proc shows them
_one_at_a_time = threading.Lock()
_line: socket.socket | None = None


class Command(subprocess.Popen):
    """A Python command that starts at once. Needs Linux; with other options of the interpreter start a Popen."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        cwd, env, given, given_w, out_r, out, err_r, err = (more[at] for at in (4, 5, 9, 10, 11, 12, 13, 14))
        request = {"words": list(map(str, args)), "cwd": str(cwd or os.getcwd()), "env": dict(env or os.environ)}
        streams = [own if end == -1 else end for own, end in enumerate((given, out, err))]
        with _one_at_a_time:
            line = _server()
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whose parent ends becomes this process's child
            socket.send_fds(line, [json.dumps(request).encode()], streams)
            answer = line.recv(64)
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError("the process that starts commands for tests has ended; its error is above")
        self.pid, self._child_created = int(answer), True
        self._close_pipe_fds(given, given_w, out_r, out, err_r, err)


def _server() -> socket.socket:
    """The line to the process that forks; started at the first use, it ends when this process does."""
    global _line
    if _line is None:
        _line, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen(
            [sys.executable, __file__, str(there.fileno()), " " * _ROOM],
            pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        there.close()
        atexit.register(lambda line: (line.close(), process.wait()), _line)
    return _line


def _serve(line: socket.socket) -> dict[str, Any]:
    """Fork for every request; returns in each fork, what it is to become."""
    while True:
        data, streams, _, _ = socket.recv_fds(line, 1 << 20, 3)
        if not data:
            sys.exit()
        middle = os.fork()
        if middle:
            os.waitpid(middle, 0)
            for stream in streams:
                os.close(stream)
            continue
        middle = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == middle:
            time.sleep(0.0002)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        line.send(str(os.getpid()).encode())
        line.close()
        return json.loads(data)


def _become(words: list[str], cwd: str, env: dict[str, str]) -> None:
    """What a fresh process would find."""
    import torch

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    tempfile.tempdir = None
    multiprocessing.process.ORIGINAL_DIR = cwd
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    room = end - start - 1
    ctypes.memmove(start, "\0".join(words).encode()[:room].ljust(room, b"\0"), room)


def _run(words: list[str]) -> None:
    """The command's words after the interpreter's own: a module, a code, the standard input or a file."""
    first, rest = words[0], words[1:]
    sys.argv = words
    if first == "-m":
        sys.path[0], sys.argv = os.getcwd(), rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        sys.path[0], sys.argv, text, name = "", ["-c", *rest[1:]], rest[0], "<string>"
    elif first == "-":
        sys.path[0], text, name = "", sys.stdin.read(), "<stdin>"
        main.__file__ = name
    else:
        name = main.__file__ = os.path.abspath(first)
        sys.path[0], text = os.path.dirname(name), Path(name).read_text()
    exec(compile(text, name, "exec"), main.__dict__)


def _status(words: list[str]) -> int:
    """Run the command; its exit status, with the error told where there is one."""
    try:
        _run(words)
    except SystemExit as ended:
        if not isinstance(ended.code, str):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _end(status: int) -> None:
    """As the interpreter ends, but for taking down all modules, which costs a fork more than all before it."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    gc.disable()
    for _name in _LOADED:
        __import__(_name)
    gc.freeze()  # a fork that collected what all share would copy it
    gc.enable()
    _asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    _become(**_asked)
    _end(_status(_asked["words"][1:]))
