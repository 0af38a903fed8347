"""What each torch function does to split tensors: where its results lie and what every rank has to run. No torch.

The same rules find the roles (roles.py) and run the split model, so what was planned is what runs. A rule is exact or
it raises Refusal: nothing here approximates.
"""

from __future__ import annotations

from typing import Any

from shoal.blueprint.calls import Call, Outcome, names
from shoal.blueprint.shape_rules import SHAPE_RULES, aligned
from shoal.blueprint.split import Refusal, Seen, Split, even, fits, local_size, simplest


def rule(call: Call) -> Outcome:
    """How ``call`` runs on tensors of which some are split. Raises Refusal."""
    found = RULES.get(call.name)
    if found is None:
        raise Refusal(f"{call.name} is not known to act on each part alone")
    try:
        outcome = found(call)
    except (TypeError, KeyError, IndexError, StopIteration, AttributeError) as error:
        raise Refusal(f"{call.name} was called in a way that is not known: {error!r}") from error
    seen = call.tensors
    if call.keywords.get("out") is not None:
        raise Refusal(f"{call.name} writes into another tensor")
    if call.in_place and outcome.how:
        raise Refusal(f"{call.name} changes its argument's shape or values in place")
    if call.in_place and outcome.targets[0] != seen[0].split:
        raise Refusal(f"{call.name} writes split values into one that is not split alike")
    for tensor, target in zip(seen, outcome.targets, strict=True):
        if target is None or tensor.split is not None:
            continue
        if tensor.shape[target.dim] != target.size:
            raise Refusal(f"{target.size} entries are wanted of a dimension of {tensor.shape[target.dim]}")
        if not fits(target.parts, call.degree):
            raise Refusal(f"{' + '.join(map(str, target.parts))} cannot be divided among {call.degree}")
    return outcome


def linear(call: Call) -> Outcome:
    """linear(input, weight, bias): column (weight split over its outputs), row (over its inputs), or another split."""
    seen = call.tensors
    x, weight = seen[0], seen[1]
    last = len(x.shape) - 1
    if weight.split is not None and weight.split.dim == 0:
        return Outcome(weight.split.on(last), (None, weight.split, weight.split)[: len(seen)])
    along = weight.split or (x.split if x.split is not None and x.split.dim == last else None)
    if along is not None:
        return Outcome(None, (along.on(last), along.on(1), None)[: len(seen)], "row", None, partial=True)
    return Outcome(x.split, (x.split, None, None)[: len(seen)])


def product(a: Seen, b: Seen) -> tuple[Split | None, Split | None, Split | None, bool]:
    """(result's split, targets of both, whether results are partial sums) of the matrix product of a and b."""
    if min(len(a.shape), len(b.shape)) < 2:
        raise Refusal("a product with a vector")
    rank = max(len(a.shape), len(b.shape))
    right_a = a.split.dim - len(a.shape) if a.split else None
    right_b = b.split.dim - len(b.shape) if b.split else None
    inner = a.split if right_a == -1 else b.split if right_b == -2 else None
    if inner is not None:
        return None, inner.on(len(a.shape) - 1), inner.on(len(b.shape) - 2), True
    if right_b == -1 and b.split:
        return b.split.on(rank - 1), None, b.split, False
    if right_a == -2 and a.split:
        return a.split.on(rank - 2), a.split, None, False
    lead, right = (a.split, right_a) if a.split else (b.split, right_b)
    assert lead is not None and right is not None
    return lead.on(rank + right), aligned(a, right, lead), aligned(b, right, lead), False


def matmul(call: Call) -> Outcome:
    """matmul, mm, bmm."""
    if call.name == "rmatmul":
        raise Refusal("a product from the right")
    output, target_a, target_b, partial = product(*call.tensors)
    return Outcome(output, (target_a, target_b), "", None, partial)


def added_product(call: Call) -> Outcome:
    """addmm, baddbmm (added, a, b): a linear layer with its weight transposed is one."""
    added, a, b = call.tensors
    output, target_a, target_b, partial = product(a, b)
    if partial:
        if call.name != "addmm" or call.keywords.get("beta", 1) != 1 or call.keywords.get("alpha", 1) != 1:
            raise Refusal("a sum over the split dimension is added to something scaled")
        return Outcome(None, (None, target_a, target_b), "row", None, partial=True)
    assert output is not None
    rank = max(len(a.shape), len(b.shape))
    target = aligned(added, output.dim - rank, output)
    return Outcome(output, (target, target_a, target_b))


