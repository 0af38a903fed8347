"""How far each rank is, seen from outside: beats in a shared file, and who is behind when they stop."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PHASES = (
    "none",
    "start",
    "evaluate",
    "checkpoint_stall",
    "save",
    "data_wait",
    "forward_backward",
    "sync_exposed",
    "optimizer",
    "other",
    "end",
)
"""In the order in which they follow each other at one count of steps; later is further."""
PAUSES = ("start", "evaluate", "checkpoint_stall", "save")
_SLOT = struct.Struct("<qqqqdd")
_STRIDE = 64
_KEPT = 1000  # step times that a rank remembers
_OTHER = PHASES.index("other")
_SEARCH_EVERY_S = 1.0  # for the processes that ranks started
_LEAST_CPU_S, _CPU_OVER_S = 0.2, 60.0  # who uses less in so long waits; looking for one's parent uses a tenth of it


@dataclass(frozen=True)
class Watch:
    """When a rank counts as standing still: times in seconds.

    ``start_s``: before the first beat; ``pause_s`` also for a step, and ``first_step_s`` for the first, in which a rank
    computes. ``saves``: whether ranks save what they have when they are asked to end; else there is nothing to save,
    and they are ended at once.
    """

    least_s: float = 10.0
    pause_s: float = 120.0
    start_s: float = 300.0
    first_step_s: float = 1800.0
    factor: float = 5.0
    stacks_s: float = 1.0
    saves: bool = True


@dataclass(frozen=True)
class Slot:
    """One rank's last beat. ``step``: updates done; ``slow_step_s``: 99th percentile of its step times."""

    rank: int
    pid: int
    step: int
    first_step: int
    phase: str
    time_s: float
    slow_step_s: float

    @property
    def progressed(self) -> bool:
        """Whether at least one step was done since this process began."""
        return self.pid != 0 and self.step > self.first_step


@dataclass(frozen=True)
class Overdue:
    """Nobody moves: how long the longest has stood and the deadline."""

    waited_s: float
    deadline_s: float


class Beats:
    """A file of one slot per rank, mapped into memory; a beat costs a microsecond and no system call."""

    def __init__(self, path: Path, size: int, rank: int | None = None) -> None:
        """Open or make the file; with ``rank``, take that slot as this process's own."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.size, self.rank = path, size, rank
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(descriptor).st_size < size * _STRIDE:
                os.ftruncate(descriptor, size * _STRIDE)
            self._map = mmap.mmap(descriptor, size * _STRIDE)
        finally:
            os.close(descriptor)
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._step: int | None = None
        self._first = 0
        self._stepped_s = 0.0
        self._slow_s = 0.0
        if rank is not None:
            self._map[rank * _STRIDE : (rank + 1) * _STRIDE] = bytes(_STRIDE)

    def clear(self) -> None:
        """Forget all ranks' beats."""
        self._map[:] = bytes(self.size * _STRIDE)

    def beat(self, step: int, phase: str) -> None:
        """This rank has done ``step`` updates and is now in ``phase`` (unknown phases count as ``other``)."""
        now = time.monotonic()
        if step != self._step:
            self._note_step(step, now)
        code = PHASES.index(phase) if phase in PHASES else _OTHER
        _SLOT.pack_into(self._map, (self.rank or 0) * _STRIDE, os.getpid(), step, self._first, code, now, self._slow_s)

    def slots(self) -> list[Slot]:
        """The last beat of every rank."""
        found = []
        for rank in range(self.size):
            pid, step, first, code, time_s, slow_s = _SLOT.unpack_from(self._map, rank * _STRIDE)
            found.append(Slot(rank, pid, step, first, PHASES[code % len(PHASES)], time_s, slow_s))
        return found

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def _note_step(self, step: int, now: float) -> None:
        if self._step is None:
            self._first = step
        elif step > self._step:
            if self._step > self._first:  # the first step compiles, allocates and warms up: not typical
                self._times.append((now - self._stepped_s) / (step - self._step))
            if len(self._times) < 32 or step % 32 == 0:
                self._slow_s = percentile(list(self._times), 0.99)
        self._step, self._stepped_s = step, now


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def overdue(
    slots: Sequence[Slot], now_s: float, since_s: float, watch: Watch, computed_s: float | None = None
) -> Overdue | None:
    """Whether a rank stands still for longer than the run's own steps allow.

    ``computed_s``: when a rank was last seen computing. Where it is known, ranks stand still only while none computes,
    up to limits: a start takes long, and so does any step in want of a processor. Where it is not known, a run that has
    never beaten is not watched. Beats before ``since_s`` (an earlier run's) count as new then.
    The deadline is the longest that any rank's phase allows, since the others may wait for that rank."""
    left = [slot for slot in slots if slot.phase != "end"]
    beaten = [slot for slot in left if slot.pid]
    if not left or (computed_s is None and not beaten):
        return None
    deadline_s = max((_deadline(slot, watch) for slot in beaten), default=0.0)
    if any(not slot.pid for slot in slots):
        deadline_s = max(deadline_s, watch.start_s)
    waited_s = max(now_s - max(slot.time_s, since_s) for slot in beaten or left)
    longest_s = watch.pause_s if all(slot.progressed for slot in left) else watch.first_step_s
    if computed_s is not None and (not beaten or waited_s <= max(longest_s, deadline_s)):
        waited_s = min(waited_s, now_s - computed_s)
    if waited_s <= deadline_s:
        return None
    return Overdue(waited_s, deadline_s)


