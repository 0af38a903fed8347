"""Workers on this machine: started, watched, restarted, and never left behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes

from shoal.core.errors import ConfigError, LaunchError
from shoal.launch.spawn import check_sendable, hidden_main, start_method
from shoal.launch.watch import Beats, Computing, Watch, describe, overdue, process_state
from shoal.launch.worker import awaits_others, done_path, error_path, own_frames, stack_path, work
from shoal.launch.world import World

STOPPED = 75
"""Exit code of a run that stopped as asked after saving. 0: done, 1: failed, 128 + n: died of signal n."""
_POLL_S = 0.05
_WATCH_EVERY_S = 0.5
_ONE_REQUEST_S = 0.5  # signals this close are one request: under `timeout make train` each comes twice
_VICTIM_S = 1.0  # how long to wait for the cause of an error that looks like another rank's end
_LEAVE_S = 30.0  # how long a worker may take to end after its work is done
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class _Failure:
    """Why an attempt ended: the text to show last, a short one for a restart's line, the exit code."""

    text: str
    short: str
    code: int
    lasting: bool = False  # would fail again


@dataclass
class _Asked:
    """Signals that reached the launcher."""

    count: int = 0
    number: int = 0
    last_s: float = -_ONE_REQUEST_S

    def __call__(self, number: int, frame: object) -> None:
        now_s = time.monotonic()
        if now_s - self.last_s >= _ONE_REQUEST_S:
            self.count, self.number, self.last_s = self.count + 1, number, now_s


def run_workers(
    entry: Callable[[World], int],
    workers: int,
    out: Path,
    restarts: int = 0,
    device: str = "cpu",
    port: int | None = None,
    watch: Watch | None = None,
) -> int:
    """Run ``entry`` in ``workers`` processes and return the exit code; what failed first is last on stderr.

    Restarts all workers after a failure, up to ``restarts`` times, if they had done a step and the error is
    not one of Shoal's own. SIGINT and SIGTERM ask to save and end; a second one kills the workers, and the first does
    where there is nothing to save (``watch.saves``), with KeyboardInterrupt or SystemExit. Call from the main thread.
    On CPU workers are forked; where forks would not work they are fresh processes, as on CUDA, and ``entry`` must be
    picklable. Raises ConfigError, LaunchError."""
    _check(workers, device, port)
    folder = out / "launch"
    folder.mkdir(parents=True, exist_ok=True)
    _silence_elastic()
    restart = 0
    with _listening() as asked:
        while True:
            attempt = _Attempt(entry, workers, folder, device, restart, watch or Watch())
            code, failure = attempt.run(port, asked)
            if failure is None:
                return code
            if (why := _why_not(failure, attempt.progressed, restart, restarts, asked)) is not None:
                _say(f"not restarted: {why}\n{failure.text}" if why else failure.text)
                return failure.code
            restart += 1
            _say(f"{failure.short}; restart {restart} of {restarts}")


