"""Where a step's time goes: phases that do not overlap and add up to the whole."""

from __future__ import annotations

import time
from typing import Any

import torch

PHASES: tuple[str, ...] = ("data_wait", "forward_backward", "sync_exposed", "optimizer", "checkpoint_stall", "other")


class Laps:
    """The marks of one step; read them when the device has passed the last one."""

    def __init__(self, marks: list[tuple[str, Any]], end: Any) -> None:
        self._marks = marks
        self._end = end

    def seconds(self) -> dict[str, float]:
        """``{phase}_s`` of every phase, and ``step_s``."""
        found: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        ends = [mark for _, mark in self._marks[1:]] + [self._end]
        for (phase, start), end in zip(self._marks, ends, strict=True):
            if phase != "paused":
                found[phase] += _between(start, end)
        row = {f"{phase}_s": value for phase, value in found.items()}
        return {"step_s": sum(found.values()), **row}


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class Clock:
    """Marks phases; on CUDA with events, so that marking waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.late = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def _now(self) -> Any:
        if not self.late:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, phase: str) -> None:
        """From now on time belongs to ``phase`` (``paused``: to none)."""
        self._marks.append((phase, self._now()))

    def close(self) -> Laps | None:
        """End the step; None if none was begun."""
        if not self._marks:
            return None
        laps = Laps(self._marks, self._now())
        self._marks = []
        return laps
