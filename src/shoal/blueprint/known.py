"""Values that a model makes itself, from shapes and numbers alone, are known although its tensors are fake.

A mask or a range of positions needs no data, so that a run's Python code may decide by it: whether a mask hides
anything, which places it names. On fake tensors such a question has no answer, or the code sees that it is traced and
does not ask. Here every small tensor that comes of no input, weight or random number has a real twin beside it, which
answers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

LARGEST = 2**22  # numbers of a tensor that has a twin: what is larger is not worked out
#: Functions of a tensor's shape alone, whatever lies in it.
OF_SHAPE = frozenset(
    f"aten::{name}" for value in ("zeros", "ones", "full") for name in (f"new_{value}", f"{value}_like")
)
#: What gives memory as it is.
UNFILLED = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided")
)
#: What makes a tensor of Python's numbers.
LIFTED = ("aten::lift_fresh", "aten::lift_fresh_copy")
ANSWERS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Known(TorchDispatchMode):
    """Keeps the twins while it is on, above ``fakes``. What is written from data is not known from then on."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.twins = WeakTensorKeyDictionary()

    def __enter__(self) -> Known:
        self.faces = contextlib.ExitStack()
        self.faces.enter_context(_as_in_a_run(self.twins))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.faces.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # seen again as operations on what lies within
        with torch._C.DisableTorchFunctionSubclass():
            return self._done(func, args, kwargs or {})

    def _done(self, func: Any, args: Any, kwargs: Any) -> Any:
        known = self._known(func, args, kwargs)
        if known and any(tag in func.tags for tag in ANSWERS):
            answer = self._real(func, args, kwargs)
            result = tree_map_only(Tensor, self.fakes.from_tensor, answer)
            return self._twinned(result, answer)
        result = func(*args, **kwargs)
        if known and all(_small(tensor) for tensor in _tensors(result)):
            return self._twinned(result, self._real(func, args, kwargs))
        for value, argument in zip([*args, *kwargs.values()], _schema(func, args, kwargs), strict=True):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._forget(value)
        return result

    def _known(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a function's result follows from what is known."""
        name = func._schema.name
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags or name in UNFILLED:
            return False
        if name in LIFTED:
            return not isinstance(args[0], FakeTensor)
        return name in OF_SHAPE or all(tensor in self.twins for tensor in _tensors((args, kwargs)))

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function's result on the twins."""
        with _disable_current_modes():
            if func._schema.name in LIFTED:
                return args[0].clone()
            return func(*tree_map_only(Tensor, self._twin, args), **tree_map_only(Tensor, self._twin, kwargs))

    def _twin(self, tensor: Tensor) -> Tensor:
        """A known tensor's; of another one, whose shape alone is asked for, one without its values."""
        if tensor in self.twins:
            return self.twins[tensor]
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def _twinned(self, result: Any, real: Any) -> Any:
        for tensor, twin in zip(_tensors(result), _tensors(real), strict=True):
            self.twins[tensor] = twin
        return result

    def _forget(self, written: Any) -> None:
        """What shares memory with a tensor that was written."""
        storages = {tensor.untyped_storage()._cdata for tensor in _tensors(written)}
        for tensor in [each for each in self.twins if each.untyped_storage()._cdata in storages]:
            del self.twins[tensor]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _schema(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The declarations of the arguments that were given."""
    declared = func._schema.arguments
    named = {argument.name: argument for argument in declared}
    return [*declared[: len(args)], *(named[name] for name in kwargs)]


def _small(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() <= LARGEST


@contextlib.contextmanager
def _as_in_a_run(twins: Any) -> Iterator[None]:
    """Code outside torch that asks whether a tensor is fake is told no where its value is known: it then asks for the
    value, as in a run."""

    class Asked(type(FakeTensor)):
        def __instancecheck__(cls, instance: Any) -> bool:
            asks = sys._getframe(1).f_globals.get("__name__", "")
            told = asks.partition(".")[0] == "torch" or not isinstance(instance, Tensor) or instance not in twins
            return told and isinstance(instance, FakeTensor)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, FakeTensor)

    face = Asked("FakeTensor", (FakeTensor,), {})
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] not in ("torch", "shoal")]
    places = [getattr(module, "__dict__", {}) for module in (torch._subclasses, *modules)]
    places = [place for place in places if place.get("FakeTensor") is FakeTensor]
    for place in places:
        place["FakeTensor"] = face
    try:
        yield
    finally:
        for place in places:
            place["FakeTensor"] = FakeTensor
