"""Seconds that one micro-batch takes on a part of the model, and what waiting for the slowest device adds."""

from __future__ import annotations

import math
from typing import NamedTuple

#: Spread of a device's time for a step over its mean: fitted to MPT on 8 to 512 and InternLM on 8 to 1,024 devices
#: (0.035 to 0.047). Rates of devices are those of the slowest in a node of 8, on which they were fitted.
JITTER, NODE = 0.04, 8


class Pass(NamedTuple):
    """Seconds of a forward or backward for one micro-batch. ``launch``: what the device waits for the host."""

    compute: float = 0.0
    launch: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.launch + self.waits

    @property
    def waits(self) -> float:
        """Of it, for other ranks."""
        return self.tensor + self.context + self.expert


class Work(NamedTuple):
    """Seconds of one micro-batch on a part of the model."""

    forward: Pass
    backward: Pass

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward.total + self.backward.total


def straggling(world: int) -> float:
    """What waiting for the slowest of ``world`` devices adds, as a share of the time of the slowest of ``NODE``: the
    greatest of n normal variables lies about sigma sqrt(2 ln n) above their mean."""
    return JITTER * max(0.0, math.sqrt(2 * math.log(world)) - math.sqrt(2 * math.log(NODE)))