class Computing:
    """When one of some processes, or of those that they started, was last seen to compute, or to wait for a disk."""

    def __init__(self) -> None:
        self.last_s = self._searched_s = time.monotonic()
        self._marks: dict[int, tuple[float, float]] = {}  # by process: when, and processor seconds by then

    def look(self, pids: Iterable[int], now_s: float) -> float:
        """``last_s`` after another look. Where there is no /proc, all are taken to compute."""
        found = {pid: _facts(pid) for pid in pids}
        computes = not Path("/proc/self/stat").exists() or self._any_computes(found, now_s)
        if not computes and now_s - self._searched_s >= _SEARCH_EVERY_S:
            self._searched_s = now_s
            computes = self._any_computes(_below(found), now_s)
        if computes:
            self.last_s = now_s
        return self.last_s

    def _any_computes(self, found: Mapping[int, list[str]], now_s: float) -> bool:
        return max([self._computes(pid, facts, now_s) for pid, facts in found.items()], default=False)

    def _computes(self, pid: int, facts: list[str], now_s: float) -> bool:
        if not facts:
            return False
        used_s = (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")
        marked_s, before_s = self._marks.setdefault(pid, (now_s, used_s))
        if (more := used_s - before_s > _LEAST_CPU_S) or now_s - marked_s > _CPU_OVER_S:
            self._marks[pid] = now_s, used_s
        return more or facts[0] in "RD"


def _below(known: Mapping[int, list[str]]) -> dict[int, list[str]]:
    """The facts of all processes that descend from some, without these."""
    every = {int(path.name): _facts(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found: dict[int, list[str]] = {}
    inside = set(known)
    while new := {p: of for p, of in every.items() if of and int(of[1]) in inside and p not in inside}:
        inside |= new.keys()
        found |= new
    return found


def behind(slots: Sequence[Slot], states: Mapping[int, str] | None = None) -> tuple[int, ...]:
    """The ranks that the others wait for: those stopped by a signal, else all that are not the furthest.

    ``states``: by rank, the process's state letter in /proc. Empty where all ranks are equally far."""
    stopped = tuple(slot.rank for slot in slots if (states or {}).get(slot.rank) in ("T", "t"))
    if stopped:
        return stopped

    def place(slot: Slot) -> tuple[int, int, int]:
        return (bool(slot.pid), slot.step, PHASES.index(slot.phase))

    furthest = max(place(slot) for slot in slots)
    return tuple(slot.rank for slot in slots if place(slot) < furthest)


def process_state(pid: int) -> str:
    """The state letter of a process (R, S, D, T, Z); empty where there is none or no /proc."""
    return next(iter(_facts(pid)), "")


def _facts(pid: int) -> list[str]:
    """What /proc tells of a process, from its state on (man 5 proc); empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def describe(
    found: Overdue, slots: Sequence[Slot], states: Mapping[int, str], late: tuple[int, ...] | None = None
) -> str:
    """Who is behind (``late``, where that is known otherwise) and where every rank stands, for a person."""
    late = late or behind(slots, states)
    if late:
        names = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} stopped moving"
    else:
        names = "all ranks stopped moving at the same place"
    own = "from this run's own step times" if all(slot.pid for slot in slots) else "in which no rank computed"
    lines = [f"error: {names}: no progress for {found.waited_s:.0f} s (deadline {found.deadline_s:.0f} s, {own})"]
    for slot in slots:
        state = states.get(slot.rank, "")
        note = f", stopped by a signal (state {state})" if state in ("T", "t") else ""
        note = ", computing or in want of a processor (state R)" if state == "R" else note
        where = f"after step {slot.step}, in {slot.phase}" if slot.pid else "has not begun"
        lines.append(f"  rank {slot.rank}: {where}{note}")
    return "\n".join(lines)


def _deadline(slot: Slot, watch: Watch) -> float:
    least_s = watch.pause_s if slot.phase in PAUSES or not slot.progressed else watch.least_s
    return max(least_s, watch.factor * slot.slow_step_s)
