"""The construction of a model, recorded without its data, and replayed so that no tensor stays whole for long."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shoal.blueprint.structures import tensors

OVERWRITES = {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_", "bernoulli_"}

STATISTICS = ("running_mean", "running_var")  # arguments that batch norms write to; some schemas do not say so

REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes of a module that hold what it registers


class Place(NamedTuple):
    """A tensor as a view of a numbered storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    covers: bool  # all of its storage
    conjugate: bool  # its values are the storage's, conjugated
    negative: bool  # or with the other sign


class Operation(NamedTuple):
    """A call that made or changed storages; tensors in its arguments as places (or themselves, where real)."""

    function: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: int | None  # a storage whose earlier value does not matter
    result: tuple[Place, ...]
    draws: bool  # random numbers


class Recording(NamedTuple):
    """A model of fake tensors, and what would have filled them."""

    model: nn.Module
    operations: list[Operation]
    place: Callable[[Tensor], Place]

    def digest(self, extra: Any) -> str:
        """Equal for recordings that give equal values; ``extra`` (printable, with places) counts too."""
        found = hashlib.sha256(repr(mapped_tensors(_mark, extra)).encode())
        for op in self.operations:
            found.update(repr((str(op.function), mapped_tensors(_mark, (op.args, op.kwargs)), op.result)).encode())
        return found.hexdigest()


class NotReplayable(Exception):
    """Why a construction cannot be replayed."""


def record(make: Callable[[], nn.Module], seed: Callable[[], None]) -> Recording:
    """Build a model of fake CPU tensors. Raises NotReplayable where replaying could give it other values.

    So where it reads values, sets seeds or has generators of its own, loads or changes data that no operation made,
    works in threads, or keeps tensors beside its modules.
    """
    recorder = _Recorder()
    seed()
    before = torch.get_rng_state()
    try:
        with _watched(recorder), FakeTensorMode(allow_non_fake_inputs=True), recorder:
            model = make()
    except Exception as error:
        raise NotReplayable(recorder.problem or told(error)) from error
    if recorder.problem is not None:
        raise NotReplayable(recorder.problem)
    if not isinstance(model, nn.Module):
        raise NotReplayable(f"model() returned {type(model).__name__}")
    if not torch.equal(before, torch.get_rng_state()):
        raise NotReplayable("its constructor draws random numbers past torch's operations")
    recorder.check(model)
    return Recording(model, recorder.operations, recorder.place)


def told(error: Exception) -> str:
    """An error in one line."""
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def held_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor of a model: parameters, buffers, and tensors in its modules' attributes."""
    for module in model.modules():
        yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
        for name, value in vars(module).items():
            if name not in REGISTERED:
                yield from tensors(value)


def replay(
    recording: Recording, seed: Callable[[], None], ready: Callable[[int, Tensor], None], kept: set[int]
) -> None:
    """Run a recording for real. ``ready(storage, flat bytes)`` once a storage of ``kept`` has its final value.

    Each is whole from the first operation that counts to its last change. Draws whose result nobody reads run on memory
    that is freed again, so that the stream of random numbers is the same; after the last draw that counts, none.
    """
    live = _live(recording.operations, kept)
    last = {key: at for at, op in enumerate(recording.operations) if live[at] for key in op.reads | op.writes}
    draws = max((at for at, op in enumerate(recording.operations) if live[at] and op.draws), default=-1)
    held: dict[int, torch.UntypedStorage] = {}
    seed()
    for at, op in enumerate(recording.operations):
        if not live[at]:
            if op.draws and at < draws:
                op.function(*mapped_places(_scratch, op.args), **mapped_places(_scratch, op.kwargs))
            continue
        if op.overwrites is not None and op.overwrites not in held:  # nothing of what made it counts
            held[op.overwrites] = _scratch(op.args[0]).untyped_storage()
        real = lambda place: _tensor(held, place)  # noqa: E731
        with torch.no_grad():
            made = op.function(*mapped_places(real, op.args), **mapped_places(real, op.kwargs))
        for place, tensor in zip(op.result, tensors(made), strict=True):
            if place.storage in op.writes and place.storage not in held:
                held[place.storage] = tensor.untyped_storage()
        made = tensor = None  # else they would hold their memory while the next one is made
        for key in op.reads | op.writes:
            if last[key] == at and key in held:
                storage = held.pop(key)
                if key in kept:
                    ready(key, torch.empty(0, dtype=torch.uint8).set_(storage))
                storage = None


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


