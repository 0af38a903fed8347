"""All ranks gather and reduce the same units in the same order, also where a rank leaves a block out.

A block that this rank does not call takes its turn nonetheless: its collectives run, around nothing, where its call
would have stood, in forward and in backward. Backward visits what forward made in reverse order, on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from shoal.blueprint.structures import mapped, tensors
from shoal.core.errors import ModelError

TURN = "_take_turn"  # the forward method of a unit that is gathered without being called


class Turns:
    """Keeps the order of units in each forward of ``model``."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group
        self.units: dict[str, FSDPModule] = {}
        self.order: list[str] = []
        self.running = False  # inside the model's own forward
        self.on_gathered: dict[str, Callable[[], None]] = {}  # called when a unit's weights are whole
        self._next = 0
        self._passed: list[Tensor] = []
        self._calls: list[str] | None = []  # this rank's calls in the first forward
        self._called: set[int] = set()  # modules whose hooks ran and whose forward comes next

    def before(self, module: nn.Module, path: str) -> None:
        """Hooks that must come before FSDP2's after a forward."""
        if path:
            module.register_forward_hook(_own_memory)
        else:
            module.register_forward_hook(self._end)

    def after(self, unit: FSDPModule, path: str) -> None:
        """Hooks around FSDP2's before a forward, and a forward that is called past them sent back through them."""
        assert isinstance(unit, nn.Module)
        if path:
            self.units[path] = unit
            self.order.append(path)
            setattr(unit, TURN, _nothing)
            register_fsdp_forward_method(unit, TURN)
            unit.register_forward_pre_hook(
                lambda module, args, kwargs: self._call(path, args, kwargs), prepend=True, with_kwargs=True
            )
        else:
            unit.register_forward_pre_hook(self._start, prepend=True)
            self._name_outside_calls(unit)
        unit.register_forward_pre_hook(lambda module, args: self._gathered(module, path))
        self._through_hooks(unit)

    def _start(self, module: nn.Module, args: Any) -> None:
        self.running, self._next, self._passed = True, 0, []

    def _call(self, path: str, args: Any, kwargs: Any) -> Any:
        if not self.running or _in_backward():
            return None
        if self._calls is not None:
            self._calls.append(path)
        place = self.order.index(path)
        if place >= self._next:
            self._pass(place)
            self._next = place + 1
        return self._with_gradient(path, args, kwargs)

    def _pass(self, until: int) -> None:
        """The units that come before ``until`` and were not called take their turns."""
        for path in self.order[self._next : until]:
            token = torch.zeros((), requires_grad=torch.is_grad_enabled())
            self._passed.append(getattr(self.units[path], TURN)(token))
        self._next = max(self._next, until)

    def _with_gradient(self, path: str, args: Any, kwargs: Any) -> Any:
        """Inputs that need a gradient, so that a unit is reduced in its turn and not at backward's end."""
        unit = self.units[path]
        if not torch.is_grad_enabled() or any(t.requires_grad for t in tensors((args, kwargs))):
            return None
        assert isinstance(unit, nn.Module)
        if not any(param.requires_grad for param in unit.parameters()):
            return None
        return mapped(_needing_gradient, args), mapped(_needing_gradient, kwargs)

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._pass(len(self.order))
        self.running = False
        if self._calls is not None:
            self._learn(self._calls)
            self._calls = None
        passed, self._passed = [token for token in self._passed if token.requires_grad], []
        if not passed:
            return None
        kept = next((t for t in tensors(output) if t.requires_grad), None)
        return mapped(lambda t: _Tied.apply(t, *passed) if t is kept else t, output)

    def _learn(self, calls: list[str]) -> None:
        """Collective. From the first forward: the order of calls, where all ranks called all units alike."""
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, calls, group=self.group)
        if all(other == calls for other in every) and set(calls) == set(self.order):
            self.order = list(dict.fromkeys(calls))

    def _gathered(self, module: nn.Module, path: str) -> None:
        self._called.add(id(module))
        if path in self.on_gathered:
            self.on_gathered[path]()

    def _through_hooks(self, module: nn.Module) -> None:
        """``module.forward(x)`` does what ``module(x)`` does, although the hooks that gather sit in the latter."""
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if id(module) not in self._called:
                return module(*args, **kwargs)
            self._called.discard(id(module))
            return plain(*args, **kwargs)

        forward.__wrapped__ = plain  # type: ignore[attr-defined]  # its signature is read by some models
        module.forward = forward

    def _name_outside_calls(self, root: nn.Module) -> None:
        """Where a method of the user's uses weights outside the model's forward, the error says so."""
        for name in _own_methods(type(root)):
            setattr(root, name, _named(getattr(root, name), name))


class _Tied(torch.autograd.Function):
    """The first value, with others in its graph that get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.zeros = [torch.zeros_like(other) for other in others]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], *ctx.zeros


def _own_methods(of: type) -> list[str]:
    """Public methods from classes outside torch, which nn.Module does not have; forward left out."""
    return [
        name
        for cls in reversed(of.__mro__)
        if not cls.__module__.startswith("torch.")
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType) and not name.startswith("_") and not hasattr(nn.Module, name)
    ]


def _named(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            raise ModelError(
                f"{name}() was called outside the model's forward and uses weights that lie in shards there; "
                f"reach it through model(...), or keep what it uses in a block that it calls: {error}"
            ) from error

    return call


def _nothing(token: Tensor) -> Tensor:
    return token + 0


def _needing_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _own_memory(module: nn.Module, args: Any, output: Any) -> Any:
    """Outputs that are views get memory of their own: FSDP2 loses its hook where a view is changed in place."""
    if not torch.is_grad_enabled():
        return None
    return mapped(lambda t: t.clone() if t.requires_grad and t._base is not None else t, output)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
