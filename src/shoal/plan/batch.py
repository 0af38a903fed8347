"""Batch arithmetic: the user says the global batch, this says micro-batches and accumulation, or why it cannot."""

from __future__ import annotations

from typing import NamedTuple

from shoal.core.errors import ConfigError


class BatchPlan(NamedTuple):
    """How one global batch is cut: ``global_batch = ranks * micro_batch * accumulation``, all in samples."""

    global_batch: int
    micro_batch: int
    accumulation: int
    ranks: int


def cut_batch(global_batch: int, micro_batch: int | None, ranks: int) -> BatchPlan:
    """Cut ``global_batch`` samples over ``ranks``; no micro-batch given: one per rank and step.

    Raises ConfigError where the numbers do not divide, with the nearest global batches that do.
    """
    if global_batch < 1 or (micro_batch is not None and micro_batch < 1):
        raise ConfigError(
            f"global batch {global_batch} and micro-batch {micro_batch} were asked for; both must be at least 1"
        )
    unit = ranks * (micro_batch or 1)
    if global_batch % unit:
        below = global_batch // unit * unit
        choices = " or ".join(str(size) for size in (below, below + unit) if size)
        asked = f"{ranks} workers" + (f" x micro-batch {micro_batch}" if micro_batch else "")
        raise ConfigError(
            f"global batch {global_batch} cannot be cut over {asked}: it is not a multiple of {unit}; "
            f"use a global batch of {choices}, or another number of workers or micro-batch"
        )
    micro = micro_batch or global_batch // ranks
    return BatchPlan(global_batch, micro, global_batch // (ranks * micro), ranks)
