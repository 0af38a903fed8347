"""Windows of iterable data: split by its own ``shard``, or read whole by every rank, which keeps its rows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from shoal.core.errors import DataError
from shoal.data.order import cut, mix
from shoal.data.randomness import seed_all, undisturbed
from shoal.data.window import DataSettings, MicroBatch, Window


def is_iterable(dataset: Any) -> bool:
    """Whether the data can only be read from front to back."""
    if isinstance(dataset, IterableDataset):
        return True  # it inherits a __getitem__ that only raises
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def is_split(dataset: Any) -> bool:
    """Whether iterable data offers a split over readers and a state to resume from."""
    return all(hasattr(dataset, name) for name in ("shard", "state_dict", "load_state_dict"))


def shuffle_buffers(dataset: Any) -> list[Any]:
    """The shuffle buffers of a Hugging Face stream, whose samples its state leaves out: going on from it loses them.

    See the documentation of its ``IterableDataset.state_dict``.
    """
    found, parts = [], [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            found.append(part)
        inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
        parts += [one for one in inner if one is not None]
    return found


class Items:
    """Items of one epoch, the n-th made under the seed of (seed, epoch, reader, n), as after a resume.

    The first item of an epoch has the same seed for all readers, since a generator draws its shuffle with it.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int, reader: int = 0, read: int = 0) -> None:
        self.epoch, self.read = epoch, read
        self._seed, self._reader = seed, reader
        self._ahead: list[Any] = []
        seed_all(mix(seed, 2, epoch))
        self._iterator: Iterator[Any] = iter(dataset)

    def take(self, count: int) -> list[Any]:
        """The next ``count`` items, fewer at the end."""
        while len(self._ahead) < count:
            number = self.read + len(self._ahead)
            seed_all(mix(self._seed, 2, self.epoch, *((self._reader, number) if number else ())))
            try:
                self._ahead.append(next(self._iterator))
            except StopIteration:
                self._iterator = iter(())
                break
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        self.read += len(taken)
        return taken

    def more(self) -> bool:
        """Whether an item follows; reads it ahead."""
        head = self.take(1)
        self._ahead = head + self._ahead
        self.read -= len(head)
        return bool(head)


def _collated(samples: list[Any], ids: tuple[int, ...], settings: DataSettings) -> MicroBatch:
    """``ids`` empty: padding."""
    batch = (settings.collate or default_collate)(samples)
    return MicroBatch(pin_memory(batch) if settings.pin_memory else batch, ids, padding=not ids)


def _own_rows(block: list[Any], start: int, settings: DataSettings) -> tuple[MicroBatch, ...]:
    """This rank's micro-batches of items that all ranks read; a rank without one is padded with the first."""
    made = []
    for share in cut(np.arange(len(block)), settings.ranks, settings.micro_batch):
        rows = share[settings.rank].tolist()
        samples = [block[row] for row in rows] or [block[share[0][0]]]
        made.append(_collated(samples, tuple(start + row for row in rows), settings))
    return tuple(made)


