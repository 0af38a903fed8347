"""A tensor of which this rank holds a part, and torch's functions on it.

A ``Part`` holds the rank's own values and answers the model's code with the whole shape, so that code with literal
sizes runs as it stands. Functions run on the parts alone where a rule (blueprint/rules.py) says how; where none does,
the whole tensor is gathered and the function runs on it as on one device: slower, never wrong.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from shoal.blueprint.calls import Call, Outcome
from shoal.blueprint.layers import CASTS, CONVOLUTIONS, LAYERS, TRANSPOSES
from shoal.blueprint.positions import Positions
from shoal.blueprint.rules import rule
from shoal.blueprint.split import Refusal, Seen, Split
from shoal.blueprint.trace import operation_name
from shoal.core.errors import ModelError
from shoal.parallel.tensor.functions import HOW, attention_layer
from shoal.parallel.tensor.moves import Group, enter, enter_whole, gather, take, total, total_part


class Part(Tensor):
    """This rank's part of a tensor; made by ``marked``.

    ``_positions``: of a weight whose results are sums over the group: of these, a rank keeps its positions.
    """

    _split: Split
    _group: Group
    _made_in: int | None
    _positions: Positions | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _run(func, args, kwargs or {})


@functools.cache
def _part_of(kind: type[Tensor]) -> type[Part]:
    """The class of parts of tensors of a class: one that handles operations itself (fake tensors) goes on doing so."""
    if kind.__torch_dispatch__ is Part.__torch_dispatch__:  # type: ignore[attr-defined]
        return Part
    return kind if issubclass(kind, Part) else type(f"{kind.__name__}Part", (Part, kind), {})


def _node() -> Any:
    """The backward node that runs, None outside backward."""
    return torch._C._current_autograd_node()


def _in_backward() -> int | None:
    """The number of the backward node that runs, None outside backward."""
    node = _node()
    return None if node is None else node._sequence_nr()


def marked(tensor: Tensor, split: Split, group: Group, positions: Positions | None = None) -> Part:
    """A fresh tensor as this rank's part."""
    tensor.__class__ = _part_of(type(tensor))
    tensor._split, tensor._group, tensor._made_in = split, group, _in_backward()  # type: ignore[attr-defined]
    tensor._positions = positions  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def plain(tensor: Tensor) -> Tensor:
    """Collective. The whole tensor of a part; what is no part as it is. No function mode sees it happen: it is no
    operation of the model's (a pipeline stage holds those against what it recorded)."""
    if not isinstance(tensor, Part):
        return tensor
    with torch._C.DisableTorchFunction():
        return gather(tensor, tensor._split, tensor._group)


#: Functions that ask about a tensor and do not depend on how much of it is here.
_ASKS = """
    dim ndim ndimension device dtype is_cuda is_cpu requires_grad is_leaf layout is_floating_point
    is_complex is_contiguous element_size get_device is_sparse is_quantized is_nested is_meta is_mps
    is_xpu grad_fn _version requires_grad_ register_hook retain_grad __repr__ __hash__ _backward_hooks
    names is_inference type output_nr _base _is_view __class__ is_mkldnn __dlpack_device__ is_conj is_neg is_same_size
    __format__
"""
ASKS = frozenset(_ASKS.split())
_names: dict[Any, tuple[str, bool]] = {}
_outcomes: dict[Any, Outcome | Refusal] = {}


