"""Losses over classes of which every rank has some: the logits are never whole (Shoeybi et al.,
https://arxiv.org/abs/1909.08053, section 3). The formulas are torch's own, of F.cross_entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.blueprint.calls import Outcome
from shoal.blueprint.split import Split, spans
from shoal.parallel.tensor.moves import Group, enter, total

_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def log_softmax(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    """Collective. This rank's classes of log_softmax."""
    split = outcome.outputs
    assert isinstance(split, Split)
    return _as_torch(_log_softmax(_wide(ready[0]), split.dim, group), ready[0])


def cross_entropy(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    """Collective. The loss, the same on all ranks."""
    wide = _log_softmax(_wide(ready[0]), min(1, ready[0].dim() - 1), group)
    return _as_torch(_nll([wide, *ready[1:]], args, kwargs, outcome, group), ready[0])


def nll_loss(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    """Collective. The loss of log-probabilities, the same on all ranks."""
    return _as_torch(_nll([_wide(ready[0]), *ready[1:]], args, kwargs, outcome, group), ready[0])


def _wide(tensor: Tensor) -> Tensor:
    """Sums of half precision are float32, as in torch's kernels."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _as_torch(made: Tensor, given: Tensor) -> Tensor:
    """In the type that torch gives: that of the logits, under autocast float32."""
    return made if torch.is_autocast_enabled(given.device.type) else made.to(given.dtype)


def _log_softmax(logits: Tensor, dim: int, group: Group) -> Tensor:
    shifted = logits - group.largest(logits.detach().amax(dim, keepdim=True))
    return shifted - enter(total(shifted.exp().sum(dim, keepdim=True), group).log(), group)


def _nll(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    """From log-probabilities (classes second), one all-reduce of what each rank's classes contribute."""
    given = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    given |= dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    split, ignored, smoothing = outcome.targets[0], given["ignore_index"], given["label_smoothing"]
    assert split is not None
    log_p, target = ready[0].movedim(split.dim, -1), ready[1]  # [..., this rank's classes], [...]
    weight = ready[2] if len(ready) > 2 else None
    ((low, _, length),) = spans(split, group.degree, group.rank)
    valid = target != ignored
    torch._assert_async(
        (((target >= 0) & (target < split.size)) | ~valid).all(),
        f"a target is none of the {split.size} classes, which are divided over the tensor axis, nor {ignored}",
    )
    here = valid & (target >= low) & (target < low + length)
    place = torch.where(here, target - low, 0)
    picked = torch.where(here, log_p.gather(-1, place.unsqueeze(-1)).squeeze(-1), 0.0)
    own = here.to(log_p.dtype) if weight is None else torch.where(here, weight[place], 0.0)
    rows = [-picked * own, own]
    if smoothing:
        rows.append(torch.where(valid, -(log_p if weight is None else log_p * weight).sum(-1), 0.0))
    loss, counted, *smooth = total(torch.stack(rows), group).unbind()
    if smoothing:
        loss = loss * (1 - smoothing) + smooth[0] * (smoothing / split.size)
    if given["reduction"] == "none":
        return loss
    return loss.sum() if given["reduction"] == "sum" else loss.sum() / counted.sum()
