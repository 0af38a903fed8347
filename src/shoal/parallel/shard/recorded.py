"""The construction of a model, recorded without its data, and replayed so that no tensor stays whole for long."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.blueprint.structures import tensors

OVERWRITES = {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_", "bernoulli_"}


class Place(NamedTuple):
    """A tensor as a view of a numbered storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    covers: bool  # all of its storage


class Operation(NamedTuple):
    """A call that made or changed storages; tensors in its arguments as places (or themselves, where real)."""

    function: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: int | None  # a storage whose earlier value does not matter
    result: tuple[Place, ...]


class Recording(NamedTuple):
    """A model of fake tensors, and what would have filled them."""

    model: nn.Module
    operations: list[Operation]
    place: Callable[[Tensor], Place]


class NotReplayable(Exception):
    """Why a construction cannot be replayed."""


def record(make: Callable[[], nn.Module], seed: Callable[[], None]) -> Recording:
    """Build a model of fake CPU tensors. Raises NotReplayable where it reads values, or sets seeds of its own."""
    recorder = _Recorder()
    seed()
    before = torch.get_rng_state()
    try:
        with _no_seeding(), FakeTensorMode(allow_non_fake_inputs=True), recorder:
            model = make()
    except NotReplayable:
        raise
    except Exception as error:
        raise NotReplayable(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    if not torch.equal(before, torch.get_rng_state()):
        raise NotReplayable("its constructor draws random numbers past torch's operations")
    return Recording(model, recorder.operations, recorder.place)


def replay(recording: Recording, seed: Callable[[], None], ready: Callable[[int, Tensor], None], kept: set[int]) -> int:
    """Run a recording for real. ``ready(storage, flat bytes)`` once a storage of ``kept`` has its final value.

    Returns the most bytes that were whole at once. Draws whose result nobody reads run on memory that is freed
    again, so that the stream of random numbers is the same.
    """
    live = _live(recording.operations, kept)
    last = {key: at for at, op in enumerate(recording.operations) if live[at] for key in op.reads | op.writes}
    held: dict[int, torch.UntypedStorage] = {}
    most = 0
    state = random.getstate()
    seed()
    for at, op in enumerate(recording.operations):
        if not live[at]:
            if torch.Tag.nondeterministic_seeded in op.function.tags:
                op.function(*mapped_places(_scratch, op.args), **mapped_places(_scratch, op.kwargs))
            continue
        if op.overwrites is not None and op.overwrites not in held:  # nothing of what made it counts
            held[op.overwrites] = _scratch(_first_place(op)).untyped_storage()
        real = lambda place: _tensor(held, place)  # noqa: E731
        with torch.no_grad():
            made = op.function(*mapped_places(real, op.args), **mapped_places(real, op.kwargs))
        for place, tensor in zip(op.result, tensors(made), strict=True):
            if place.storage in op.writes and place.storage not in held:
                held[place.storage] = tensor.untyped_storage()
        most = max(most, sum(storage.nbytes() for storage in held.values()))
        for key in op.reads | op.writes:
            if last[key] == at and key in held:
                storage = held.pop(key)
                if key in kept:
                    ready(key, torch.empty(0, dtype=torch.uint8).set_(storage))
    random.setstate(state)
    return most


def mapped_places(change: Callable[[Place], Tensor], value: Any) -> Any:
    """``value`` with each place changed; real tensors are copied, as an operation may write to them."""
    if isinstance(value, Place):
        return change(value)
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple | list):
        return type(value)(mapped_places(change, part) for part in value)
    if isinstance(value, dict):
        return {key: mapped_places(change, part) for key, part in value.items()}
    return value


def view(flat: Tensor, place: Place) -> Tensor:
    """The tensor at ``place`` of a storage given as flat bytes."""
    return _tensor({place.storage: flat.untyped_storage()}, place)


def _tensor(held: dict[int, torch.UntypedStorage], place: Place) -> Tensor:
    return torch.empty(0, dtype=place.dtype).set_(held[place.storage], place.offset, place.size, place.stride)


def _scratch(place: Place) -> Tensor:
    return torch.empty_strided(place.size, place.stride, dtype=place.dtype)


def _first_place(op: Operation) -> Place:
    return op.args[0]


def _live(operations: list[Operation], kept: set[int]) -> list[bool]:
    """Which operations contribute to the final value of ``kept``."""
    wanted, live = set(kept), [False] * len(operations)
    for at in reversed(range(len(operations))):
        op = operations[at]
        if op.writes & wanted:
            live[at] = True
            wanted -= {op.overwrites}
            wanted |= op.reads
    return live


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []  # so that no storage's identity is used twice

    def place(self, tensor: Tensor) -> Place:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self.numbers[storage._cdata] = len(self.numbers)
            self.alive.append(storage)
        covers = tensor.numel() * tensor.element_size() == storage.nbytes() and tensor.is_contiguous()
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return Place(
            self.numbers[storage._cdata], size, stride, int(tensor.storage_offset()), tensor.dtype, covers
        )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        places = lambda t: self.place(t) if isinstance(t, FakeTensor) else t  # noqa: E731
        given = (_placed(places, args), _placed(places, kwargs))
        inputs = {p.storage for p in _places(given)}
        result = func(*args, **kwargs)
        gives = tuple(self.place(t) for t in tensors(result))
        changed = {
            p.storage
            for argument, value in zip(func._schema.arguments, given[0], strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for p in _places(value)
        }
        changed |= {p.storage for p in _places(given[1].get("out"))}
        writes = changed | {p.storage for p in gives} - inputs
        if writes:
            whole = func._schema.name.rpartition("::")[2] in OVERWRITES and args and isinstance(given[0][0], Place)
            over = given[0][0].storage if whole and given[0][0].covers else None
            reads = frozenset(inputs - ({over} if over not in {p.storage for p in _places(given[0][1:])} else set()))
            self.operations.append(Operation(func, *given, reads, frozenset(writes), over, gives))
        return result


def _placed(change: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_placed(change, part) for part in value)
    if isinstance(value, dict):
        return {key: _placed(change, part) for key, part in value.items()}
    return value


def _places(value: Any) -> Iterator[Place]:
    if isinstance(value, Place):
        yield value
    elif isinstance(value, dict):
        yield from _places(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _places(part)


@contextlib.contextmanager
def _no_seeding() -> Iterator[None]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotReplayable("its constructor sets a seed of its own")

    with contextlib.ExitStack() as stack:
        for name in ("manual_seed", "seed", "set_rng_state"):
            stack.enter_context(mock.patch.object(torch, name, refuse))
            stack.enter_context(mock.patch.object(torch.random, name, refuse))
        yield