class WholeReader:
    """Every rank reads all and keeps its rows: exact for any number of ranks, resumed by reading again."""

    windows_per_epoch = samples_per_epoch = None

    def __init__(self, dataset: Any, settings: DataSettings, notes: list[str]) -> None:
        self._dataset, self._settings = dataset, settings
        _refuse_pad(settings)
        self.identity = f"a {type(dataset).__name__} without shards"
        notes.append(
            "iterable data without shard and state_dict: each worker reads all of it and keeps its rows; "
            "a resumed run reads again from the start"
        )

    def state(self) -> None:
        return None

    def end_epoch(self) -> None:
        return None  # each rank sees the end itself

    def iterate(
        self, first: int, stop: int | None, state: dict[str, Any] | None, alive: Callable[[], None]
    ) -> Iterator[Window]:
        """Cycles over epochs up to ``stop``; without it one epoch."""
        blocks = self._blocks(cycle=stop is not None)
        ahead, index = next(blocks), 0
        while ahead is not None and (stop is None or index < stop):
            (epoch, start, block), ahead = ahead, next(blocks, None)
            if index < first:
                alive()
            else:
                with undisturbed(self._settings.default_dtype):
                    rows = _own_rows(block, start, self._settings)
                yield Window(
                    index=index,
                    epoch=epoch,
                    micro_batches=rows,
                    global_samples=len(block),
                    last_of_epoch=ahead is None or ahead[0] != epoch,
                    more=ahead is not None,
                )
            index += 1

    def _blocks(self, cycle: bool) -> Iterator[tuple[int, int, list[Any]]]:
        """(epoch, number of its first item, items) of each window, from the start of the data."""
        size, epoch = self._settings.global_batch, 0
        while epoch == 0 or cycle:
            with undisturbed(self._settings.default_dtype):
                _tell_epoch(self._dataset, epoch)
                items = Items(self._dataset, self._settings.seed, epoch)
                block = items.take(size)
            if not self._usable(block):
                if epoch == 0:
                    raise DataError(self._too_small(len(block)))
                return  # an iterator that can be read once
            while self._usable(block):
                yield epoch, items.read - len(block), block
                with undisturbed(self._settings.default_dtype):
                    block = items.take(size)
            epoch += 1

    def _usable(self, block: list[Any]) -> bool:
        return len(block) == self._settings.global_batch or (bool(block) and self._settings.short_windows == "use")

    def _too_small(self, found: int) -> str:
        name = type(self._dataset).__name__
        if found == 0:
            return f"the data set {name} is empty; give at least 1 sample"
        return (
            f"a global batch of {self._settings.global_batch} with short windows dropped was asked for, but "
            f"{name} has {found} samples; lower the global batch or use short windows"
        )