class _Attempt:
    """All workers from their start to the end of the last one."""

    def __init__(
        self,
        entry: Callable[[World], int],
        workers: int,
        folder: Path,
        device: str,
        restart: int,
        watch: Watch,
    ) -> None:
        self.entry, self.workers, self.folder = entry, workers, folder
        self.device, self.restart, self.watch = device, restart, watch
        self.progressed = False
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        own = device != "cpu" or "OMP_NUM_THREADS" in os.environ
        self._threads = None if own else max(1, cores // workers)
        self._method, why = start_method(device, self._threads)
        if self._method == "spawn":
            with hidden_main():
                check_sendable(entry, why)
        self._beats = Beats(folder / "beats", workers)
        self._beats.clear()
        self._pids: dict[int, int] = {}
        self._since_s = time.monotonic()
        self._computing = Computing()
        self._looked_s = self._since_s

    def run(self, port: int | None, asked: _Asked) -> tuple[int, _Failure | None]:
        """The workers' exit code, or why they failed."""
        for rank in range(self.workers):
            for path in (error_path(self.folder, rank), done_path(self.folder, rank), stack_path(self.folder, rank)):
                path.unlink(missing_ok=True)
        listener = _listen(port)
        context = self._start(listener.getsockname()[1], asked)
        try:
            store = _host_store(listener)  # its thread starts after the forks, which so are of a process without any
            failed = self._wait(context, asked)
            del store
            return failed
        finally:
            self.progressed = any(slot.progressed for slot in self._beats.slots())
            context.close(death_sig=signal.SIGKILL, timeout=5)
            self._beats.close()

    def _start(self, port: int, asked: _Asked) -> PContext:
        """Start all workers with signals held back, so that none is lost between two handlers."""
        args, envs = {}, {}
        for rank in range(self.workers):
            world = World(rank, rank, self.workers, self.restart, launched=True)
            args[rank] = (self.entry, world, self.folder, os.getpid(), self._threads)
            envs[rank] = _worker_environment(world, port)
        logs = DefaultLogsSpecs(log_dir=str(self.folder / "elastic"))
        signal.pthread_sigmask(signal.SIG_BLOCK, set(_SIGNALS))
        try:
            with hidden_main() if self._method == "spawn" else contextlib.nullcontext():
                context = start_processes("shoal", work, args, envs, logs, start_method=self._method)
        finally:
            for number in _SIGNALS:  # elastic has set its own
                signal.signal(number, asked)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, set(_SIGNALS))
            shutil.rmtree(logs.root_log_dir, ignore_errors=True)  # holds nothing, also no killed launcher's
        self._pids = context.pids()
        return context

    def _wait(self, context: PContext, asked: _Asked) -> tuple[int, _Failure | None]:
        forwarded = 0
        last_s = self._looked_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if self._died():
                return 1, self._failure(last_s)
            if all(done_path(self.folder, rank).exists() for rank in self._pids):
                return self._leave(context), None
            last_s = now_s
            if asked.count and not self.watch.saves:
                raise KeyboardInterrupt if asked.number == signal.SIGINT else SystemExit(128 + asked.number)
            if asked.count > forwarded:
                forwarded = asked.count
                if forwarded > 1:
                    name = signal.Signals(asked.number).name
                    text = f"error: killed by a second {name}, before the workers had saved"
                    return 1, _Failure(text, text, 128 + asked.number)
                _say("stopping: saving at the end of this step (ask once more to end at once)")
                self._signal(signal.SIGTERM)
            if now_s - self._looked_s > _WATCH_EVERY_S and (failure := self._look(now_s)) is not None:
                return 1, failure
            time.sleep(_POLL_S)

    def _leave(self, context: PContext) -> int:
        """The exit code of workers that have all returned, once they have ended; who lingers is killed."""
        guard = threading.Timer(_LEAVE_S, self._signal, [signal.SIGKILL])
        guard.daemon = True
        guard.start()
        result = context.wait(timeout=_LEAVE_S + 5, period=0.01)
        guard.cancel()
        guard.join()  # a fork that comes next is not to meet its end
        for rank, failure in (result.failures if result else {}).items():
            _say(f"note: rank {rank} had done its work, but ended with exit code {failure.exitcode}")
        codes = [int(done_path(self.folder, rank).read_text()) for rank in self._pids]
        return next((code for code in codes if code), 0)

    def _died(self) -> dict[int, int]:
        return {rank: code for rank, pid in self._pids.items() if (code := _exit_code(pid)) is not None}

    def _failure(self, alive_s: float) -> _Failure:
        """The first cause: the earliest error left behind, unless a rank was killed before it.

        ``alive_s``: when all ranks were last seen alive; a later error beside a killed rank is its victim's,
        but an abort beside an error that blames no other rank is that error's."""
        until_s = time.monotonic() + _VICTIM_S
        while True:
            died, errors = self._died(), self._errors()
            first = errors[0] if errors else None
            killed = {rank: -code for rank, code in died.items() if code < 0}
            if killed or not (first and first["victim"]) or time.monotonic() > until_s:
                break
            time.sleep(_POLL_S)
        rank, number = min(killed.items(), key=lambda item: item[1] == signal.SIGABRT, default=(0, 0))
        later = first is None or first["victim"] or (first["time_s"] >= alive_s and number != signal.SIGABRT)
        if killed and later:
            name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
            short = f"rank {rank} of {self.workers} was killed by signal {number} ({name}){self._after(rank)}"
            hint = "; often the machine had run out of memory" if number == signal.SIGKILL else ""
            return _Failure(f"error: {short}{hint}", short, 128 + number)
        if first is not None:
            short = f"rank {first['rank']} of {self.workers} failed{self._after(first['rank'])}"
            text = first["text"] if first["plain"] else f"error: {short} before any other:\n{first['text']}"
            return _Failure(text, f"{short}: {first['text'].splitlines()[-1]}", 1, first["plain"])
        rank, code = min(died.items()) if died else (0, 1)
        short = f"rank {rank} of {self.workers} ended with exit code {code}{self._after(rank)} and left no error"
        return _Failure(f"error: {short}", short, code if 0 < code < 256 else 1)

    def _errors(self) -> list[dict[str, Any]]:
        """The errors that ranks have left, earliest first."""
        found = []
        for rank in range(self.workers):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(error_path(self.folder, rank).read_text()))
        return sorted(found, key=lambda row: row["time_s"])

    def _after(self, rank: int) -> str:
        slot = self._beats.slots()[rank]
        return f" after step {slot.step}" if slot.pid else ""

    def _look(self, now_s: float) -> _Failure | None:
        """A failure that names who is behind, with every rank's stack, when nobody moves."""
        slots = self._beats.slots()
        if now_s - self._looked_s > max(2 * _WATCH_EVERY_S, self.watch.least_s / 2):  # stood still itself: all may have
            self._since_s = self._computing.last_s = now_s
        self._looked_s = now_s
        computed_s = self._computing.look(self._pids.values(), now_s)
        away = [rank for rank in self._pids if not stack_path(self.folder, rank).exists()]
        if away:
            if now_s - computed_s <= self.watch.start_s:
                return None
            names = f"rank{'s' if len(away) > 1 else ''} {', '.join(map(str, away))}"
            short = f"{names} did not begin, and no rank computed in {self.watch.start_s:.0f} s"
            return _Failure(f"error: {short}; start again", short, 1)
        found = overdue(slots, now_s, self._since_s, self.watch, computed_s)
        if found is None:
            return None
        states = {rank: process_state(pid) for rank, pid in self._pids.items()}
        self._signal(signal.SIGUSR1)
        time.sleep(self.watch.stacks_s)
        texts = {rank: own_frames(stack_path(self.folder, rank).read_text()) for rank in self._pids}
        stacks = [f"rank {rank}'s stack:\n{t or '(none: the process does not answer)'}" for rank, t in texts.items()]
        busy = tuple(rank for rank, text in texts.items() if not awaits_others(text))
        known = not any(slot.pid for slot in slots) and 0 < len(busy) < len(slots)  # else beats tell who is behind
        said = describe(found, slots, states, busy if known else None)
        short = said.splitlines()[0].removeprefix("error: ")
        return _Failure("\n".join([*stacks, said]), short, 1)

    def _signal(self, number: int) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _why_not(failure: _Failure, progressed: bool, restart: int, restarts: int, asked: _Asked) -> str | None:
    """Why a failure is not followed by a restart (empty: none was wanted); None where it is."""
    if not restarts or asked.count:
        return ""
    if failure.lasting:
        return "this error would come again"
    if not progressed:
        return "it failed before this attempt's first step, so it would fail again"
    return f"all {restarts} restarts are used" if restart >= restarts else None