def attention(call: Call) -> Outcome:
    """scaled_dot_product_attention: every rank its own heads. Key-value heads that cannot be divided are repeated."""
    seen = call.tensors
    lead = next(tensor for tensor in seen if tensor.split is not None)
    assert lead.split is not None
    right, split = lead.split.dim - len(lead.shape), lead.split
    if right > -3:
        raise Refusal("attention works along the split dimension")
    query, key = seen[0], seen[1]
    repeats = False
    if right == -3 and call.keywords.get("enable_gqa") and key.shape[-3] != query.shape[-3]:
        queries, keys = (query.shape[-3],), (key.shape[-3],)
        if split.parts != (queries if lead is query else keys):
            raise Refusal("grouped heads in several parts")
        repeats = not even(keys, call.degree)
        pair = None if repeats else Split(len(key.shape) - 3, keys)
        split = Split(len(query.shape) - 3, queries)
        targets = [split, pair, pair]
    else:
        targets = [aligned(tensor, right, split) for tensor in seen[:3]]
    targets += [aligned(mask, right, split) for mask in seen[3:]]
    drops = call.get(4, "dropout_p", 0.0) > 0
    how = "attention" if repeats or drops else ""
    return Outcome(split.on(len(query.shape) + right), tuple(targets), how, repeats)


#: Where multi_head_attention_forward's arguments stand: heads, packed weights, and what must be absent.
_HEADS, _PACKED, _PACKED_BIAS, _ABSENT, _OUT, _OUT_BIAS = 4, 5, 6, (7, 8), 11, 12


def head_splits(heads: int, width: int, degree: int) -> tuple[Split, Split]:
    """How torch's attention layers are divided by heads: the packed projection, and the output's."""
    unit = width // heads
    return simplest(Split(0, (heads,) * 3, unit), degree), simplest(Split(1, (heads,), unit), degree)


def attention_layer(call: Call) -> Outcome:
    """torch's multi_head_attention_forward: packed columns, every rank its own heads, a row."""
    args, seen = call.args, call.tensors
    heads, packed, out = args[_HEADS], args[_PACKED], args[_OUT]
    special = any(args[place] is not None for place in _ABSENT) or args[9] or call.keywords.get("need_weights", True)
    if special or call.keywords.get("use_separate_proj_weight") or len(args[0].shape) != 3 or heads < call.degree:
        raise Refusal(f"attention of {heads} heads over {call.degree} ranks that gives its weights or has its own keys")
    width = packed.shape[0] // 3
    parts, rows = head_splits(heads, width, call.degree)
    mask = call.keywords.get("attn_mask")
    if (mask is not None and len(mask.shape) != 2) or packed.split != parts or out.split != rows:
        raise Refusal("attention whose projections are not divided by heads")
    bias = args[_PACKED_BIAS]
    wanted = {id(packed): parts, id(bias): parts, id(out): out.split}
    return Outcome(None, tuple(wanted.get(id(tensor)) for tensor in seen), "heads", heads)


def embedding(call: Call) -> Outcome:
    """embedding(ids, weight): rows of the table on several ranks, or its columns."""
    ids, weight = call.tensors
    if call.get(3, "max_norm") is not None or call.get(5, "scale_grad_by_freq") or call.get(6, "sparse"):
        raise Refusal("an embedding with max_norm, scale_grad_by_freq or sparse")
    if weight.split is None:
        return Outcome(ids.split, (ids.split, None))
    if weight.split.dim == 1:
        return Outcome(weight.split.on(len(ids.shape)), (None, weight.split))
    if len(weight.split.parts) > 1:
        raise Refusal("a table in several parts")
    return Outcome(None, (None, weight.split), "embedding", None, partial=True)