def mapped_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Arguments of an operation with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Place):
        return value
    if isinstance(value, tuple | list):
        return type(value)(mapped_tensors(change, part) for part in value)
    if isinstance(value, dict):
        return {key: mapped_tensors(change, part) for key, part in value.items()}
    return value


def view(flat: Tensor, place: Place) -> Tensor:
    """The tensor at ``place`` of a storage given as flat bytes."""
    return _tensor({place.storage: flat.untyped_storage()}, place)


def _tensor(held: dict[int, torch.UntypedStorage], place: Place) -> Tensor:
    found = torch.empty(0, dtype=place.dtype).set_(held[place.storage], place.offset, place.size, place.stride)
    found = torch._conj(found) if place.conjugate else found
    return torch._neg_view(found) if place.negative else found


def _scratch(place: Place) -> Tensor:
    return torch.empty_strided(place.size, place.stride, dtype=place.dtype)


def _mark(tensor: Tensor) -> Any:
    """A real tensor by its value."""
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(raw).hexdigest()


def _live(operations: list[Operation], kept: set[int]) -> list[bool]:
    """Which operations contribute to the final value of ``kept``, or draw as many numbers as what they read says."""
    wanted, live = set(kept), [False] * len(operations)
    drawn = False
    for at in reversed(range(len(operations))):
        op = operations[at]
        counts = bool(op.writes & wanted)
        if counts or (drawn and op.draws and op.reads):
            live[at] = True
            wanted -= {op.overwrites}
            wanted |= op.reads
            drawn |= op.draws
    return live