def _named(func: Any) -> tuple[str, bool]:
    """A function's name for the rules, and whether it overwrites its first argument."""
    found = _names.get(func)
    if found is None:
        own = getattr(func, "__name__", "")
        if own in ("__get__", "__set__"):
            own = f"{func.__self__.__name__}"
        if own in ("__bool__", "__int__", "__float__", "__index__", "__complex__"):
            own = "item"
        in_place = (own.endswith("_") and not own.startswith("_")) or own.startswith("__i") and own != "__invert__"
        name = own if own in ASKS or own == "item" else operation_name(func)
        found = _names[func] = (name, in_place)
    return found


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, in_place = _named(func)
    if name in ASKS and not (name == "type" and len(args) > 1):
        return func(*args, **kwargs)
    if name in ("shape", "size", "numel", "len", "nelement"):
        if _is_saved(args[0]):
            return func(*args, **kwargs)
        return _asked(name, args, kwargs)
    if name == "getitem" and isinstance(args[1], list):
        args = (args[0], (args[1],))  # as one index that is a list, not as one number for each dimension
    found: list[Tensor] = []
    call_args, call_keywords = _described(args, found), _described(kwargs, found)
    part = next(tensor for tensor in found if isinstance(tensor, Part))
    group = part._group
    if _is_saved(part):
        return func(*args, **kwargs)
    key = (name, in_place, call_args, call_keywords, group.degree, group.rank)
    outcome = _outcomes.get(key)
    if outcome is None:
        call = Call(name, call_args, dict(call_keywords), group.degree, in_place, group.rank)
        try:
            outcome = rule(call)
        except Refusal as refusal:
            outcome = refusal
        if len(_outcomes) > 10_000:
            _outcomes.clear()
        _outcomes[key] = outcome
    if isinstance(outcome, Refusal):
        return _whole(func, name, args, kwargs, in_place, group, outcome)
    return _on_parts(func, name, args, kwargs, found, outcome, group)


