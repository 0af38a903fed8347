"""Bytes that one kernel reads and writes, tensor by tensor, from the call that starts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shoal.blueprint.grouped import formula

#: Operators that give memory and start no kernel.
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_")
#: Operators that only look at the shape of what they take.
_SHAPES_ALONE = ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full")
#: Tensors of which an operator reads as many numbers as it gives; or none (or one a row), by their place.
_LOOKED_UP = {"embedding": 0, "index": 0, "index_select": 0, "gather": 0, "_unsafe_index": 0}
_UNREAD = {"nll_loss_forward": 0, "nll_loss2d_forward": 0, "nll_loss_backward": 1, "nll_loss2d_backward": 1}
#: Operators in place that do not read what they write; and those that touch as much of it as they are given.
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_")
_IN_PLACES = ("index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_")


def starts(func: Any, made: bool) -> bool:
    """Whether an operator's call starts a kernel. ``made``: a result is new memory; views give none."""
    return (made or func._schema.is_mutable) and _name(func) not in _EMPTY


def is_product(func: Any) -> bool:
    """Whether it is a kernel of products, whose arithmetic may take longer than its traffic."""
    return formula(func) is not None or _name(func).startswith("_scaled_dot_product")


def touched(func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[tuple[Tensor, int]]:
    """Tensors that a kernel reads or writes and the bytes of it; what broadcasts is read once."""
    name, schema = _name(func), func._schema
    written = [
        value
        for place, argument in enumerate(schema.arguments)
        if schema.is_mutable and argument.alias_info is not None and argument.alias_info.is_write
        for value in _flat(args[place] if place < len(args) else kwargs.get(argument.name))
    ]
    results = [tensor for tensor in _flat(result) if not any(tensor is other for other in written)]
    given = list(_flat(args)) + list(_flat(list(kwargs.values())))
    looked_up = args[_LOOKED_UP[name]] if name in _LOOKED_UP else None
    unread = args[_UNREAD[name]] if name in _UNREAD else None
    for tensor in () if name in _SHAPES_ALONE else given:
        if tensor is unread or any(tensor is other for other in written):
            continue
        if tensor is looked_up:
            yield from ((one, _bytes(one)) for one in results)
        else:
            yield tensor, _bytes(tensor)
    for tensor in written:
        others = sum(_bytes(one) for one in given if one is not tensor and one.dtype == tensor.dtype)
        once = min(others, _bytes(tensor)) if name in _IN_PLACES else _bytes(tensor)
        yield tensor, once * (1 if name in _OVERWRITES else 2)
    for tensor in results:
        yield tensor, _bytes(tensor)


def _name(func: Any) -> str:
    return func._overloadpacket.__name__


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)


def _bytes(tensor: Tensor) -> int:
    """Of the numbers in memory: along what is expanded there is one."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count
