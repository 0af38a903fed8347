"""A tensor of which this rank holds a part, and torch's functions on it.

A ``Part`` holds the rank's own values and answers the model's code with the whole shape, so that code with literal
sizes runs as it stands. Functions run on the parts alone where a rule (blueprint/rules.py) says how; where none does,
the whole tensor is gathered and the function runs on it as on one device: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.blueprint.calls import Call, Outcome
from shoal.blueprint.rules import rule
from shoal.blueprint.split import Refusal, Seen, Split
from shoal.blueprint.trace import operation_name
from shoal.core.errors import ModelError
from shoal.parallel.tensor.moves import Group, enter, gather, part_of, total


class Part(Tensor):
    """This rank's part of a tensor; made by ``marked``."""

    _split: Split
    _group: Group
    _made_in: int | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _run(func, args, kwargs or {})


def _in_backward() -> int | None:
    """The number of the backward node that runs, None outside backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def marked(tensor: Tensor, split: Split, group: Group) -> Part:
    """A fresh tensor as this rank's part."""
    tensor.__class__ = Part
    tensor._split, tensor._group, tensor._made_in = split, group, _in_backward()  # type: ignore[attr-defined]
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
    names is_inference type output_nr __class__ is_mkldnn __dlpack_device__ is_conj is_neg is_same_size
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
        if _in_backward() not in (None, args[0]._made_in):
            return func(*args, **kwargs)  # of a saved part; what a checkpoint just recomputed is compared as whole
        return _asked(name, args, kwargs)
    if name == "getitem" and isinstance(args[1], list):
        args = (args[0], (args[1],))  # as one index that is a list, not as one number for each dimension
    found: list[Tensor] = []
    call_args, call_keywords = _described(args, found), _described(kwargs, found)
    part = next(tensor for tensor in found if isinstance(tensor, Part))
    group = part._group
    if _is_saved(part, group):
        return func(*args, **kwargs)
    key = (name, in_place, call_args, call_keywords, group.degree)
    outcome = _outcomes.get(key)
    if outcome is None:
        call = Call(name, call_args, dict(call_keywords), group.degree, in_place)
        try:
            outcome = rule(call)
        except Refusal as refusal:
            outcome = refusal
        if len(_outcomes) > 10_000:
            _outcomes.clear()
        _outcomes[key] = outcome
    if isinstance(outcome, Refusal):
        return _whole(func, name, args, kwargs, in_place, group, outcome)
    return _on_parts(func, args, kwargs, found, outcome, group)


def _is_saved(part: Part, group: Group) -> bool:
    """Whether a part is read in the backward of a model's own autograd function, where gradients are local values.

    Recomputed forwards (checkpointing) run inside a backward too: their parts were made there, and their modules run.
    """
    node = _in_backward()
    return node is not None and (part._made_in != node or (not group.running and not torch.is_grad_enabled()))


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


def _lying(tensor: Tensor, target: Split | None, group: Group) -> Tensor:
    """Collective where a part must become whole, or in backward. An argument as the rule wants it."""
    now = tensor._split if isinstance(tensor, Part) else None
    if now == target:
        return tensor if now is not None else enter(tensor, group)
    if now is not None:
        group.gathers["arguments"] = group.gathers.get("arguments", 0) + 1
        tensor = gather(tensor, now, group)
    tensor = enter(tensor, group)
    return tensor if target is None else part_of(tensor, target, group)


def _on_parts(func: Any, args: Any, kwargs: dict[str, Any], found: list[Tensor], outcome: Outcome, group: Group) -> Any:
    if outcome.how == "row":
        return _row(func, found, outcome, group)
    if outcome.how == "heads":
        return _attention_layer(args, kwargs, outcome.local, group)
    ready = [_lying(tensor, target, group) for tensor, target in zip(found, outcome.targets, strict=True)]
    if outcome.how:
        result = HOW[outcome.how](ready, args, kwargs, outcome, group)
    else:
        rest = iter(ready)
        result = func(*_with(args, rest), **_with(kwargs, rest))
    if outcome.partial:
        return total(result, group)
    if isinstance(result, Tensor):
        return result if outcome.outputs is None else marked(result, outcome.outputs, group)  # type: ignore[arg-type]
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
    if in_place or name in ("setitem", "set"):
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


def _row(func: Any, found: list[Tensor], outcome: Outcome, group: Group) -> Tensor:
    """linear or addmm over a split dimension: partial results are summed once, then the bias is added once."""
    ready = {
        at: _lying(tensor, target, group)
        for at, (tensor, target) in enumerate(zip(found, outcome.targets, strict=True))
        if target is not None
    }
    bias = [_lying_whole(found[at], group) for at in range(len(found)) if at not in ready]
    made = torch.mm(*ready.values()) if func.__name__ == "addmm" else F.linear(*ready.values())
    made = total(made, group)
    return made + bias[0] if bias else made