class SplitReader:
    """Each rank reads its own shard and saves its own state; bound to the number of ranks.

    A rank whose shard has ended gives padding until all have (``Windows.end_epoch``).
    """

    windows_per_epoch = samples_per_epoch = None

    def __init__(self, dataset: Any, settings: DataSettings, notes: list[str]) -> None:
        self._dataset, self._settings = dataset, settings
        _refuse_pad(settings)
        shards = getattr(dataset, "num_shards", None)
        if isinstance(shards, int) and shards < settings.ranks:
            raise DataError(
                f"iterable data of {shards} shards was to be split over {settings.ranks} readers; "
                f"use at most {shards} workers, or data of {settings.ranks} shards or more"
            )
        if settings.short_windows == "drop":
            raise DataError(
                "short windows dropped were asked for, but data split by its own shard() ends at another place on "
                "each worker and no worker knows where the others end; use short windows"
            )
        notes.append(f"iterable data split over {settings.ranks} readers: resume with the same number of workers")
        buffers = shuffle_buffers(dataset)
        seeds = [format(zlib.crc32(repr(part.generator.bit_generator.state).encode()), "08x") for part in buffers]
        self.identity = f"{shards} shards" + "".join(f", shuffled by generator {seed}" for seed in seeds)
        self._read_again = bool(buffers)
        if self._read_again:
            notes.append(
                "the data's state leaves out its shuffle buffer: a resumed run reads the epoch again up to where it was"
            )
        self._filler: list[Any] = []
        self._state: dict[str, Any] | None = None
        self._epoch_over = False

    def state(self) -> dict[str, Any] | None:
        return self._state

    def end_epoch(self) -> None:
        if self._state is not None and not self._epoch_over:
            self._epoch_over = True
            self._state = self._position(self._state["epoch"] + 1, 0, True, None)

    def iterate(
        self, first: int, stop: int | None, state: dict[str, Any] | None, alive: Callable[[], None]
    ) -> Iterator[Window]:
        self._epoch_over = False
        shard, items = self._resumed(state, alive) if state else self._opened(0)
        index = first
        while stop is None or index < stop:
            if self._epoch_over:
                self._epoch_over = False
                shard, items = self._opened(items.epoch + 1)
            epoch = items.epoch
            with undisturbed(self._settings.default_dtype):
                rows = self._rows(items)
                state = json_state(shard.state_dict())
                more = items.more()
            self._state = self._position(epoch, items.read, more, state)
            yield Window(
                index=index,
                epoch=epoch,
                micro_batches=rows,
                global_samples=self._settings.global_batch,
                last_of_epoch=not more,
                more=more,
            )
            index += 1

    def _rows(self, items: Items) -> tuple[MicroBatch, ...]:
        settings, made = self._settings, []
        for share in cut(np.arange(settings.global_batch), settings.ranks, settings.micro_batch):
            before = items.read
            samples = items.take(len(share[settings.rank]))
            ids = tuple(settings.ranks * number + settings.rank for number in range(before, items.read))
            self._filler = samples[:1] or self._filler or self._first_sample()
            made.append(_collated(samples or self._filler, ids, settings))
        return tuple(made)

    def _first_sample(self) -> list[Any]:
        """A sample to pad with on a rank that has read none, from a reading of its own."""
        found = Items(self._shard(0), self._settings.seed, 0).take(1)
        if not found:
            raise DataError(
                f"reader {self._settings.rank} of {self._settings.ranks} was asked for samples, but its shard of "
                "the data is empty; use fewer workers or more shards"
            )
        return found

    def _shard(self, epoch: int) -> Any:
        shard = self._dataset.shard(num_shards=self._settings.ranks, index=self._settings.rank)
        _tell_epoch(shard, epoch)
        return shard

    def _opened(self, epoch: int) -> tuple[Any, Items]:
        with undisturbed(self._settings.default_dtype):
            shard = self._shard(epoch)
            return shard, Items(shard, self._settings.seed, epoch, self._settings.rank)

    def _resumed(self, state: dict[str, Any], alive: Callable[[], None]) -> tuple[Any, Items]:
        if (state["readers"], state["reader"]) != (self._settings.ranks, self._settings.rank):
            raise DataError(
                f"the data's position was saved by reader {state['reader']} of {state['readers']}, but "
                f"reader {self._settings.rank} of {self._settings.ranks} asks; resume with {state['readers']} workers"
            )
        if state["state"] is None or self._read_again:
            shard, items = self._opened(state["epoch"])
            self._skip(items, state["read"], alive)
            return shard, items
        with undisturbed(self._settings.default_dtype):
            shard = self._shard(state["epoch"])
            shard.load_state_dict(state["state"])
            source = shard if state["more"] else ()
            items = Items(source, self._settings.seed, state["epoch"], self._settings.rank, state["read"])
        return shard, items

    def _skip(self, items: Items, count: int, alive: Callable[[], None]) -> None:
        with undisturbed(self._settings.default_dtype):
            while items.read < count and items.take(min(256, count - items.read)):
                alive()
        if items.read < count:
            raise DataError(
                f"reader {self._settings.rank} was to go on after {count} samples of its shard, but it holds "
                f"{items.read}; resume with the data of the saved run"
            )

    def _position(self, epoch: int, read: int, more: bool, state: Any) -> dict[str, Any]:
        return {
            "readers": self._settings.ranks,
            "reader": self._settings.rank,
            "epoch": epoch,
            "read": read,
            "more": more,
            "state": state,
        }


def json_state(state: Any) -> Any:
    """A copy of a reader's state by way of JSON. Raises DataError where it is not JSON."""
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the data's state_dict() was asked for its position, but gave what JSON cannot hold ({error}); "
            "return numbers, strings, lists and dicts"
        ) from None


def _refuse_pad(settings: DataSettings) -> None:
    """Raises DataError: filling a window up takes samples from the front, which a stream has left behind."""
    if settings.short_windows == "pad":
        raise DataError(
            "short windows padded with repeated samples were asked for, but iterable data cannot go back to its first "
            "samples; use short windows as they are ('use'), or map-style data"
        )


def _tell_epoch(dataset: Any, epoch: int) -> None:
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


def whole_micro_batches(dataset: Any, settings: DataSettings) -> Iterator[MicroBatch]:
    """Each item of iterable data once over all ranks, all ranks with the same number of micro-batches."""
    with undisturbed(settings.default_dtype):
        items = Items(dataset, settings.seed, 0)
    while True:
        with undisturbed(settings.default_dtype):
            block = items.take(settings.ranks * settings.micro_batch)
            rows = _own_rows(block, items.read - len(block), settings) if block else ()
        yield from rows
        if not block:
            break
    if items.read == 0:
        raise DataError(f"the data set {type(dataset).__name__} is empty; give at least 1 sample")
