"""Tensors inside what models take and return: tensors, tuples, lists, dicts and dataclasses, nested."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def stands_for_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or what a technique shows in its place while a module runs."""
    return isinstance(tensor, nn.Parameter) or getattr(tensor, "_stands_for_parameter", False)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in ``value``, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with each tensor changed; containers are new where a tensor lies in them, and of the same class."""
    if isinstance(value, Tensor):
        return change(value)
    if next(tensors(value), None) is None:
        return value
    if isinstance(value, dict):
        return _refilled(value, {key: mapped(change, part) for key, part in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, part) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(mapped(change, part) for part in value)
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(made, field.name, mapped(change, getattr(value, field.name)))
    return made


def _refilled(value: dict[Any, Any], parts: dict[Any, Any]) -> Any:
    """A dict of ``value``'s class: some (a model's output that is a dataclass and a dict in one) keep both in step."""
    made = copy.copy(value)
    for key, part in parts.items():
        made[key] = part
    return made


_OF_MODULES = frozenset(vars(nn.Module()))


def attributes(module: nn.Module) -> dict[str, Any]:
    """What a module keeps beside parameters, buffers, parts and hooks, by name."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


@contextlib.contextmanager
def unchanged_attributes(model: nn.Module) -> Iterator[None]:
    """What modules keep between forwards (counters, states, caches, lists of such) is afterwards as it was before."""
    before = [(module, attributes(module)) for module in model.modules()]
    inside = [
        (value, copy.copy(value)) for _, kept in before for value in kept.values() if type(value) in (list, dict, set)
    ]
    try:
        yield
    finally:
        for value, kept in inside:
            value.clear()
            value.extend(kept) if isinstance(value, list) else value.update(kept)
        for module, kept in before:
            for name in attributes(module).keys() - kept.keys():
                del vars(module)[name]
            vars(module).update(kept)


@contextlib.contextmanager
def with_tensors(module: nn.Module, held: Mapping[str, Tensor]) -> Iterator[None]:
    """Parameters and buffers of ``module`` are those of ``held`` within, by the first of their names; ties stay ties.

    Also where modules list them beside, as recurrent layers do. (``torch.func.functional_call`` does not give back
    those of a module that stands at two paths.)
    """
    own = [*module.named_parameters(), *module.named_buffers()]
    new = {id(tensor): held[name] for name, tensor in own if name in held}
    places: list[dict[str, Any]] = [d for each in module.modules() for d in (each._parameters, each._buffers)]
    before = [dict(registered) for registered in places]
    beside = [
        (each, name, value)
        for each in module.modules()
        for name, value in attributes(each).items()
        if any(id(tensor) in new for tensor in tensors(value))
    ]
    try:
        for each, name, value in beside:
            vars(each)[name] = mapped(lambda tensor: new.get(id(tensor), tensor), value)
        for registered in places:
            for leaf, tensor in registered.items():
                registered[leaf] = new.get(id(tensor), tensor)
        yield
    finally:
        for registered, tensors_before in zip(places, before, strict=True):
            registered.clear()
            registered.update(tensors_before)
        for each, name, value in beside:
            vars(each)[name] = value
