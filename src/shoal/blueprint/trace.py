"""model -> Blueprint: one forward on fake tensors, watched where the model's code calls torch.

Watching torch's own functions rather than exporting a graph keeps the model live (any Python, any structure of inputs
and outputs), and gives attention, norms and losses as the single operations that the code asked for.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode, resolve_name

from shoal.blueprint.facts import Blueprint, Kept, Operation, Parameter, Ref, Value
from shoal.blueprint.known import Known
from shoal.blueprint.ledger import Entry, Ledger
from shoal.blueprint.structures import mapped, tensors, unchanged_attributes, with_tensors
from shoal.core.errors import ModelError

#: What torch raises where code asks for a value of a tensor that has none.
_READS = (DataDependentOutputException, DynamicOutputShapeException)


class Ending(NamedTuple):
    """What follows a model's forward in a step: ``loss(output, targets)`` as a job has it, and example targets."""

    loss: Callable[[Any, Any], Any]
    targets: Any


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int = 1, ending: Ending | None = None
) -> Blueprint:
    """The blueprint of ``model`` (in its present mode, train or eval) for one micro-batch of ``samples``.

    Nothing is computed; parameters may be on any device, also meta. With ``ending`` the loss is traced too, and a
    backward through both is run on fake tensors, to know what they hold in memory. Raises ModelError naming the module
    that needs data.
    """
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes:
        held = {name: _fake(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    watcher = _Watcher(model, held)
    fake_args, fake_kwargs = watcher.taken(fakes, args), watcher.taken(fakes, kwargs)
    inputs = tuple(watcher.values_of((fake_args, fake_kwargs)))
    targets = watcher.taken(fakes, ending.targets) if ending else None
    hooks = watcher.hooks(model)
    outputs: list[int] = []

    def forward() -> Any:
        with watcher:
            with with_tensors(model, held):
                result = model(*fake_args, **fake_kwargs)
            outputs.extend(watcher.values_of(result))
            watcher.end_model()
            return ending.loss(result, targets) if ending else None

    try:
        with (
            torch.random.fork_rng(devices=[]),
            unchanged_attributes(model),
            torch.autograd.graph.saved_tensors_hooks(watcher.kept, lambda tensor: tensor),
            fakes,
            Known(fakes),
            watcher.ledger,
        ):
            loss = next((t for t in tensors(forward()) if t.requires_grad), None)
            if loss is not None:
                with torch.autocast("cpu", enabled=False):
                    watcher.ledger.run_backward(loss.sum(), held)
    except Exception as error:
        raise ModelError(_why(model, watcher, error)) from error
    finally:
        for hook in hooks:
            hook.remove()
    end = watcher.model_ends
    operations = watcher.with_kernels()
    return Blueprint(
        values=tuple(watcher.values), operations=operations[:end], parameters=tuple(_parameters(model)),
        inputs=inputs, outputs=tuple(outputs), samples=samples,
        modules={path: type(module).__name__ for path, module in model.named_modules()},
        lists=tuple(p for p, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)),
        loss=operations[end:], targets=tuple(watcher.values_of(targets)),
        timeline=watcher.ledger.timeline() if loss is not None else None, takers=tuple(watcher.takers),
    )  # fmt: skip


def _why(model: nn.Module, watcher: _Watcher, error: Exception) -> str:
    failed = watcher.failed or ""
    where = f"module {failed!r} ({type(model.get_submodule(failed)).__name__})" if failed else type(model).__name__
    if watcher.model_ends is not None:
        where = "the loss, or the backward through it and the model,"
    change = (
        "keep values of tensors out of the control flow"
        if isinstance(error, _READS)
        else "where it runs on real data, choose another implementation of it, or replicate and shard alone, which "
        "need no trace"
    )
    return (
        f"the model cannot be traced: {where} cannot run without its data: {type(error).__name__}: "
        f"{str(error).splitlines()[0] if str(error) else ''}; {change}"
    )


class _Watcher(TorchFunctionMode):
    """Turns each call of a torch function into an Operation."""

    def __init__(self, model: nn.Module, held: dict[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in held.items()}
        self.ledger = Ledger({_storage(tensor): name for name, tensor in held.items()})
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.model_ends: int | None = None  # the operations from here on are the loss's
        self.numbers: dict[int, int] = {}
        self.watched: list[Any] = []
        self.stack: list[str] = [""]
        self.failed: str | None = None  # the innermost module that an error came from
        self.counted_flops = self.counted_launches = 0
        self.newly_kept: list[Entry] = []
        self.takers: dict[str, None] = {}  # in order

    def enter(self, path: str | None) -> None:
        self.stack.append(self.stack[-1] if path is None else path)

    def leave(self, path: str | None) -> None:
        left = self.stack.pop()
        if self.failed is None and sys.exc_info()[0] is not None:
            self.failed = left

    def hooks(self, model: nn.Module) -> list[Any]:
        """Hooks that follow which module runs, and note which of those without parameters are called with a value that
        depends on one."""
        paths = {id(module): path for path, module in reversed(list(model.named_modules()))}

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if any(self.of_model(tensor) for tensor in tensors((args, kwargs))):
                self.takers.setdefault(paths[id(module)])

        bare = (module for module in model.modules() if next(module.parameters(), None) is None)
        return [
            *(module.register_forward_pre_hook(note, with_kwargs=True) for module in bare),
            nn.modules.module.register_module_forward_pre_hook(lambda module, _: self.enter(paths.get(id(module)))),
            nn.modules.module.register_module_forward_hook(
                lambda module, *_: self.leave(paths.get(id(module))), always_call=True
            ),
        ]

    def of_model(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a value that depends on one."""
        number = self.numbers.get(id(tensor))
        return isinstance(tensor, nn.Parameter) or (number is not None and self.values[number].of_model)

    def taken(self, fakes: FakeTensorMode, value: Any) -> Any:
        """The model's inputs as fake tensors."""

        def take(tensor: Tensor) -> Tensor:
            fake = fakes.from_tensor(tensor)
            self.ledger.given(fake, self.number(fake, False))
            return fake

        return mapped(take, value)

    def number(self, tensor: Tensor, of_model: bool) -> int:
        """A new value. It is known by its identity for as long as it lives: tracing keeps nothing alive."""
        key = id(tensor)
        self.numbers[key] = len(self.values)
        self.watched.append(weakref.ref(tensor, lambda _: self.numbers.pop(key, None)))
        nbytes = tensor.numel() * tensor.element_size()
        self.values.append(Value(tuple(tensor.shape), _dtype(tensor), nbytes, of_model, tuple(tensor.stride())))
        return self.numbers[key]

    def values_of(self, found: Any) -> list[int]:
        """The numbers of the values in what a function took or gave."""
        return [self.numbers[id(tensor)] for tensor in tensors(found) if id(tensor) in self.numbers]

    def with_kernels(self) -> tuple[Operation, ...]:
        """The operations with what their kernels did, forward and backward."""
        ledger = self.ledger
        return tuple(
            operation._replace(touches=ledger.touches(number), back_launches=ledger.back_launches[number])
            for number, operation in enumerate(self.operations)
        )

    def end_model(self) -> None:
        """The model's forward is over."""
        self.model_ends = len(self.operations)

    def kept(self, tensor: Tensor) -> Tensor:
        """Autograd keeps a tensor for backward."""
        entry = self.ledger.entry(tensor)
        if entry is not None and not entry.kept:
            entry.kept = True
            self.newly_kept.append(entry)
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        version = None if first is None else first._version
        result = func(*args, **kwargs)
        name = operation_name(func)
        written = first if first is not None and first._version != version else None
        written = written if result is written or name == "setitem" else None
        if name == "getitem" and isinstance(args[1], list):
            args = (args[0], (args[1],))  # as one index that is a list, not as one number for each dimension
        if written is None and not any(True for _ in tensors(result)):
            return result
        given = [written] if written is not None else list(tensors(result))
        if written is None and all(id(t) in self.numbers or id(t) in self.names for t in given):
            return result  # handed through (contiguous of what is, to of the same dtype, dropout of nothing)
        self.record(name, args, kwargs, given, written is not None)
        return result

    def record(self, name: str, args: Any, kwargs: Any, given: list[Tensor], in_place: bool) -> None:
        taken = list(tensors((args, kwargs)))
        for tensor in taken:
            if id(tensor) not in self.numbers and id(tensor) not in self.names:
                self.number(tensor, False)  # made outside torch's functions: a constant
        numbered = [(self.numbers[id(t)] if id(t) in self.numbers else self.names[id(t)], t) for t in taken]
        reads = tuple(of for of, _ in numbered if isinstance(of, int))
        parameters = tuple(of for of, _ in numbered if isinstance(of, str))
        arguments, keywords = self.plain(tuple(args)), tuple((key, self.plain(v)) for key, v in kwargs.items())
        of_model = any(self.of_model(tensor) for tensor in taken)
        gives = tuple(self.number(tensor, of_model) for tensor in given)
        flops, launches = self.ledger.flops, self.ledger.launches
        if name == "scaled_dot_product_attention" and flops == self.counted_flops:
            self.counted_flops -= _attention_flops(*(t.shape for t in taken[:3]))  # a kernel that the counter lacks
        moved = sum(t.numel() * t.element_size() for t in (*taken, *given))
        self.ledger.operation_ended(numbered, list(zip(gives, given, strict=True)))
        kept = tuple(Kept(entry.of, entry.bytes, entry.numel) for entry in self.newly_kept)
        self.operations.append(Operation(
            name, self.stack[-1], reads, parameters, gives, arguments, keywords, in_place,
            flops - self.counted_flops, moved, sum(of.bytes for of in kept), kept, launches - self.counted_launches,
        ))  # fmt: skip
        self.counted_flops, self.counted_launches, self.newly_kept = flops, launches, []

    def plain(self, value: Any) -> Any:
        """An argument without torch in it."""
        if isinstance(value, Tensor):
            return Ref(self.numbers[id(value)] if id(value) in self.numbers else self.names[id(value)])
        if isinstance(value, tuple | list):
            return tuple(self.plain(part) for part in value)
        if isinstance(value, dict):
            return tuple((key, self.plain(part)) for key, part in value.items())
        if isinstance(value, slice):
            return ("slice", value.start, value.stop, value.step)
        if value is Ellipsis:
            return ("ellipsis",)
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value if isinstance(value, int | float | str | bool | type(None)) else str(value)


#: Python's operators on tensors under torch's names.
_OPERATORS = {"truediv": "div", "matmul": "matmul", "rmatmul": "matmul", "rsub": "sub", "radd": "add", "rmul": "mul"}


def operation_name(func: Callable[..., Any]) -> str:
    """``linear``, ``view``, ``add``, ...: the function's own name, in-place forms and operators as the plain one."""
    if getattr(func, "__name__", "") == "__get__":
        return func.__self__.__name__  # a property: T, mT, shape
    name = (resolve_name(func) or getattr(func, "__name__", str(func))).rpartition(".")[2]
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        name = name[1:] if name.startswith("i") and name[1:] in ("add", "sub", "mul", "truediv") else name
    name = name if name == "_" else name.rstrip("_")
    return _OPERATORS.get(name, name)


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Of q k^T and of its product with v, (..., T, D) each; masked parts counted too, as torch's counter does."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _fake(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _parameters(model: nn.Module) -> list[Parameter]:
    names: dict[int, list[str]] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    first = {id(tensor): tensor for _, tensor in tensors}
    return [
        Parameter(
            all_names[0], tuple(first[key].shape), _dtype(first[key]), first[key].numel() * first[key].element_size(),
            first[key].requires_grad, not isinstance(first[key], nn.Parameter), tuple(all_names[1:]),
        )
        for key, all_names in names.items()
    ]  # fmt: skip
