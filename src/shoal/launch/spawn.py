"""Forked or fresh workers: which is safe from this process, and what fresh ones can be sent."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shoal.core.errors import LaunchError, ShoalError

_PROBE_S = 3.0


def start_method(device: str, threads: int | None) -> tuple[str, str]:
    """How workers are started: ``fork``, or ``spawn`` and why. ``threads``: of one worker's torch, None: as here."""
    if device != "cpu":
        return "spawn", f"{device} does not work in forked processes"
    if dist.is_initialized():
        return "spawn", "this process has joined a world of its own (shoal.prepare or torch.distributed)"
    if not fork_runs_torch(threads or torch.get_num_threads()):
        return "spawn", "this process has run torch operations on several threads, for which its forks would wait"
    return "fork", ""


def fork_runs_torch(threads: int) -> bool:
    """Whether a fork of this process gets through an operation on ``threads`` threads; found out by trying.

    GNU OpenMP keeps its threads after the first such operation; a fork lacks them and waits for them forever.
    """
    if threads < 2 or _tasks() < 2:
        return True
    with warnings.catch_warnings():  # Python warns of what is tried here
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            torch.set_num_threads(threads)
            torch.ones(1 << 18).add_(1)
        os._exit(0)
    until_s = time.monotonic() + _PROBE_S
    while time.monotonic() < until_s:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def check_sendable(entry: Callable[..., Any], why: str) -> None:
    """Raises LaunchError naming what fresh workers cannot be sent; before any of them is started."""
    try:
        pickle.dumps(entry)
    except ShoalError as error:
        raise LaunchError(f"workers have to be started as fresh processes, since {why}; but {error}") from None
    except Exception as error:
        raise LaunchError(
            f"workers have to be started as fresh processes, since {why}; but {entry!r} cannot be sent to them: "
            f"{error}; use functions and classes of an importable module"
        ) from None


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Fresh processes do not run the program's main script again: they load the job's file themselves."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def pack(values: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """The values as bytes, and a fault for each that cannot be sent. What stands in the main script goes by name."""
    good, faults = {}, []
    for name, value in values.items():
        try:
            _dump({name: value})
            good[name] = value
        except Exception as error:
            faults.append(f"{name} = {value!r} cannot be sent to them ({error})")
    return _dump(good), faults


def unpack(data: bytes, home: types.ModuleType) -> dict[str, Any]:
    """The packed values; names of the main script are looked up in ``home``, that script as a module."""
    reader = _Unpickler(io.BytesIO(data))
    reader.home = home
    return reader.load()


def _dump(values: Mapping[str, Any]) -> bytes:
    target = io.BytesIO()
    _Pickler(target).dump(dict(values))
    return target.getvalue()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> str | None:
        ours = isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__"
        return obj.__qualname__ if ours and "<" not in obj.__qualname__ else None


class _Unpickler(pickle.Unpickler):
    home: types.ModuleType

    def persistent_load(self, pid: str) -> Any:
        found: Any = self.home
        for name in pid.split("."):
            found = getattr(found, name)
        return found


def _tasks() -> int:
    """Threads of this process; 2 (some) where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 2
