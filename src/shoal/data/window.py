"""The values that travel from the data to a step: settings, micro-batches, windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shoal.core.errors import DataError


@dataclass(frozen=True)
class MicroBatch:
    """What one rank pushes through the model at once: collated samples and their ids.

    ``padding``: this rank has no sample here; ``batch`` then holds a real sample, so that shapes are real,
    whose loss is to be masked. ``ids`` is empty then.
    """

    batch: Any
    ids: tuple[int, ...]
    padding: bool = False

    @property
    def samples(self) -> int:
        """Samples that count; 0 for padding."""
        return len(self.ids)


@dataclass(frozen=True)
class Window:
    """This rank's micro-batches of one step.

    ``index`` counts windows over all epochs, from 0; ``epoch`` counts these, and ``last_of_epoch`` ends one.
    ``global_samples``: over all ranks (for data split by
    its own ``shard`` an upper bound, since a rank does not know what others still hold). ``more``: whether data
    follows as far as this rank knows; False only where iterable data ended, see ``Windows.end_epoch``.
    """

    index: int
    epoch: int
    micro_batches: tuple[MicroBatch, ...]
    global_samples: int
    last_of_epoch: bool
    more: bool = True


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How a data set is cut and read. ``micro_batch`` is per rank; ``default_dtype`` holds in user code."""

    global_batch: int
    micro_batch: int
    rank: int
    ranks: int
    seed: int
    short_windows: Literal["use", "drop", "pad"] = "use"
    loader_workers: int = 0
    pin_memory: bool = False
    default_dtype: torch.dtype | None = None
    collate: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        for name, least in (("global_batch", 1), ("micro_batch", 1), ("ranks", 1), ("loader_workers", 0)):
            if getattr(self, name) < least:
                raise DataError(f"{name} = {getattr(self, name)} was asked for; give at least {least}")
        if not 0 <= self.rank < self.ranks:
            raise DataError(f"rank {self.rank} of {self.ranks} ranks was asked for; give 0 to {self.ranks - 1}")
        if self.short_windows not in ("use", "drop", "pad"):
            raise DataError(f"short_windows = {self.short_windows!r} was asked for; give 'use', 'drop' or 'pad'")