def einsum(call: Call) -> Outcome:
    """einsum(equation, operands): the letter of the split dimension decides."""
    equation: Any = call.args[0]
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        raise Refusal("an einsum without letters for all dimensions")
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters, seen = inputs.split(","), call.tensors
    lead, tensor = next((name, t) for name, t in zip(letters, seen, strict=True) if t.split)
    assert tensor.split is not None
    letter, split = lead[tensor.split.dim], tensor.split
    targets = tuple(split.on(name.index(letter)) if letter in name else None for name in letters)
    if letter in output:
        return Outcome(split.on(output.index(letter)), targets)
    return Outcome(None, targets, "", None, partial=True)


def convolution(call: Call) -> Outcome:
    """conv1d, conv2d, conv3d of a batch: column (weight split over its outputs), row (over its inputs)."""
    seen = call.tensors
    x, weight = seen[0], seen[1]
    if call.get(6, "groups", 1) != 1 or len(x.shape) != len(weight.shape):
        raise Refusal("a convolution in groups, or without a batch")
    if weight.split is not None and weight.split.dim == 0:
        return Outcome(weight.split.on(1), (None, weight.split, weight.split.on(0))[: len(seen)])
    along = weight.split or x.split
    if along is not None and along.dim == 1:
        return Outcome(None, (along, along, None)[: len(seen)], "row", None, partial=True)
    if weight.split is None and x.split is not None and x.split.dim == 0:
        return Outcome(x.split, (x.split, None, None)[: len(seen)])
    raise Refusal("a convolution works along the split dimension")


def group_norm(call: Call) -> Outcome:
    """group_norm(input, groups, weight, bias): every rank its own groups of channels."""
    seen, groups = call.tensors, call.get(1, "num_groups")
    split = seen[0].split
    if split is None or split.dim > 1:
        raise Refusal("group_norm works along the split dimension, whose values lie on several ranks")
    if split.dim == 0:
        return Outcome(split, (split, None, None)[: len(seen)])
    unit = split.size // groups
    channels = [local_size(split._replace(parts=(part,)), call.degree, rank) for part in split.parts
                for rank in range(call.degree)]  # fmt: skip
    if any(length % unit for length in channels):
        whole = fits(tuple(length // unit for length in split.lengths), call.degree)
        raise Refusal(f"{groups} groups cannot be divided among {call.degree}", unit=unit if whole else None)
    return Outcome(split, (split, split.on(0), split.on(0))[: len(seen)], "groups",
                   local_size(split, call.degree, call.rank) // unit)  # fmt: skip


def log_softmax(call: Call) -> Outcome:
    """log_softmax(input, dim): along the split dimension the ranks share largest value and sum."""
    first = call.tensors[0]
    if first.split is None or call.get(1, "dim") is None or call.get(1, "dim") % len(first.shape) != first.split.dim:
        return SHAPE_RULES["log_softmax"](call)
    if call.get(3, "dtype") is not None:
        raise Refusal("log_softmax as another type")
    return Outcome(first.split, (first.split,), call.name)


def class_loss(call: Call) -> Outcome:
    """cross_entropy, nll_loss(input, target, weight, ...) of class numbers: every rank has some of the classes."""
    seen = call.tensors
    first, target = seen[0], seen[1]
    dim = min(1, len(first.shape) - 1)
    split = first.split
    if split is None or split.dim != dim or len(split.parts) > 1:
        raise Refusal(f"{call.name} of values that are not split along their classes")
    if target.shape != (*first.shape[:dim], *first.shape[dim + 1 :]):
        raise Refusal(f"{call.name} of probabilities")
    if call.get(3, "size_average") is not None or call.get(5, "reduce") is not None:
        raise Refusal(f"{call.name} with size_average or reduce")
    return Outcome(None, (split, None, split.on(0))[: len(seen)], call.name)


#: How functions run in which the ranks talk to each other on the way: no region holds one.
LOSSES = ("log_softmax", "cross_entropy", "nll_loss")

RULES = {
    **SHAPE_RULES,
    **names(
        ("linear", linear), ("matmul mm bmm", matmul), ("addmm baddbmm", added_product),
        ("multi_head_attention_forward", attention_layer),
        ("scaled_dot_product_attention", attention), ("embedding", embedding), ("einsum", einsum),
        ("conv1d conv2d conv3d", convolution), ("group_norm", group_norm),
        ("log_softmax", log_softmax), ("cross_entropy nll_loss", class_loss),
    ),
}  # fmt: skip