class _Recorder(TorchDispatchMode):
    """Writes down what is done to fake tensors. ``problem``: why that could not be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []  # so that no storage's identity is used twice
        self.known: set[int] = set()  # storages that a recorded operation made
        self.made: list[weakref.ref[Tensor]] = []
        self.problem: str | None = None

    def refuse(self, problem: str) -> None:
        """Nothing may be replayed, also where the constructor goes on after the error."""
        self.problem = self.problem or problem
        raise NotReplayable(problem)

    def place(self, tensor: Tensor) -> Place:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self.numbers[storage._cdata] = len(self.numbers)
            self.alive.append(storage)
        covers = tensor.numel() * tensor.element_size() == storage.nbytes() and tensor.is_contiguous()
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        offset, lazy = int(tensor.storage_offset()), (tensor.is_conj(), tensor.is_neg())
        return Place(self.numbers[storage._cdata], size, stride, offset, tensor.dtype, covers, *lazy)

    def given(self, value: Any) -> Any:
        """Arguments with fake tensors as places and real ones as they are now."""

        def change(tensor: Tensor) -> Any:
            if isinstance(tensor, FakeTensor):
                return self.place(tensor)
            if tensor.layout != torch.strided:
                self.refuse("its constructor uses tensors that are not dense")
            with _disable_current_modes():
                return tensor.detach().clone()

        return mapped_tensors(change, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            self.refuse("its constructor draws from a generator of its own")
        aliased = [
            (tensor, argument.alias_info is None or argument.alias_info.is_write)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None or argument.name in STATISTICS
            for tensor in tensors(args[place] if place < len(args) else kwargs.get(argument.name))
        ]
        if func is not torch.ops.aten.lift_fresh.default and not all(isinstance(t, FakeTensor) for t, _ in aliased):
            self.refuse("its constructor changes, or looks into, a tensor that was there before or came from elsewhere")
        changed = {self.place(tensor).storage for tensor, written in aliased if written}
        given = (self.given(args), self.given(kwargs))
        try:
            result = func(*args, **kwargs)
        except Exception as error:  # the constructor may go on after it, in another way than with values
            self.problem = self.problem or told(error)
            raise
        whole = func._schema.name.rpartition("::")[2] in OVERWRITES and args and isinstance(given[0][0], Place)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self.append(func, given, changed, bool(whole), result, draws)
        return result

    def append(
        self, function: Any, given: tuple[Any, Any], changed: set[int], whole: bool, result: Any, draws: bool
    ) -> None:  # fmt: skip
        """``whole``: the first argument gets a value that does not depend on its old one."""
        inputs = {p.storage for p in _places(given)}
        if away := next((t.device for t in tensors(result) if t.device.type != "cpu"), None):
            self.refuse(f"its constructor makes tensors on {away}")
        gives = tuple(self.place(t) for t in tensors(result))
        self.made += [weakref.ref(t) for t in tensors(result)]
        writes = changed | {p.storage for p in gives} - inputs
        if inputs - self.known:
            self.refuse("its constructor uses data that was loaded rather than made")
        self.known |= writes
        if writes:
            over = given[0][0].storage if whole and given[0][0].covers else None
            reads = frozenset(inputs - ({over} if over not in {p.storage for p in _places(given[0][1:])} else set()))
            self.operations.append(Operation(function, *given, reads, frozenset(writes), over, gives, draws))

    def truncated(self, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """torch's ``trunc_normal_`` as one operation: it reads what it drew and draws again what was out of bounds."""

        def fill(tensor: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
            if generator is not None or not isinstance(tensor, FakeTensor) or any(map(_is_generator, args)):
                self.refuse("its constructor draws from a generator of its own, or into a tensor that was there before")
            place = self.place(tensor)
            bounds = tuple(float(value) for value in args)
            self.append(real, ((place, *bounds), dict(kwargs)), {place.storage}, True, tensor, True)
            return tensor

        return fill

    def check(self, model: nn.Module) -> None:
        """Raises NotReplayable where the model has a tensor that could not be filled."""
        if any(map(nn.parameter.is_lazy, model.parameters())):
            raise NotReplayable("it has parameters without a shape")
        if not any(isinstance(param, FakeTensor) for param in model.parameters()):
            raise NotReplayable("model() gave a model that was built before")
        held = [tensor for tensor in held_tensors(model) if isinstance(tensor, FakeTensor)]
        if any(self.place(tensor).storage not in self.known for tensor in held):
            raise NotReplayable("it has tensors that no operation filled")
        mine = {id(tensor) for tensor in held} | {id(t._base) for t in held if t._base is not None}
        if self._elsewhere(mine):
            gc.collect()
            if self._elsewhere(mine):
                raise NotReplayable(
                    "tensors that its constructor made are kept beside its modules and their attributes"
                )

    def _elsewhere(self, mine: set[int]) -> bool:
        return any(tensor is not None and id(tensor) not in mine for tensor in (made() for made in self.made))


def _places(value: Any) -> Iterator[Place]:
    if isinstance(value, Place):
        yield value
    elif isinstance(value, dict):
        yield from _places(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _places(part)


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)


@contextlib.contextmanager
def _watched(recorder: _Recorder) -> Iterator[None]:
    """What no operation shows: seeds of its own and threads are refused, a draw that reads itself is one operation."""

    own_thread = threading.get_ident()

    def refusing(real: Callable[..., Any], problem: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == own_thread:
                recorder.refuse(problem)
            return real(*args, **kwargs)

        return call

    refused: list[tuple[Any, str, str]] = [
        (owner, name, "its constructor sets a seed of its own")
        for owner in (torch, torch.random)
        for name in ("manual_seed", "seed", "set_rng_state")
    ]
    refused.append((threading.Thread, "start", "its constructor works in threads"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy looks at it
        fakes_log = logging.getLogger("torch._subclasses.fake_tensor")
        stack.enter_context(mock.patch.object(fakes_log, "disabled", True))  # what fails here is told by the run
        for owner, name, problem in refused:
            stack.enter_context(mock.patch.object(owner, name, refusing(getattr(owner, name), problem)))
        truncated = recorder.truncated(nn.init._no_grad_trunc_normal_)
        stack.enter_context(mock.patch.object(nn.init, "_no_grad_trunc_normal_", truncated))
        yield
