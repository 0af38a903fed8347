"""Reads micro-batches of a map-style data set, here or in loader workers, with equal values."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from shoal.core.errors import DataError
from shoal.data.randomness import sample_seed, seed_all, undisturbed
from shoal.data.window import DataSettings

_PR_SET_PDEATHSIG = 1
START_METHOD = "fork" if sys.platform == "linux" else "spawn"


@dataclass(frozen=True)
class Draw:
    """One micro-batch to read: the sample ids and the epoch that keys their randomness."""

    epoch: int
    ids: tuple[int, ...]


class Keyed(Dataset):
    """A data set read by draws: each sample made under the seed of (seed, epoch, id), then collated."""

    def __init__(self, dataset: Any, settings: DataSettings) -> None:
        self.dataset = dataset
        self.seed = settings.seed
        self.collate = settings.collate or default_collate

    def __getitem__(self, draw: Draw) -> Any:
        samples = []
        for sample in draw.ids:
            seed_all(sample_seed(self.seed, draw.epoch, sample))
            samples.append(self.dataset[sample])
        return self.collate(samples)


def fetch(dataset: Any, settings: DataSettings, draws: Iterable[Draw]) -> Iterator[Any]:
    """Collated batches, one for each draw, in order. Does not disturb this process's random states."""
    keyed = Keyed(dataset, settings)
    if settings.loader_workers == 0:
        return _fetch_here(keyed, settings, draws)
    return _fetch_in_workers(keyed, settings, draws)


def _fetch_here(keyed: Keyed, settings: DataSettings, draws: Iterable[Draw]) -> Iterator[Any]:
    for draw in draws:
        with undisturbed(settings.default_dtype):
            batch = keyed[draw]
        yield pin_memory(batch) if settings.pin_memory else batch


def _fetch_in_workers(keyed: Keyed, settings: DataSettings, draws: Iterable[Draw]) -> Iterator[Any]:
    """One stream over all epochs, so that the processes persist; they end when this is closed."""
    if START_METHOD != "fork":
        check_sendable(keyed)
    loader = DataLoader(
        keyed,
        batch_size=None,
        sampler=_Draws(draws),
        num_workers=settings.loader_workers,
        pin_memory=settings.pin_memory,
        worker_init_fn=_Begin(os.getpid(), settings.default_dtype),
        generator=torch.Generator().manual_seed(0),  # else the loader draws its base seed from the model's generator
        multiprocessing_context=START_METHOD,
    )
    iterator = iter(loader)
    try:
        yield from iterator
    finally:
        shutdown: Callable[[], None] | None = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


def check_sendable(keyed: Keyed) -> None:
    """Raises DataError naming what fresh loader workers cannot be sent; forked ones need nothing sent."""
    for name, value in (("collate", keyed.collate), ("the data set", keyed.dataset)):
        try:
            pickle.dumps(value)
        except Exception as error:
            raise DataError(
                f"loader workers were asked for, and on this system they are fresh processes; but {name} {value!r} "
                f"cannot be sent to them ({error}); use a file's top-level functions and classes, or --loader-workers 0"
            ) from None


class _Draws:
    """A sampler over draws, endless or not; read once."""

    def __init__(self, draws: Iterable[Draw]) -> None:
        self._draws = draws

    def __iter__(self) -> Iterator[Draw]:
        return iter(self._draws)


class _Begin:
    """What a loader worker does first: die with its parent, leave stop signals to it, set the dtype."""

    def __init__(self, parent: int, default_dtype: torch.dtype | None) -> None:
        self.parent = parent
        self.default_dtype = default_dtype

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent finishes its step and saves; it still needs data
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.parent:  # it died before the line above
                os._exit(1)
        if self.default_dtype is not None:
            torch.set_default_dtype(self.default_dtype)
