"""Running part of a model's own forward: the blocks of other stages are skipped, their results stand as placeholders.

A forward is a sequence of events: calls of units (blocks, and modules beside them) and the operations between them.
Every stage runs the same Python code, the model's own ``forward``. Events before a stage's first one only hand out
placeholders (fake tensors: shape and dtype without data); from there on placeholders that were received stand for real
values; after its last event the forward is left. What depends on no parameter (masks, rotary tables, positions) is
computed on every stage from the inputs, which all stages have, so it never crosses.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode, resolve_name

from shoal.blueprint.facts import inside
from shoal.blueprint.structures import attributes, mapped, stands_for_parameter, tensors, with_tensors
from shoal.core.errors import ModelError
from shoal.parallel.pipeline.units import has_parameters, shapes_of, unit_paths
from shoal.parallel.shapes import Shapes


class Event(NamedTuple):
    """A call of a unit or an operation between units: what it reads and gives, by numbers of values."""

    what: str
    reads: tuple[int, ...]
    parameters: tuple[str, ...]
    gives: tuple[int, ...]
    changes: bool  # the first value given is the first argument, overwritten
    result: Any  # placeholders where the result has tensors


class Recording(NamedTuple):
    """One forward for inputs of given shapes. ``values``: a placeholder for each value, by number."""

    events: tuple[Event, ...]
    values: tuple[FakeTensor, ...]
    returned: tuple[int, ...]  # values in what the model returned
    overwritten: frozenset[int]  # values that a later event changes in place


class Skeleton:
    """A model cut into units; ``paths`` are theirs in the order of the model's modules.

    What is recorded runs on a twin that has the model's code and shapes only, so that what is later done to the live
    model (parts given up, shards, hooks) plays no part in it.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.paths = unit_paths(model)
        self.fakes = Shapes(allow_non_fake_inputs=True)
        self.twin = shapes_of(model, self.paths)
        self.names = {id(param): name for name, param in self.twin.named_parameters()}
        for path in self.paths:
            for module in (model.get_submodule(path), self.twin.get_submodule(path)):
                module._compiled_call_impl = functools.partial(_call, module, path, module._compiled_call_impl)

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """The events of a forward on these inputs, without running any unit for real. Raises ModelError."""
        for path, module in self.twin.named_modules():
            module.training = self.model.get_submodule(path).training
        recorder = _Recorder(self, {})
        with _active(recorder):
            result = self.twin(*args, **kwargs)
        if left := self.left_behind(recorder):
            with _active(_Recorder(self, left)):
                self.twin(*args, **kwargs)
        returned = tuple(recorder.numbers[id(t)] for t in tensors(result) if id(t) in recorder.numbers)
        recorder.check_views(returned)
        return Recording(tuple(recorder.events), tuple(recorder.values), returned, frozenset(recorder.overwritten))

    def left_behind(self, recorder: _Recorder) -> dict[int, str]:
        """Values that depend on parameters and that a forward left in a module outside of the units, by identity."""
        outside = ((p, m) for p, m in self.twin.named_modules() if not any(inside(p, unit) for unit in self.paths))
        return {
            id(tensor): f"{path}.{name}" if path else name
            for path, module in outside
            for name, value in (attributes(module) | module._buffers).items()
            for tensor in tensors(value)
            if id(tensor) in recorder.numbers
        }

    def run(
        self,
        recording: Recording,
        span: range,
        received: dict[int, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[dict[int, Tensor], Any]:
        """Run the events in ``span`` for real; every value that is then real, by number, and what the model returned
        (None unless the span reaches the end)."""
        part = _Part(recording, span, received)
        result = None
        with _active(part), contextlib.suppress(_LeaveForward):
            result = mapped(part.real, self.model(*args, **kwargs))
        return part.known, result

    def fake_of(self, tensor: Tensor) -> Tensor:
        """A fake tensor on the run's device with the shape and dtype of a parameter or buffer."""
        with self.fakes:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class _LeaveForward(Exception):
    """Raised after a stage's last event; hooks that are always called are called on the way out."""


_passes: list[_Pass] = []


class _active:
    """Make a pass the one that units and operations report to."""

    def __init__(self, made: _Pass) -> None:
        self.made = made

    def __enter__(self) -> None:
        _passes.append(self.made)
        self.made.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.made.__exit__(*error)
        _passes.pop()


def _call(module: nn.Module, path: str, compiled: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """What stands before a unit's own call: report to the pass, where one is active and not inside a unit."""
    run = compiled or module._call_impl
    made = _passes[-1] if _passes else None
    if made is None or made.inside:
        return run(*args, **kwargs)
    return made.unit(module, path, run, args, kwargs)


class _Pass(TorchFunctionMode):
    """One forward. Values that depend on a parameter have numbers, by the identity of what stands for them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.numbers: dict[int, int] = {}
        self.held: list[Tensor] = []  # alive until the end, so that no identity is used twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside or not any(self.of_model(t) for t in tensors((args, kwargs))):
            return func(*args, **kwargs)
        return self.operation(func, args, kwargs)

    def of_model(self, tensor: Tensor) -> bool:
        """Whether a value depends on a parameter, or is one."""
        return id(tensor) in self.numbers or stands_for_parameter(tensor)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def unit(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def number(self, tensor: Tensor, number: int) -> None:
        self.numbers[id(tensor)] = number
        self.held.append(tensor)

    def read(self, values: Any) -> tuple[int, ...]:
        return tuple(self.numbers[id(t)] for t in tensors(values) if id(t) in self.numbers)


def _name(func: Any) -> str:
    return resolve_name(func) or getattr(func, "__name__", str(func))


class _Recorder(_Pass):
    """Finds the events: units and operations that depend on parameters run on fake tensors, the rest for real.

    ``left``: values that an earlier forward left in the model, none of which may be read: stages that leave the forward
    before would read older ones."""

    def __init__(self, skeleton: Skeleton, left: dict[int, str]) -> None:
        super().__init__()
        self.skeleton, self.left = skeleton, left
        self.events: list[Event] = []
        self.values: list[FakeTensor] = []
        self.overwritten: set[int] = set()
        self.writes: list[tuple[int, str, frozenset[int]]] = []  # event, its name, views of what it overwrote
        self.parameters: dict[int, Tensor] = {}

    def of_model(self, tensor: Tensor) -> bool:
        if id(tensor) in self.left:
            raise ModelError(
                f"the model keeps {self.left[id(tensor)]!r}, which depends on weights, from one forward to the next, "
                "and not every stage of a pipeline works it out; keep it inside of a block, or use a layout without a "
                "pipeline"
            )
        return super().of_model(tensor)

    def read(self, values: Any) -> tuple[int, ...]:
        return tuple(self.numbers[id(t)] for t in tensors(values) if self.of_model(t) and id(t) in self.numbers)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = _name(func)
        reads = self.read((args, kwargs))
        direct = [t for t in tensors((args, kwargs)) if isinstance(t, nn.Parameter)]
        fake_args, fake_kwargs = mapped(self.fake, args), mapped(self.fake, kwargs)
        first = fake_args[0] if fake_args and isinstance(fake_args[0], Tensor) else None
        version = None if first is None else first._version
        result = self.on_fakes(name, lambda: func(*fake_args, **fake_kwargs))
        written = first is not None and first._version != version and result is first
        if next(tensors(result), None) is None and not name.endswith("__setitem__"):
            return result  # a shape, a dtype, a flag: the same on every stage
        changed = self.changed_in_place(name, args, written or bool(args) and result is args[0])
        return self.event(name, reads, [self.skeleton.names[id(p)] for p in direct], result, changed)

    def unit(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not has_parameters(module) and not any(self.of_model(t) for t in tensors((args, kwargs))):
            return _inside(self, run, args, kwargs)
        own = {name: self.fake(t) for name, t in module.named_parameters()}
        own |= {name: self.skeleton.fake_of(t) for name, t in module.named_buffers()}
        fake_args, fake_kwargs = mapped(self.fake, args), mapped(self.fake, kwargs)
        with with_tensors(module, own):
            result = self.on_fakes(path, lambda: module(*fake_args, **fake_kwargs))
        direct = [self.skeleton.names[id(p)] for p in module.parameters()]
        return self.event(f"unit {path}", self.read((args, kwargs)), direct, result, None)

    def on_fakes(self, what: str, run: Callable[[], Any]) -> Any:
        try:
            with self.skeleton.fakes:
                return _inside(self, run, (), {})
        except Exception as error:
            raise ModelError(
                f"{what} cannot run without its data, which a pipeline needs to know the shapes that cross between "
                f"stages: {type(error).__name__}: {error}; keep values out of the control flow around blocks, or use a "
                "layout without a pipeline"
            ) from error

    def event(self, what: str, reads: Any, direct: list[str], result: Any, changed: Tensor | None) -> Any:
        given = []
        for tensor in [*([changed] if changed is not None else []), *tensors(result)]:
            if tensor is changed and given:
                continue
            if tensor is not changed and id(tensor) in self.numbers:
                given.append(self.numbers[id(tensor)])  # handed through
                continue
            if tensor is changed:
                self.overwritten.add(self.numbers[id(tensor)])
            given.append(len(self.values))
            self.number(tensor, len(self.values))
            self.values.append(tensor)  # type: ignore[arg-type]
        self.events.append(Event(what, reads, tuple(direct), tuple(given), changed is not None, result))
        return result

    def changed_in_place(self, name: str, args: Any, returned: bool) -> Tensor | None:
        """The placeholder that an operation overwrote, which it ``returned``. Raises ModelError where it belongs to no
        stage."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not (returned or name.endswith("__setitem__")):
            return None
        if id(first) not in self.numbers:
            raise ModelError(
                f"{name} writes a value that depends on weights into one that does not, between blocks; "
                "build a new tensor instead (torch.cat, torch.where), or use a layout without a pipeline"
            )
        storage = first.untyped_storage()._cdata
        views = [n for n, t in enumerate(self.values) if t is not first and t.untyped_storage()._cdata == storage]
        self.writes.append((len(self.events), name, frozenset(views)))
        return first

    def check_views(self, returned: tuple[int, ...]) -> None:
        """Raises ModelError where a view is read after what it looks at was overwritten: its stage may not see that."""
        for at, name, views in self.writes:
            later = {number for event in self.events[at + 1 :] for number in event.reads} | set(returned)
            if views & later:
                raise ModelError(
                    f"{name} overwrites a tensor between blocks that another, read later, is a view of; "
                    "use the form that gives a new tensor, or a layout without a pipeline"
                )

    def fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if isinstance(tensor, nn.Parameter):
            if id(tensor) not in self.parameters:
                self.parameters[id(tensor)] = self.skeleton.fake_of(tensor)
            return self.parameters[id(tensor)]
        return self.skeleton.fakes.from_tensor(tensor)


class _Part(_Pass):
    """The events of one stage."""

    def __init__(self, recording: Recording, span: range, received: dict[int, Tensor]) -> None:
        super().__init__()
        self.recording, self.span = recording, span
        self.known = dict(received)
        self.at = 0

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.recording.events[self.at : self.at + 1] and self.recording.events[self.at].what == _name(func):
            return self.event(_name(func), func, args, kwargs)
        result = func(*mapped(self.real, args), **mapped(self.real, kwargs))  # a shape or a flag, or another path
        if next(tensors(result), None) is not None:
            self.other_path(_name(func))
        return result

    def unit(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not has_parameters(module) and not any(self.of_model(t) for t in tensors((args, kwargs))):
            return _inside(self, run, args, kwargs)
        return self.event(f"unit {path}", run, args, kwargs)

    def event(self, what: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.at == self.span.stop:
            raise _LeaveForward
        if self.at >= len(self.recording.events) or self.recording.events[self.at].what != what:
            self.other_path(what)
        event = self.recording.events[self.at]
        self.at += 1
        if self.at <= self.span.start:
            for number in event.gives:
                self.number(self.recording.values[number], number)
            return mapped(lambda tensor: tensor, event.result)
        real_args, real_kwargs = mapped(self.real, args), mapped(self.real, kwargs)
        result = _inside(self, run, real_args, real_kwargs)
        given = list(tensors(result))
        if event.changes:
            given = [real_args[0], *(tensor for tensor in given if tensor is not real_args[0])]
        for tensor, number in zip(given, event.gives, strict=True):
            self.number(tensor, number)
            self.known[number] = tensor
        return result

    def real(self, tensor: Tensor) -> Tensor:
        """The real tensor that a placeholder stands for, where it is known."""
        return self.known.get(self.numbers.get(id(tensor), -1), tensor)

    def other_path(self, what: str) -> None:
        expected = self.recording.events[self.at].what if self.at < len(self.recording.events) else "the end"
        raise ModelError(
            f"the model's forward came to {what} where it came to {expected} when it was recorded for the same shapes; "
            "a pipeline needs the same path between blocks for all data of one shape"
        )


def _inside(made: _Pass, run: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Run what belongs to one event, unobserved."""
    before, made.inside = made.inside, True
    taken = _pop_mode() if _get_current_function_mode() is made else None
    try:
        return run(*args, **kwargs)
    finally:
        made.inside = before
        if taken is not None:
            _push_mode(taken)
