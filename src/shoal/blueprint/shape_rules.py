"""Split tensors in functions that work on each element, on shapes, or along dimensions. No torch."""

from __future__ import annotations

import math
from typing import Any

from shoal.blueprint.calls import Call, Outcome, Outputs, names
from shoal.blueprint.split import Refusal, Seen, Split, cut, local_shape, local_size, reshaped, simplest


def elementwise(call: Call) -> Outcome:
    """Broadcasting operations on one or more tensors."""
    if call.name == "where" and len(call.tensors) == 1:
        raise Refusal("the places of a split tensor are asked for")
    return broadcast(call.tensors)


def converted(call: Call) -> Outcome:
    """to, type_as: as another type or device, perhaps that of a second tensor."""
    return _same(call, call.tensors[0].split)


def broadcast(seen: list[Seen]) -> Outcome:
    """Operands whose shapes broadcast."""
    rank = max(len(tensor.shape) for tensor in seen)
    lead = next(tensor for tensor in seen if tensor.split is not None)
    assert lead.split is not None
    right = lead.split.dim - len(lead.shape)
    targets = tuple(aligned(tensor, right, lead.split) for tensor in seen)
    return Outcome(lead.split.on(rank + right), targets)


def aligned(tensor: Seen, right: int, split: Split) -> Split | None:
    """The split that an operand needs where dimension ``right`` (counted from the end) of the result is split so."""
    dim = len(tensor.shape) + right
    if dim < 0 or tensor.shape[dim] == 1:
        return None
    if tensor.shape[dim] != split.size:
        raise Refusal(f"a dimension of {tensor.shape[dim]} meets a split one of {split.size}")
    return split.on(dim)


def _alone(call: Call) -> tuple[Seen, Split]:
    """The first argument, which must be the only split one."""
    first = call.tensors[0]
    if first.split is None or any(tensor.split for tensor in call.tensors[1:]):
        raise Refusal(f"another argument of {call.name} than the first is split")
    return first, first.split


def _same(call: Call, outputs: Outputs, how: str = "", local: Any = None) -> Outcome:
    return Outcome(outputs, tuple(tensor.split for tensor in call.tensors), how, local)


def dropout(call: Call) -> Outcome:
    """Which elements are dropped is drawn for the whole tensor, as one device does."""
    _, split = _alone(call)
    active = call.get(1, "p", 0.5) != 0 and call.get(2, "training", True)
    return _same(call, split, "dropout" if active else "")


def _sizes(call: Call, keyword: str) -> tuple[int, ...]:
    """A size given as one argument or as several."""
    given = call.get(1, keyword)
    return tuple(given) if isinstance(given, tuple) else tuple(call.args[1:])


def view(call: Call) -> Outcome:
    """view, reshape: the whole shape is asked for, each rank makes its own."""
    first, _ = _alone(call)
    after = _sizes(call, "shape" if call.name == "reshape" else "size")
    if not all(isinstance(size, int) for size in after):
        raise Refusal("a view as another type")
    return _to_shape(call, after)


def view_as(call: Call) -> Outcome:
    """view_as, reshape_as."""
    return _to_shape(call, call.tensors[1].shape)