def _check(workers: int, device: str, port: int | None) -> None:
    """Refuse what cannot work before anything is started."""
    if workers < 1:
        raise ConfigError(f"asked for {workers} workers: give at least 1")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"asked for workers on {device!r}: use cpu or cuda")
    if device == "cuda" and workers > (found := torch.cuda.device_count()):
        raise ConfigError(f"asked for {workers} workers, found {found} GPU(s): give at most {found}")
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("asked to start workers from a thread that is not the main one: call from there")
    if port is not None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise ConfigError(
                    f"asked to meet at port {port}, found: {(error.strerror or str(error)).lower()}; "
                    "give another, or none for a free one"
                ) from None


def _listen(port: int | None) -> socket.socket:
    """A socket at which the workers will find the store, on a free port unless told; those who come early wait."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port or 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen on 127.0.0.1 port {port or '(any free)'}: {(error.strerror or str(error)).lower()}; give "
            "another port"
        ) from None
    return listener


def _host_store(listener: socket.socket) -> dist.TCPStore:
    """The store at which the workers meet, hosted here, in a thread of its own."""
    host, port = listener.getsockname()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _worker_environment(world: World, port: int) -> dict[str, str]:
    """The variables by which a worker finds its world."""
    values = {
        "RANK": world.rank,
        "LOCAL_RANK": world.local_rank,
        "WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": world.size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": world.restart,
        "SHOAL_LAUNCHED": 1,
    }
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        values["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's own name may not resolve
    return {name: str(value) for name, value in values.items()}


def _exit_code(pid: int) -> int | None:
    """How a child ended (minus the signal that killed it), leaving it to be waited for; None: alive."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 1  # someone else has waited for it
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


@contextlib.contextmanager
def _listening() -> Iterator[_Asked]:
    """Count SIGINT and SIGTERM; the former handlers are back afterwards, once a request cannot come a second time."""
    asked = _Asked()
    watched = [*_SIGNALS, signal.SIGHUP, signal.SIGQUIT]  # elastic sets all four
    former = {number: signal.getsignal(number) for number in watched}
    for number in _SIGNALS:
        signal.signal(number, asked)
    try:
        yield asked
    finally:
        if asked.count:
            time.sleep(max(0.0, asked.last_s + _ONE_REQUEST_S - time.monotonic()))
        for number, handler in former.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _silence_elastic() -> None:
    """Elastic logs each worker's end at length; what failed is said once, by us."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
