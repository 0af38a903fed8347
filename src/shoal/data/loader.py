"""Windows of a data set, in the same order for any number of ranks, accumulation steps and loader workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from shoal.core.errors import DataError
from shoal.data.fetch import Draw, fetch
from shoal.data.order import Order, cut
from shoal.data.stream import SplitReader, WholeReader, is_iterable, is_split, whole_micro_batches
from shoal.data.window import DataSettings, MicroBatch, Window

__all__ = ["DataSettings", "MicroBatch", "Window", "Windows", "eval_micro_batches"]

_EVAL_EPOCH = -1  # keys the randomness of evaluation samples; the same at every evaluation


class Windows:
    """This rank's windows of a data set. Raises DataError where the data set cannot serve them."""

    def __init__(self, dataset: Any, settings: DataSettings) -> None:
        self.notes: list[str] = []
        self._open: Iterator[Window] | None = None
        self._reader = _reader(dataset, settings, self.notes)

    @property
    def windows_per_epoch(self) -> int | None:
        """Windows of one epoch; None where the data set does not tell its length."""
        return self._reader.windows_per_epoch

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of one epoch; None where the data set does not tell its length."""
        return self._reader.samples_per_epoch

    @property
    def identity(self) -> str:
        """What of the data must be the same on all ranks, for a person."""
        return self._reader.identity

    def iterate(
        self,
        first: int,
        stop: int | None,
        state: dict[str, Any] | None = None,
        alive: Callable[[], None] = lambda: None,
    ) -> Iterator[Window]:
        """Windows ``first`` to ``stop`` (None: no end but the data's); ``state`` is from there.

        ``alive`` is called now and then while data before ``first`` is read again, which may take long.
        """
        self.close()
        self._open = self._reader.iterate(first, stop, state, alive)
        return self._open

    def state(self) -> dict[str, Any] | None:
        """JSON state of this rank's reader after the last window; None where the number is enough."""
        return self._reader.state()

    def end_epoch(self) -> None:
        """All ranks agreed that iterable data ended: the next window begins the next epoch."""
        self._reader.end_epoch()

    def close(self) -> None:
        """Ends loader workers and the iteration under way."""
        if self._open is not None:
            self._open.close()  # type: ignore[attr-defined]
            self._open = None


def _reader(dataset: Any, settings: DataSettings, notes: list[str]) -> _MapReader | SplitReader | WholeReader:
    refuse_loader(dataset)
    if not is_iterable(dataset):
        return _MapReader(dataset, settings, notes)
    if settings.loader_workers:
        notes.append("iterable data is read in the training process; loader workers are not used for it")
    return (SplitReader if is_split(dataset) else WholeReader)(dataset, settings, notes)


class _MapReader:
    """Windows of a map-style data set: any window in constant time."""

    def __init__(self, dataset: Any, settings: DataSettings, notes: list[str]) -> None:
        self._dataset = dataset
        self._settings = settings
        self._size = self.samples_per_epoch = _sized(dataset)
        self.identity = f"{self._size} samples"
        self._order = Order(self._size, settings.seed)
        self.windows_per_epoch: int = _windows_per_epoch(self._size, settings, notes)

    def state(self) -> None:
        return None

    def end_epoch(self) -> None:
        return None

    def iterate(
        self, first: int, stop: int | None, state: dict[str, Any] | None, alive: Callable[[], None]
    ) -> Iterator[Window]:
        batches = fetch(self._dataset, self._settings, self._draws(first, stop))
        try:
            index = first
            while stop is None or index < stop:
                yield self._window(index, batches)
                index += 1
        finally:
            batches.close()  # type: ignore[attr-defined]

    def _draws(self, first: int, stop: int | None) -> Iterator[Draw]:
        index = first
        while stop is None or index < stop:
            epoch, shares = self._shares(index)
            for share in shares:
                yield _draw(epoch, share, self._settings.rank)
            index += 1

    def _shares(self, index: int) -> tuple[int, list[list[np.ndarray]]]:
        epoch, position = divmod(index, self.windows_per_epoch)
        start = position * self._settings.global_batch
        stop = start + self._settings.global_batch
        ids = self._order.ids(epoch, start, min(stop, self._size))
        if stop > self._size and self._settings.short_windows == "pad":
            again = np.arange(stop - self._size) % self._size  # the epoch's first, in its order
            ids = np.concatenate([ids, self._order.ids(epoch, 0, again.max() + 1)[again]])
        return epoch, cut(ids, self._settings.ranks, self._settings.micro_batch)

    def _window(self, index: int, batches: Iterator[Any]) -> Window:
        epoch, shares = self._shares(index)
        return Window(
            index=index,
            epoch=epoch,
            micro_batches=tuple(_micro_batch(share[self._settings.rank], batches) for share in shares),
            global_samples=sum(len(ids) for share in shares for ids in share),
            last_of_epoch=(index + 1) % self.windows_per_epoch == 0,
        )


def refuse_loader(dataset: Any) -> None:
    """Raises DataError: a loader's items are batches, which would be batched once more."""
    if isinstance(dataset, DataLoader):
        raise DataError(
            "the data is a DataLoader, whose items are batches already; return its data set, which is cut into batches "
            "here (a collate_fn goes into the job's collate(), num_workers is --loader-workers)"
        )


def _draw(epoch: int, share: list[np.ndarray], rank: int) -> Draw:
    """What ``rank`` reads of one micro-batch; without samples the micro-batch's first, as padding."""
    ids = share[rank] if len(share[rank]) else share[0][:1]
    return Draw(epoch, tuple(ids.tolist()))


def _micro_batch(ids: np.ndarray, batches: Iterator[Any]) -> MicroBatch:
    return MicroBatch(batch=next(batches), ids=tuple(ids.tolist()), padding=len(ids) == 0)


def _sized(dataset: Any) -> int:
    """Length of a map-style data set. Raises DataError where it is none, or empty."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"the data is a {type(dataset).__name__}, which has neither __getitem__ and __len__ "
            "nor __iter__; give a map-style or iterable data set"
        )
    size = len(dataset)
    if size == 0:
        raise DataError(f"the data set {type(dataset).__name__} is empty; give at least 1 sample")
    return size


def _windows_per_epoch(size: int, settings: DataSettings, notes: list[str]) -> int:
    full, rest = divmod(size, settings.global_batch)
    if settings.short_windows != "drop":
        if rest and settings.short_windows == "use":
            notes.append(f"{size} samples: the last window of each epoch has {rest} instead of {settings.global_batch}")
        elif rest:
            notes.append(
                f"{size} samples: {settings.global_batch - rest} are repeated in the last window of each epoch to fill "
                f"it up to {settings.global_batch} (others each time)"
            )
        return full + bool(rest)
    if full == 0:
        raise DataError(
            f"a global batch of {settings.global_batch} with short windows dropped was asked for, but the "
            f"data set has {size} samples; lower the global batch or use short windows"
        )
    if rest:
        notes.append(f"{rest} of {size} samples are dropped each epoch (others each time)")
    return full


def eval_micro_batches(dataset: Any, settings: DataSettings) -> Iterator[MicroBatch]:
    """Each sample exactly once over all ranks, in index order; padding where this rank has none.

    Every rank gets the same number of micro-batches. Raises DataError for an empty data set.
    """
    refuse_loader(dataset)
    if is_iterable(dataset):
        yield from whole_micro_batches(dataset, settings)
        return
    size = _sized(dataset)
    block = settings.ranks * settings.micro_batch
    shares = [
        share
        for start in range(0, size, block)
        for share in cut(np.arange(start, min(start + block, size)), settings.ranks, settings.micro_batch)
    ]
    batches = fetch(dataset, settings, (_draw(_EVAL_EPOCH, share, settings.rank) for share in shares))
    try:
        for share in shares:
            yield _micro_batch(share[settings.rank], batches)
    finally:
        batches.close()  # type: ignore[attr-defined]
