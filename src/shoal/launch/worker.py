"""What every worker does around the user's work: end with its launcher, listen, leave its error behind."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from shoal.core.errors import LaunchError, ShoalError
from shoal.launch.stop import STOP
from shoal.launch.watch import Beats, Watch, behind, describe, overdue, process_state
from shoal.launch.world import World, leave

_PR_SET_PDEATHSIG = 1
_PARENT_POLL_S = 0.25
_VICTIM_SIGNS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "TCPStore")
_stack_file: IO[str] | None = None  # faulthandler needs it open for as long as the process lives


def error_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves its error."""
    return folder / f"error-{rank}.json"


def done_path(folder: Path, rank: int) -> Path:
    """Where a rank says that it has returned."""
    return folder / f"done-{rank}"


def stack_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its stack when asked by SIGUSR1."""
    return folder / f"stack-{rank}.txt"


def work(entry: Callable[[World], int], world: World, folder: Path, launcher: int, threads: int | None) -> int:
    """Run ``entry`` as one rank under our launcher; on an error leave it in ``folder`` and end at once."""
    _reset_signals()
    die_with_parent(launcher)
    register_stacks(folder, world.rank)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        code = entry(world)
        leave()
        if not isinstance(code, int):
            raise LaunchError(
                f"rank {world.rank}'s entry was to return its exit code, found {code!r}; return 0 at its end"
            )
    except BaseException as error:
        leave_error(error_path(folder, world.rank), world.rank, error)
        _end(1)
    sys.stdout.flush()
    _write(done_path(folder, world.rank), str(code))
    gc.freeze()  # a fresh interpreter would look through all modules once more before it ends
    return code


def die_with_parent(launcher: int) -> None:
    """End this process when ``launcher`` ends, however it ends: by the kernel on Linux, and by looking."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)

    def look() -> None:
        while os.getppid() == launcher:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=look, name="shoal-parent", daemon=True).start()


def register_stacks(folder: Path, rank: int) -> None:
    """Write all threads' stacks to ``folder``/stack-RANK.txt on SIGUSR1."""
    global _stack_file
    _stack_file = stack_path(folder, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=_stack_file, all_threads=True)


def own_frames(stacks: str) -> str:
    """faulthandler's text (most recent call first) without what a forked rank has below it of its launcher's calls."""
    kept, below = [], False
    for line in stacks.rstrip().splitlines():
        below = below and line.startswith("  File")
        if not below:
            kept.append(line)
        below = below or (line.endswith(" in work") and f'"{__file__}"' in line)
    return "\n".join(kept)


def awaits_others(stacks: str) -> bool:
    """Whether, in faulthandler's text, the thread that was asked stands in a call of torch.distributed."""
    own = stacks.partition("Current thread")[2].partition("Thread 0x")[0]
    return "/torch/distributed/" in own


def leave_error(path: Path, rank: int, error: BaseException) -> None:
    """Write the error, when it happened and whether its message alone is enough, atomically."""
    row: dict[str, Any] = {"rank": rank, "time_s": time.monotonic(), "plain": isinstance(error, ShoalError)}
    row["kind"] = type(error).__name__
    row["text"] = error_text(error)
    row["victim"] = not row["plain"] and any(sign in str(error) for sign in _VICTIM_SIGNS)
    _write(path, json.dumps(row))


def error_text(error: BaseException) -> str:
    """``error: message`` for Shoal's own errors, else the traceback from the user's first frame on."""
    if isinstance(error, ShoalError):
        return f"error: {error}"
    below = error.__traceback__.tb_next if error.__traceback__ else None
    return "".join(traceback.format_exception(type(error), error, below)).rstrip()


def open_beats(out: Path, world: World) -> Beats:
    """This rank's slot in the run's beats; its ``beat`` goes to the engine."""
    return Beats(out / "launch" / "beats", world.size, world.rank)


def watch_joined(out: Path, world: World, beats: Beats, watch: Watch | None = None) -> None:
    """In a world that others started: listen for a stop; end this rank with its stack when nobody moves."""
    watch = watch or Watch()
    STOP.listen()
    register_stacks(out / "launch", world.rank)
    since_s = time.monotonic()

    def look() -> None:
        while True:
            time.sleep(0.5)
            slots = beats.slots()
            found = overdue(slots, time.monotonic(), since_s, watch)
            if found is None:
                continue
            states = {slot.rank: process_state(slot.pid) for slot in slots if slot.pid}
            late = behind(slots, states)
            if world.rank == min(set(range(world.size)) - set(late), default=0) or world.rank in late:
                print(describe(found, slots, states), file=sys.stderr)
            print(f"rank {world.rank}'s stack:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            time.sleep(watch.stacks_s)  # the others tell their stacks too: the first end takes all down
            _end(1)

    threading.Thread(target=look, name="shoal-watch", daemon=True).start()


def _reset_signals() -> None:
    """Forget the launcher's handlers, which a fork inherits, then let the held-back signals in."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    STOP.requested, STOP.signal_number = False, None
    STOP.listen(ignore_interrupt=True)  # a terminal's Ctrl-C reaches the launcher too, which forwards it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _write(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text)
    partial.rename(path)


def _end(code: int) -> None:
    """End without waiting for any thread, so that the launcher sees it now."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
