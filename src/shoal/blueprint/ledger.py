"""What a traced forward, loss and backward hold in memory: every storage from the kernel that made it to its end."""

from __future__ import annotations

import bisect
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.blueprint.facts import Storage, Timeline, Touch
from shoal.blueprint.grouped import formula
from shoal.blueprint.traffic import is_product, starts, touched

#: Operators whose second and third result are statistics of their input.
NORMS = (
    "aten.native_layer_norm.default", "aten.native_batch_norm.default", "aten._native_batch_norm",
    "aten.native_group_norm.default",
)  # fmt: skip
#: Operators whose result stands for what they read: in another dtype, laid out anew, summed with another gradient.
_STANDS = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.add.Tensor)
#: Operators that sum gradients.
_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class Entry:
    """A storage under way: see ``facts.Storage``. ``sources``: storages, or names of parameters, that it stands for.
    ``gradient``: the parameter that it is a part of the gradient of."""

    def __init__(self, tensor: Tensor, born: int, operation: int) -> None:
        self.bytes, self.born, self.operation = tensor.untyped_storage().nbytes(), born, operation
        self.numel = self.bytes // tensor.element_size()
        self.used = born
        self.freed: int | None = None
        self.of: int | str | None = None
        self.kept = False
        self.sources: list[Entry | str] = []
        self.gradient: str | None = None


class _Tensors(NamedTuple):
    """What an operation takes and gives: by storage, and in order, each with its count of numbers."""

    of: dict[Entry, int]
    taken: list[tuple[int | str, int]]
    given: list[tuple[int | str, int]]