def _to_shape(call: Call, after: tuple[int, ...]) -> Outcome:
    first = call.tensors[0]
    if first.split is None:
        raise Refusal("the shape of a split tensor is given to one that is not")
    if -1 in after:
        known = math.prod(size for size in after if size != -1)
        after = tuple(math.prod(first.shape) // known if size == -1 else size for size in after)
    split = reshaped(first.split, first.shape, after, call.degree)
    return _same(call, split, "reshape", local_shape(after, split, call.degree, call.rank))


def flatten(call: Call) -> Outcome:
    """flatten(start, end)."""
    first, _ = _alone(call)
    rank = len(first.shape)
    low, high = call.get(1, "start_dim", 0) % rank, call.get(2, "end_dim", -1) % rank
    return _to_shape(call, (*first.shape[:low], math.prod(first.shape[low : high + 1]), *first.shape[high + 1 :]))


def unflatten(call: Call) -> Outcome:
    """unflatten(dim, sizes)."""
    first, _ = _alone(call)
    dim = call.get(1, "dim") % len(first.shape)
    sizes = call.get(2, "sizes") if isinstance(call.get(2, "sizes"), tuple) else tuple(call.args[2:])
    known = math.prod(size for size in sizes if size != -1)
    sizes = tuple(first.shape[dim] // known if size == -1 else size for size in sizes)
    return _to_shape(call, (*first.shape[:dim], *sizes, *first.shape[dim + 1 :]))


def squeeze(call: Call) -> Outcome:
    """squeeze(dim or none)."""
    first, _ = _alone(call)
    rank, dims = len(first.shape), call.get(1, "dim")
    chosen = range(rank) if dims is None else [d % rank for d in ((dims,) if isinstance(dims, int) else dims)]
    return _to_shape(call, tuple(size for d, size in enumerate(first.shape) if size != 1 or d not in chosen))


def unsqueeze(call: Call) -> Outcome:
    """unsqueeze(dim)."""
    first, _ = _alone(call)
    dim = call.get(1, "dim") % (len(first.shape) + 1)
    return _to_shape(call, (*first.shape[:dim], 1, *first.shape[dim:]))


def expand(call: Call) -> Outcome:
    """expand, broadcast_to, expand_as: new leading dimensions, and those of size 1."""
    first = call.tensors[0]
    if first.split is None:
        raise Refusal("the shape of a split tensor is given to one that is not")
    sizes = call.tensors[1].shape if call.name == "expand_as" else _sizes(call, "size")
    more = len(sizes) - len(first.shape)
    after = tuple(first.shape[d - more] if size == -1 else size for d, size in enumerate(sizes))
    split = first.split.on(first.split.dim + more)
    return _same(call, split, "expand", local_shape(after, split, call.degree, call.rank))


def repeat(call: Call) -> Outcome:
    """repeat(sizes)."""
    first, split = _alone(call)
    sizes = _sizes(call, "repeats" if "repeats" in call.keywords else "size")
    dim = split.dim + len(sizes) - len(first.shape)
    return _same(call, Split(dim, split.parts * sizes[dim], split.unit))


def repeat_interleave(call: Call) -> Outcome:
    """repeat_interleave(n, dim)."""
    first, split = _alone(call)
    times, dim = call.get(1, "repeats"), call.get(2, "dim")
    if not isinstance(times, int) or dim is None:
        raise Refusal("repeat_interleave without a number and a dimension")
    if dim % len(first.shape) == split.dim:
        split = simplest(Split(split.dim, split.parts, split.unit * times), call.degree)
    return _same(call, split)


def permute(call: Call) -> Outcome:
    """transpose, permute, t, T, mT, movedim: the dimension moves."""
    first, split = _alone(call)
    order = list(range(len(first.shape)))
    if call.name in ("transpose", "swapaxes", "swapdims"):
        low = call.get(1, "dim0" if "dim0" in call.keywords else "axis0")
        high = call.get(2, "dim1" if "dim1" in call.keywords else "axis1")
        order[low], order[high] = order[high], order[low]
    elif call.name in ("t", "mT"):
        order[-1], order[-2] = order[-2], order[-1]
    elif call.name == "T":
        order.reverse()
    elif call.name == "permute":
        order = [d % len(order) for d in _sizes(call, "dims")]
    else:
        source, to = call.get(1, "source"), call.get(2, "destination")
        if not (isinstance(source, int) and isinstance(to, int)):
            raise Refusal("several dimensions moved at once")
        moved = order.pop(source)
        order.insert(to % len(first.shape), moved)
    return _same(call, split.on(order.index(split.dim)))


def pieces(call: Call) -> Outcome:
    """chunk, split, tensor_split: consecutive pieces, along the split dimension where whole parts lie in them."""
    first, split = _alone(call)
    dim = call.get(2, "dim", 0) % len(first.shape)
    size, given = first.shape[dim], call.args[1] if len(call.args) > 1 else next(
        call.keywords[key] for key in ("chunks", "split_size", "split_size_or_sections", "indices_or_sections")
    )  # fmt: skip
    if not isinstance(given, int):
        sizes = tuple(given)
        if call.name == "tensor_split":
            raise Refusal("tensor_split at places")
    elif call.name == "tensor_split":
        sizes = tuple(size // given + (at < size % given) for at in range(given))
    else:
        step = given if call.name != "chunk" else -(-size // given)
        sizes = tuple(min(step, size - at) for at in range(0, size, step))
    if dim != split.dim:
        return _same(call, (split,) * len(sizes))
    found = tuple(cut(split, sizes))
    return _same(call, found, "cut", (tuple(local_size(piece, call.degree, call.rank) for piece in found), dim))


def _without(split: Split, dims: set[int]) -> Split:
    return split.on(split.dim - sum(dim < split.dim for dim in dims))


def unbind(call: Call) -> Outcome:
    """unbind(dim), select(dim, index)."""
    first, split = _alone(call)
    dim = call.get(1, "dim", 0) % len(first.shape)
    if dim == split.dim:
        raise Refusal("single entries are taken of the split dimension", (1,) * split.size)
    after = _without(split, {dim})
    return _same(call, after if call.name == "select" else (after,) * first.shape[dim])


def narrow(call: Call) -> Outcome:
    """narrow(dim, start, length)."""
    first, split = _alone(call)
    dim = call.get(1, "dim") % len(first.shape)
    if dim != split.dim:
        return _same(call, split)
    low, length = call.get(2, "start"), call.get(3, "length")
    index = (*(("slice", None, None, None),) * dim, ("slice", low, low + length, None))
    return getitem(call._replace(name="getitem", args=(first, index), keywords={}))


def getitem(call: Call) -> Outcome:
    """Numbers, slices, new dimensions, an ellipsis, and one list of numbers (or one tensor of them)."""
    first, split = _alone(call)
    index = call.args[1]
    if not isinstance(index, tuple) or isinstance(index, Seen) or _is_mark(index):
        index = (index,)
    index = _expanded(index, len(first.shape))
    local, old, new, after = [], 0, 0, None
    lists = 0
    for part in index:
        if part is None:
            local.append(None)
            new += 1
            continue
        if old == split.dim:
            after, part = _cut_slice(part, split, new, call)
            new += 1
        elif _is_mark(part):
            new += 1
        elif isinstance(part, tuple):
            lists += 1
            if isinstance(part, Seen) and len(part.shape) > 1:
                raise Refusal("a table of numbers, or a mask, as an index")
            new += len(part.shape) if isinstance(part, Seen) else 1
        elif not isinstance(part, int) or isinstance(part, bool):
            raise Refusal(f"an index of {type(part).__name__}")
        local.append(part)
        old += 1
    if lists > 1 or (lists and any(isinstance(part, int) for part in index)):
        raise Refusal("several lists or numbers in one index")
    return _same(call, after, "index", tuple(local))


def _is_mark(part: Any) -> bool:
    return isinstance(part, tuple) and part[:1] in (("slice",), ("ellipsis",))


def _expanded(index: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """An index with a part for each dimension."""
    used = sum(part is not None and part != ("ellipsis",) for part in index)
    fill = (("slice", None, None, None),) * (rank - used)
    if ("ellipsis",) in index:
        at = index.index(("ellipsis",))
        return (*index[:at], *fill, *index[at + 1 :])
    return (*index, *fill)


def _cut_slice(part: Any, split: Split, dim: int, call: Call) -> tuple[Split, Any]:
    """A slice of the split dimension, whole parts of it."""
    if not _is_mark(part) or not all(isinstance(bound, int | None) for bound in part[1:]):
        raise Refusal("single entries are taken of the split dimension", (1,) * split.size)
    low, high, step = slice(*part[1:]).indices(split.size)
    if step != 1 or high <= low:
        raise Refusal("a slice with a step of the split dimension")
    sizes = tuple(size for size in (low, high - low, split.size - high) if size)
    found = cut(split, sizes)
    at = 1 if low else 0
    start = sum(local_size(piece, call.degree, call.rank) for piece in found[:at])
    return found[at].on(dim), ("slice", start, start + local_size(found[at], call.degree, call.rank), None)


def cat(call: Call) -> Outcome:
    """cat, along another dimension, or along the split one where all are split."""
    dim = call.get(1, "dim", 0)
    seen = call.tensors
    lead = next(tensor for tensor in seen if tensor.split is not None)
    assert lead.split is not None
    dim %= len(lead.shape)
    if dim != lead.split.dim:
        return Outcome(lead.split, tuple(None if tensor.shape == (0,) else lead.split for tensor in seen))
    targets = tuple(tensor.split or Split(dim, (tensor.shape[dim],)) for tensor in seen)
    if any(target.dim != dim or target.unit != targets[0].unit for target in targets):
        raise Refusal("tensors split along other dimensions, or in other blocks, are joined")
    parts = tuple(part for target in targets for part in target.parts)
    return Outcome(Split(dim, parts, targets[0].unit), targets)


def stack(call: Call) -> Outcome:
    """stack, along a new dimension."""
    seen = call.tensors
    split = next(tensor.split for tensor in seen if tensor.split is not None)
    dim = call.get(1, "dim", 0) % (len(seen[0].shape) + 1)
    return Outcome(split.on(split.dim + (dim <= split.dim)), (split,) * len(seen))


def along(call: Call) -> Outcome:
    """softmax, cumsum, flip, roll, ...: works along dimensions and keeps the shape."""
    first, split = _alone(call)
    dims = call.get(2, "dims") if call.name == "roll" else call.get(1, "dim", call.keywords.get("dims"))
    if call.name == "flip" and "dims" not in call.keywords:
        dims = _sizes(call, "dims")
    if dims is None:
        raise Refusal(f"{call.name} over all dimensions")
    if split.dim in {dim % len(first.shape) for dim in (dims if isinstance(dims, tuple) else (dims,))}:
        raise Refusal(f"{call.name} works along the split dimension, whose values lie on several ranks")
    return _same(call, split)


#: Where a reduction's dimension and keepdim stand, where not at 1 and 2.
_PLACES = {"norm": (2, 3), "var": (1, 3), "std": (1, 3)}


def reduction(call: Call) -> Outcome:
    """sum, mean, amax, ... over other dimensions."""
    first, split = _alone(call)
    at, keep_at = _PLACES.get(call.name, (1, 2))
    dims, keep = call.get(at, "dim"), call.get(keep_at, "keepdim", False)
    if dims is None or isinstance(dims, bool):
        raise Refusal(f"{call.name} over all dimensions")
    chosen = {dim % len(first.shape) for dim in (dims if isinstance(dims, tuple) else (dims,))}
    if split.dim in chosen:
        raise Refusal(f"{call.name} works along the split dimension, whose values lie on several ranks")
    return _same(call, split if keep else _without(split, chosen))


def norm(call: Call) -> Outcome:
    """layer_norm, rms_norm: over the last dimensions."""
    first, split = _alone(call)
    if split.dim >= len(first.shape) - len(call.get(1, "normalized_shape")):
        raise Refusal(f"{call.name} works along the split dimension, whose values lie on several ranks")
    return _same(call, split)


def corner(call: Call) -> Outcome:
    """tril, triu, view_as_complex...: works on the last two dimensions."""
    first, split = _alone(call)
    if split.dim >= len(first.shape) - 2:
        raise Refusal(f"{call.name} works along the split dimension")
    return _same(call, split)


SHAPE_RULES = names(
    (
        "add sub mul div pow neg abs exp log sqrt rsqrt square reciprocal sin cos tanh sigmoid relu gelu silu softplus "
        "elu selu celu leaky_relu hardtanh relu6 hardswish hardsigmoid mish logsigmoid erf clamp clamp_min clamp_max "
        "maximum minimum where masked_fill fmod remainder floor round lerp addcmul addcdiv eq ne lt gt le ge "
        "logical_not logical_and logical_or bitwise_and bitwise_or bitwise_not invert and or xor float double half "
        "bfloat16 data type int long bool contiguous clone detach zeros_like ones_like full_like nan_to_num "
        "isfinite isnan isinf cpu cuda floor_divide floordiv rsub softsign tanhshrink expm1 log1p conj real imag "
        "positive true_divide subtract multiply divide negative absolute sign",
        elementwise,
    ),
    ("to type_as", converted), ("dropout", dropout), ("view reshape", view),
    ("view_as reshape_as", view_as), ("flatten", flatten),
    ("unflatten", unflatten), ("squeeze", squeeze), ("unsqueeze", unsqueeze), ("expand expand_as broadcast_to", expand),
    ("repeat", repeat), ("repeat_interleave", repeat_interleave),
    ("transpose swapaxes swapdims permute t T mT movedim moveaxis", permute),
    ("chunk split split_with_sizes tensor_split", pieces), ("unbind select", unbind), ("narrow", narrow),
    ("getitem", getitem), ("cat concat concatenate", cat), ("stack", stack),
    ("softmax log_softmax cumsum cumprod flip roll sort logcumsumexp", along),
    ("sum mean var std amax amin norm prod logsumexp any all argmax argmin max min", reduction),
    ("layer_norm rms_norm", norm), ("tril triu view_as_complex view_as_real", corner),
)  # fmt: skip
