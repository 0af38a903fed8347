"""What runs on a rank's parts in place of a torch function, where its own arguments are for the whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.blueprint.calls import Outcome
from shoal.blueprint.split import Seen, Split, spans
from shoal.parallel.tensor import losses
from shoal.parallel.tensor.moves import Group, part_of


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
    return part_of(
        whole.bernoulli_(1 - p).div_(1 - p), split, group
    ).clone()  # a view would keep the whole for backward


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
            part_of(t.repeat_interleave(split.size // t.shape[-3], -3), split.on(t.dim() - 3), group).clone()
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


def attention_layer(args: Any, kwargs: dict[str, Any], heads: int, group: Group) -> Tensor:
    """torch's multi_head_attention_forward ([T, B, D]) on this rank's heads, to be summed, without its last bias."""
    packed, bias, dropout, out = (args[place] for place in (5, 6, 10, 11))
    size = args[0].shape[-1] // heads
    query, key, value = (
        part.unflatten(-1, (-1, size)).permute(1, 2, 0, 3) for part in _projected(args[:3], packed, bias)
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
    return F.linear(made.permute(2, 0, 1, 3).flatten(2), out)


def _projected(read: Any, packed: Tensor, bias: Tensor | None) -> list[Tensor]:
    """Query, key and value: one product for those in a row of the same tensor, of which so one copy is kept."""
    starts = [at for at in range(3) if at == 0 or read[at] is not read[at - 1]]
    size, found = packed.shape[0] // 3, list[Tensor]()
    for low, high in itertools.pairwise([*starts, 3]):
        rows = slice(low * size, high * size)
        made = F.linear(read[low], packed[rows], None if bias is None else bias[rows])
        found += made.chunk(high - low, -1)
    return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask to be added to scores; of a bool one, what is true takes no part."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, float("-inf"))


def _embedding(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    """Rows that lie on other ranks give zeros here, before the sum."""
    ids, weight = ready
    padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
    (_, split) = outcome.targets
    assert split is not None
    ((low, _, _),) = spans(split, group.degree, group.rank)
    here = (ids >= low) & (ids < low + weight.shape[0])
    if padding is not None:
        padding = padding % split.size - low
        padding = padding if 0 <= padding < weight.shape[0] else None
    rows = F.embedding(torch.where(here, ids - low, 0), weight, padding)
    return rows.masked_fill(~here.unsqueeze(-1), 0.0)


def _groups(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    """group_norm on this rank's groups."""
    given = dict(zip(("input", "num_groups", "weight", "bias", "eps"), args, strict=False)) | kwargs
    rest = iter(ready[1:])
    weight, bias = (next(rest) if given.get(name) is not None else None for name in ("weight", "bias"))
    return F.group_norm(ready[0], outcome.local, weight, bias, given.get("eps", 1e-5))


HOW: dict[str, Callable[..., Any]] = {
    "reshape": _reshape, "expand": _expand, "cut": _cut, "index": _index, "dropout": _dropout,
    "attention": _attention, "embedding": _embedding, "groups": _groups, "log_softmax": losses.log_softmax,
    "cross_entropy": losses.cross_entropy, "nll_loss": losses.nll_loss,
}  # fmt: skip