class Ledger(TorchDispatchMode):
    """Counts kernels, FLOPs and storages, and tells which operation each belongs to: in forward the one that runs
    (``operation``), in backward the one whose gradient is worked out."""

    def __init__(self, held: dict[int, str]) -> None:
        super().__init__()
        self.held = held  # storages of parameters and buffers, by key: no part of activations
        self.moment = self.flops = self.launches = self.operation = 0
        self.entries: list[Entry] = []
        self.live: dict[int, Entry] = {}
        self.sequence: list[int] = []  # autograd's counter at the end of each operation
        self.forward: list[int] = []  # the moment at the end of each operation
        self.backward: list[tuple[int, int]] = []
        self.gradients: list[tuple[str, int]] = []
        self._backs: Callable[[], int] | None = None
        self._watched: list[Any] = []
        self._tensors: list[_Tensors] = []
        self._makers: dict[int | str | None, int] = {}  # of values
        #: Of each operation, by storage, parameter or count of numbers: bytes as in ``facts.Touch``.
        self._touched: dict[int, dict[Entry | str | int, list[int]]] = {}
        self.back_launches: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counted = formula(func)
        if counted is not None:
            self.flops += counted(*args, **(kwargs or {}), out_val=result)
        self.moment += 1
        if self.backward or self._backs:
            self.operation = self._of_backward()
        if not self.backward:
            self._use(args)
        if str(func).startswith(NORMS):
            self._statistics(result)
        made = [self._see(tensor, func, args) for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        if starts(func, any(made)):
            self._started(func, args, kwargs or {}, result)
        return result

    def _started(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count a kernel with what it reads and writes, at its operation."""
        self.launches += 1
        back = bool(self.backward)
        operation = self._summed_at(func, args) if back else self.operation
        self.back_launches[operation] += back
        place = back + 2 * is_product(func)
        found = self._touched.setdefault(operation, {})
        for tensor, nbytes in touched(func, args, kwargs, result):
            key = tensor.untyped_storage()._cdata
            of = self.held.get(key) or self.live.get(key) or tensor.numel()
            found.setdefault(of, [0, 0, 0, 0])[place] += nbytes

    def _summed_at(self, func: Any, args: Any) -> int:
        """The operation that a kernel of the backward counts to. Gradients of a value that several read are summed as
        each comes: at the operation that gave the value."""
        if func not in _SUMS or self.operation >= len(self._tensors) or not isinstance(args[1], Tensor):
            return self.operation
        born = [self.live.get(tensor.untyped_storage()._cdata) for tensor in args[:2]]
        if all(entry is None or entry.operation == self.operation for entry in born):
            return self.operation
        taken = self._tensors[self.operation].taken
        of = next((of for of, size in taken if size == args[0].numel()), None)
        return self._makers.get(of, self.operation)

    def _statistics(self, result: Any) -> None:
        """A norm's mean and deviation are float32 where its input is narrower; the fake kernel says otherwise."""
        for tensor in result[1:3]:
            entry = self.entry(tensor)
            if entry is not None:
                entry.bytes = max(entry.bytes, 4 * tensor.numel())

    def _use(self, args: Any) -> None:
        """A kernel of the forward reads these."""
        for tensor in tree_leaves(args):
            entry = self.live.get(tensor.untyped_storage()._cdata) if isinstance(tensor, Tensor) else None
            if entry is not None:
                entry.used = self.moment

    def given(self, tensor: Tensor, number: int) -> None:
        """An input or target: there before the first operation."""
        entry = self.entry(tensor)
        if entry is not None:
            entry.of, entry.operation = number, -1

    def entry(self, tensor: Tensor) -> Entry | None:
        """A tensor's storage, entered where no kernel was seen to make it; None for a parameter's or buffer's."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.held:
            return None
        if key not in self.live:
            self.live[key] = Entry(tensor, self.moment, self.operation)
            self.entries.append(self.live[key])
            self._watched.append(weakref.ref(storage, lambda _, key=key: self._end(key)))
        return self.live[key]

    def _see(self, tensor: Tensor, func: Any, args: Any) -> bool:
        """Enter a storage that is new."""
        key = tensor.untyped_storage()._cdata
        if key in self.live or key in self.held:
            return False
        entry = self.entry(tensor)
        if entry is not None and func in _STANDS:
            keys = [one.untyped_storage()._cdata for one in args if isinstance(one, Tensor)]
            found = [self.held.get(key) or self.live.get(key) for key in keys]
            entry.sources = [source for source in found if source is not None]
        if entry is not None and func is torch.ops.aten._to_copy.default:
            key = args[0].untyped_storage()._cdata
            source = self.live.get(key)
            entry.of = self.held.get(key, source.of if source and not self.backward else None)
        return True

    def _end(self, key: int) -> None:
        entry = self.live.pop(key, None)
        if entry is not None:
            entry.freed = self.moment

    def operation_ended(self, reads: Sequence[tuple[int | str, Tensor]], gives: Sequence[tuple[int, Tensor]]) -> None:
        """An operation is recorded: it takes these values and parameters, and its results are these values."""
        of: dict[Entry, int] = {}
        for number, tensor in reads:
            entry = self.live.get(tensor.untyped_storage()._cdata)
            if entry is not None and isinstance(number, int):
                of.setdefault(entry, number)
        for number, tensor in gives:
            entry = self.live.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry.of is None:
                entry.of = number
            if entry is not None:
                of.setdefault(entry, number)
            self._makers[number] = self.operation
        sizes = [[(number, tensor.numel()) for number, tensor in each] for each in (reads, gives)]
        self._tensors.append(_Tensors(of, *sizes))
        self.sequence.append(torch.autograd._get_sequence_nr())
        self.forward.append(self.moment)
        self.operation += 1

    def _of_backward(self) -> int:
        """The operation whose backward runs. Accumulating a weight's gradient belongs to the one before."""
        node = torch._C._current_autograd_node()
        operation = self.operation
        if node is not None and node._sequence_nr() < 2**63:
            operation = bisect.bisect_right(self.sequence, node._sequence_nr())
        if not self.backward or self.backward[-1][1] != operation:
            self.backward.append((self.moment, operation))
        return operation

    def run_backward(self, loss: Tensor, parameters: dict[str, Tensor]) -> None:
        """Autograd's backward, in which each weight's gradient is given up once it is complete."""

        def complete(name: str, parameter: Tensor) -> None:
            grad = parameter.grad
            self.gradients.append((name, self.moment))
            entry = self.live.get(grad.untyped_storage()._cdata) if grad is not None else None
            if entry is not None:
                entry.of = name
                _mark(entry, name)
            parameter.grad = None

        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: complete(name, p))
        torch.clear_autocast_cache()  # as on leaving autocast, within which no backward runs
        self._backs = self._of_backward
        self.operation = len(self.sequence)
        loss.backward()

    def touches(self, operation: int) -> tuple[Touch, ...]:
        """What the kernels of an operation read and write, once the backward is over."""
        found: dict[tuple[int | str | None, int], list[int]] = {}
        for key, counts in self._touched.get(operation, {}).items():
            of = self._stands_for(key, operation)
            numel = 0 if of is not None else key.numel if isinstance(key, Entry) else int(key)
            sums = found.setdefault((of, numel), [0, 0, 0, 0])
            sums[:] = (mine + more for mine, more in zip(sums, counts, strict=True))
        return tuple(Touch(of, *counts) for (of, _), counts in found.items() if any(counts))

    def _stands_for(self, key: Entry | str | int, operation: int) -> int | str | None:
        """The operation's own value, or the parameter, that a storage is, is a copy of, or is the gradient of."""
        if isinstance(key, str):
            return key
        tensors = self._tensors[operation]
        taken, given = tensors.taken, tensors.given
        if isinstance(key, Entry):
            if (own := tensors.of.get(key, key.gradient)) is not None:
                return own
            for source in key.sources:
                if (of := source if isinstance(source, str) else tensors.of.get(source)) is not None:
                    return of
            if isinstance(key.of, str):
                return key.of
            if key.operation != operation:
                taken, given = given, taken  # a gradient that comes in is of what the operation gave
        numel = key.numel if isinstance(key, Entry) else key
        return next((of for of, size in (*taken, *given) if size == numel), None)

    def timeline(self) -> Timeline:
        """All that was seen. What lives on at the end is freed there."""
        self._watched.clear()
        return Timeline(
            tuple(self._storage(entry) for entry in self.entries if entry.bytes),
            tuple(self.forward), tuple(self.backward), tuple(self.gradients),
        )  # fmt: skip

    def _storage(self, entry: Entry) -> Storage:
        freed = self.moment if entry.freed is None else entry.freed
        return Storage(entry.bytes, entry.numel, entry.born, freed, entry.used, entry.operation, entry.of, entry.kept)


def _mark(entry: Entry, name: str) -> None:
    """A gradient and what it was summed or copied from are of a parameter."""
    waiting: list[Entry | str] = [entry]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Entry) and one.gradient is None:
            one.gradient = name
            waiting += one.sources
