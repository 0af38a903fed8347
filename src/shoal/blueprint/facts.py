"""The blueprint: a model's operations, values and parameters as a value without torch in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from shoal.core.settings import Settings


class Value(NamedTuple):
    """A tensor that an operation gives, or an input. ``of_model``: depends on a parameter. ``strides``: in numbers."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    of_model: bool
    strides: tuple[int, ...] = ()


class Parameter(NamedTuple):
    """A parameter (or, with ``trains`` false, a frozen one or a buffer). ``ties``: its other names."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trains: bool
    buffer: bool
    ties: tuple[str, ...]


class Kept(NamedTuple):
    """A storage that autograd keeps for backward. ``of``: the number of the value that lies in it or that it is a cast
    copy of, the name of the parameter that it is such a copy of, or None: an operation's own intermediate (statistics,
    probabilities)."""

    of: int | str | None
    bytes: int
    numel: int


class Touch(NamedTuple):
    """Bytes that an operation's kernels read and write of one tensor, copies in another dtype and its gradient
    included. ``of``: the number of one of the operation's values, a parameter's name, or None: an intermediate.
    ``forward``, ``backward``: by kernels beside products; ``product_forward``, ``product_backward``: by products'."""

    of: int | str | None
    forward: int
    backward: int
    product_forward: int
    product_backward: int


class Operation(NamedTuple):
    """One call of a torch function, as the model's code makes it: attention and norms are single operations.

    ``arguments`` and ``keywords``: as given, a tensor as ``Ref``. ``flops``: of the forward, a multiply-add counts two
    (as torch.utils.flop_counter). ``moved_bytes``: of its tensors, as given and taken. ``kept_bytes``: newly kept for
    backward by autograd on this machine's kernels, each storage counted at the operation that first kept it, parameters
    left out; ``kept``: these storages. ``launches``: kernels that the forward starts; views start none. ``touches``:
    what its kernels read and write. ``back_launches`` and the backward's bytes are 0 where none was traced.
    """

    name: str
    module: str
    reads: tuple[int, ...]
    parameters: tuple[str, ...]
    gives: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    in_place: bool
    flops: int
    moved_bytes: int
    kept_bytes: int
    kept: tuple[Kept, ...] = ()
    launches: int = 1
    touches: tuple[Touch, ...] = ()
    back_launches: int = 0


class Storage(NamedTuple):
    """A piece of memory in a forward, loss and backward. Moments count kernels: it is there from ``born`` to
    ``freed``, both included; ``used``: last by a kernel of the forward. ``operation``: whose forward or backward made
    it. ``of``: as in ``Kept``; in backward the parameter that it is the gradient of, or None. ``kept``: autograd keeps
    it."""

    bytes: int
    numel: int
    born: int
    freed: int
    used: int
    operation: int
    of: int | str | None
    kept: bool


class Timeline(NamedTuple):
    """The memory of one micro-batch's forward, loss and backward, without parameters, buffers, inputs and targets.

    ``forward``: the moment at each operation's end (those of the loss come after the model's). ``backward``: (first
    moment, operation), in order. ``gradients``: (parameter, moment at which its gradient was complete and given up).
    """

    storages: tuple[Storage, ...]
    forward: tuple[int, ...]
    backward: tuple[tuple[int, int], ...]
    gradients: tuple[tuple[str, int], ...]


class Ref(NamedTuple):
    """A tensor among an operation's arguments: a value's number, or a parameter's (or buffer's) name."""

    of: int | str


class Blueprint(Settings):
    """A model for one micro-batch. ``inputs`` and ``outputs`` are numbers of values; ``modules``: path -> class;
    ``lists``: paths of those that are module lists or sequences, of whatever class.

    ``loss``: the operations of the job's loss on the outputs and the ``targets`` (numbers of values), and
    ``timeline``: what forward, loss and backward hold in memory; both where the loss was traced too. ``takers``: paths
    of modules without parameters that were called with a value that depends on one.
    """

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    parameters: tuple[Parameter, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    modules: dict[str, str]
    samples: int
    loss: tuple[Operation, ...] = ()
    targets: tuple[int, ...] = ()
    timeline: Timeline | None = None
    lists: tuple[str, ...] = ()
    takers: tuple[str, ...] = ()

    def within(self, path: str) -> Iterator[Operation]:
        """The operations of the module ``path`` and of those below it, in order."""
        return (operation for operation in self.operations if inside(operation.module, path))

    def flops(self, path: str = "") -> int:
        """Forward FLOPs of a module."""
        return sum(operation.flops for operation in self.within(path))

    def kept_bytes(self, path: str = "") -> int:
        """Bytes that a module's forward keeps for backward, the loss left out."""
        return sum(operation.kept_bytes for operation in self.within(path))

    @cached_property
    def carried_bytes(self) -> tuple[int, ...]:
        """Before each operation, and at the end: bytes of the values that depend on parameters, are there already, and
        are read from then on or given as outputs."""
        return self.there({value for value in self.first_maker if self.values[value].of_model})

    def there(self, values: Collection[int]) -> tuple[int, ...]:
        """Of some values, the bytes before each operation, and at the end, that are there already and needed yet."""
        end = len(self.operations)
        last = {value: number for number, operation in enumerate(self.operations) for value in operation.reads}
        last |= dict.fromkeys(self.outputs, end)
        change = [0] * (end + 2)
        for value in values:
            number = self.first_maker[value]
            if last.get(value, -1) > number:
                change[number + 1] += self.values[value].bytes
                change[last[value] + 1] -= self.values[value].bytes
        return tuple(accumulate(change[:-1]))

    @cached_property
    def first_maker(self) -> dict[int, int]:
        """For each value that an operation gives, the number of the first that does."""
        found: dict[int, int] = {}
        for number, operation in enumerate(self.operations):
            for value in operation.gives:
                found.setdefault(value, number)
        return found

    @cached_property
    def parameter(self) -> dict[str, Parameter]:
        """Parameters and buffers by each of their names."""
        return {name: p for p in self.parameters for name in (p.name, *p.ties)}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """For each value, the numbers of the operations that read it."""
        found: dict[int, list[int]] = {}
        for number, operation in enumerate(self.operations):
            for value in operation.reads:
                found.setdefault(value, []).append(number)
        return {value: tuple(numbers) for value, numbers in found.items()}

    @cached_property
    def maker(self) -> dict[int, int]:
        """For each value that an operation gives, that operation's number."""
        return {value: number for number, operation in enumerate(self.operations) for value in operation.gives}


def inside(path: str, of: str) -> bool:
    """Whether a module's path (or a parameter's name) is ``of`` or lies below it."""
    return not of or path == of or path.startswith(of + ".")


def refs(value: Any) -> Iterable[Ref]:
    """Every tensor among an operation's arguments."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from refs(part)