def _is_saved(part: Part) -> bool:
    """Whether a part is read in the backward of a model's own autograd function, where gradients are local values.

    Recomputed forwards (checkpointing) run inside a backward too: with gradients, or inside modules that show parts.
    """
    node = _node()
    if node is None or torch.is_grad_enabled() or part._group.running or part._made_in == node._sequence_nr():
        return False
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _asked(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """The whole tensor's shape."""
    shape = torch.Size(_whole_shape(args[0]))
    if name in ("numel", "nelement"):
        return shape.numel()
    if name == "len":
        return shape[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _whole_shape(tensor: Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if isinstance(tensor, Part):
        dim = tensor._split.dim
        return (*shape[:dim], tensor._split.size, *shape[dim + 1 :])
    return shape


def _described(value: Any, found: list[Tensor]) -> Any:
    """An argument as the rules see it; tensors are appended to ``found`` in order."""
    if isinstance(value, Tensor):
        found.append(value)
        return Seen(_whole_shape(value), value._split if isinstance(value, Part) else None)
    if isinstance(value, tuple | list):
        return tuple([_described(part, found) for part in value])
    if isinstance(value, dict):
        return tuple([(key, _described(part, found)) for key, part in value.items()])
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    if value is Ellipsis:
        return ("ellipsis",)
    return value if isinstance(value, int | float | str | bool | type(None)) else str(value)


def _lying(tensor: Tensor, target: Split | None, group: Group, begins: bool = False) -> Tensor:
    """Collective where a part must become whole, or in backward. An argument as the rule wants it.

    ``begins``: of a layer at which a region begins, where positions are gathered as planned.
    """
    now = tensor._split if isinstance(tensor, Part) else None
    if now == target:
        return _local(tensor) if now is not None else enter(tensor, group)
    if now is not None and not begins:
        group.gathers["arguments"] = group.gathers.get("arguments", 0) + 1
    if target is None:
        assert now is not None
        return enter_whole(tensor, now, group)
    return take(tensor if now is None else gather(tensor, now, group), target, group)


def _local(part: Tensor) -> Tensor:
    """A part as it is read; of one without a gradient what it holds: checkpointing keeps such an argument as it is and
    asks for its shape, within a forward's operations and outside of them, and must hear the same."""
    return part if part.requires_grad or not torch.is_grad_enabled() else part.detach()


def _on_parts(func: Any, name: str, args: Any, kwargs: Any, found: list[Tensor], outcome: Outcome, group: Group) -> Any:
    if outcome.how == "row":
        return _row(func, name, args, kwargs, found, outcome, group)
    if outcome.how == "heads":
        return _heads(args, kwargs, outcome.local, group)
    begins = name in LAYERS and not outcome.partial
    ready = [_lying(tensor, target, group, begins) for tensor, target in zip(found, outcome.targets, strict=True)]
    if outcome.how:
        result = HOW[outcome.how](ready, args, kwargs, outcome, group)
    else:
        rest = iter(ready)
        result = func(*_with(args, rest), **_with(kwargs, rest))
    if outcome.partial:
        return _summed(result, found, None, group)
    if isinstance(result, Tensor):
        if outcome.outputs is None:
            return result
        positions = _positions(found) if name in (*TRANSPOSES, *CASTS) and len(found) == 1 else None
        return marked(result, outcome.outputs, group, positions)  # type: ignore[arg-type]
    splits = outcome.outputs if isinstance(outcome.outputs, tuple) and not isinstance(outcome.outputs, Split) else None
    for at, tensor in enumerate(result):
        marked(tensor, splits[at] if splits else outcome.outputs, group)  # type: ignore[arg-type]
    return result


def _with(value: Any, tensors: Any) -> Any:
    """Arguments with their tensors replaced, in order."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        return type(value)([_with(part, tensors) for part in value])
    if isinstance(value, dict):
        return {key: _with(part, tensors) for key, part in value.items()}
    return value


def _whole(
    func: Any, name: str, args: Any, kwargs: dict[str, Any], in_place: bool, group: Group, refusal: Refusal
) -> Any:
    """Collective. A function that no rule allows on parts, on whole tensors."""
    if isinstance(args[0], Part) and (in_place or name in ("setitem", "set")):
        raise ModelError(
            f"{name} overwrites values that are divided among the ranks of the tensor axis in a way that cannot be "
            f"done on each part: {refusal}; use the form that gives a new tensor, or keep the layers before it "
            "replicated"
        )
    group.gathers[name] = group.gathers.get(name, 0) + 1
    tensors: list[Tensor] = []
    for given in (args, kwargs):
        _described(given, tensors)
    ready = iter([gather(t, t._split, group) if isinstance(t, Part) else t for t in tensors])
    return func(*_with(args, ready), **_with(kwargs, ready))


def _row(func: Any, name: str, args: Any, kwargs: Any, found: list[Tensor], outcome: Outcome, group: Group) -> Tensor:
    """linear, addmm or a convolution over a split dimension: partial results are summed once, then the bias is added
    once."""
    ready = {
        at: _lying(tensor, target, group)
        for at, (tensor, target) in enumerate(zip(found, outcome.targets, strict=True))
        if target is not None
    }
    bias = next((found[at] for at in range(len(found)) if at not in ready), None)
    if name == "addmm":
        made = torch.mm(*ready.values())
    else:
        rest = iter([ready.get(at) for at in range(len(found))])
        made = func(*_with(args, rest), **_with(kwargs, rest))
    if bias is not None and name in CONVOLUTIONS:
        bias = plain(bias).view(-1, *(1,) * (made.dim() - 2))
    return _summed(made, found, bias, group)


def _heads(args: Any, kwargs: dict[str, Any], heads: int, group: Group) -> tuple[Tensor, None]:
    """torch's attention layer on this rank's heads."""
    read = [_lying(tensor, None, group, begins=True) for tensor in args[:3]]
    made = attention_layer((*read, *args[3:]), kwargs, heads, group)
    return _summed(made, [args[11]], args[12], group), None


def _positions(found: list[Tensor]) -> Positions | None:
    return next((t._positions for t in found if isinstance(t, Part) and t._positions is not None), None)


def _summed(made: Tensor, found: list[Tensor], bias: Tensor | None, group: Group) -> Tensor:
    """Collective. Partial results added up: whole, or this rank's positions of them; then the bias added once, in
    their type, as autocast has it.

    What every rank adds alike to the whole has its gradient alike; added to the positions, it is to be summed.
    """
    positions = _positions(found)
    split = positions.split(tuple(made.shape), group.degree) if positions else None
    if isinstance(bias, Part):
        bias = gather(bias, bias._split, group)
    if split is None:
        made = total(made, group)
        return made if bias is None else made + bias.to(made.dtype)
    made = total_part(made, split, group)
    return marked(made if bias is None else made + enter(bias, group).to(made.dtype), split, group)