def _lying_whole(tensor: Tensor, group: Group) -> Tensor:
    """Collective where it is a part. What every rank adds alike: whole, its gradient not summed."""
    return gather(tensor, tensor._split, group) if isinstance(tensor, Part) else tensor


def _reshape(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    made = ready[0].reshape(outcome.local)
    return made.view(made.shape) if made is ready[0] else made


def _expand(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    return ready[0].expand(outcome.local)


def _cut(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Any:
    return torch.split(ready[0], list(outcome.local[0]), outcome.local[1])


def _index(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    rest = iter(ready[1:])

    def real(part: Any) -> Any:
        if isinstance(part, Seen):
            return next(rest)
        if isinstance(part, tuple):
            return slice(*part[1:]) if part[:1] == ("slice",) else list(part)
        return part

    return ready[0][tuple(real(part) for part in outcome.local)]


def _kept(shape: tuple[int, ...], p: float, split: Split, like: Tensor, group: Group) -> Tensor:
    """This rank's part of a dropout mask over the whole tensor, drawn as one device draws it (same memory order)."""
    order = sorted(range(like.dim()), key=lambda d: (-like.stride(d), d))
    whole = torch.empty([shape[d] for d in order], dtype=like.dtype, device=like.device)
    whole = whole.permute([order.index(d) for d in range(like.dim())])
    return part_of(whole.bernoulli_(1 - p).div_(1 - p), split, group)


def _dropout(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    split: Any = outcome.outputs
    shape = (*ready[0].shape[: split.dim], split.size, *ready[0].shape[split.dim + 1 :])
    kept = _kept(shape, p, split, ready[0], group)
    return ready[0].mul_(kept) if (args[3] if len(args) > 3 else kwargs.get("inplace")) else ready[0] * kept


def _attention(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    """Attention with heads to repeat, or with dropout (which is drawn over all heads)."""
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"), args, strict=False))
    given |= kwargs
    query, key, value = ready[:3]
    mask, split = ready[3] if len(ready) > 3 else None, outcome.outputs
    assert isinstance(split, Split)
    if outcome.local:
        key, value = (
            part_of(t.repeat_interleave(split.size // t.shape[-3], -3), Split(t.dim() - 3, split.parts), group)
            for t in (key, value)
        )
    elif given.get("enable_gqa"):
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    causal, scale, p = given.get("is_causal", False), given.get("scale"), given.get("dropout_p", 0.0)
    if not p:
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    shape = (*weights.shape[: split.dim], split.size, *weights.shape[split.dim + 1 :])
    return weights * _kept(shape, p, split, weights, group) @ value


def _attention_layer(args: Any, kwargs: dict[str, Any], heads: int, group: Group) -> tuple[Tensor, None]:
    """torch's multi_head_attention_forward without its weights ([T, B, D]), on this rank's heads."""
    query, key, value = (enter(tensor, group) for tensor in args[:3])
    packed, bias, dropout, out, out_bias = (args[place] for place in (5, 6, 10, 11, 12))
    biases = bias.chunk(3) if bias is not None else (None,) * 3
    query, key, value = (
        F.linear(x, w, b).unflatten(-1, (heads // group.degree, -1)).permute(1, 2, 0, 3)
        for x, w, b in zip((query, key, value), packed.chunk(3), biases, strict=True)
    )  # [B, H, T, K]
    padding, mask = kwargs.get("key_padding_mask"), kwargs.get("attn_mask")
    causal = bool(kwargs.get("is_causal")) and padding is None
    mask = None if causal or mask is None else _added(mask, query)
    if padding is not None:
        padded = _added(padding, query)[:, None, None, :]
        mask = padded if mask is None else mask + padded
    given = {"attn_mask": mask, "is_causal": causal, "dropout_p": dropout if kwargs.get("training", True) else 0.0}
    ready = [query, key, value, *([] if mask is None else [mask])]
    made = _attention(ready, (), given, Outcome(Split(1, (heads,)), (), "attention", False), group)
    made = total(F.linear(made.permute(2, 0, 1, 3).flatten(2), out), group)
    return (made if out_bias is None else made + out_bias), None


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask to be added to scores; of a bool one, what is true takes no part."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, float("-inf"))


def _embedding(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    """Rows that lie on other ranks give zeros here, before the sum."""
    ids, weight = ready
    padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
    low = group.rank * weight.shape[0]
    here = (ids >= low) & (ids < low + weight.shape[0])
    if padding is not None:
        padding = padding % (weight.shape[0] * group.degree) - low
        padding = padding if 0 <= padding < weight.shape[0] else None
    rows = F.embedding(torch.where(here, ids - low, 0), weight, padding)
    return rows.masked_fill(~here.unsqueeze(-1), 0.0)


HOW: dict[str, Callable[..., Any]] = {
    "reshape": _reshape, "expand": _expand, "cut": _cut, "index": _index, "dropout": _dropout,
    "attention": _attention, "embedding": _embedding,
}  # fmt: skip
