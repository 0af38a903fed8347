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
    shifted = _shifted(_wide(ready[0]), split.dim, group)
    return _as_torch(shifted - _log_total(shifted.exp(), split.dim, group), ready[0])


def cross_entropy(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    """Collective. The loss, the same on all ranks."""
    logits = _wide(ready[0])
    shifted = _shifted(logits, min(1, logits.dim() - 1), group)
    return _as_torch(_loss(shifted, ready, args, kwargs, outcome, group), ready[0])


def nll_loss(ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group) -> Tensor:
    """Collective. The loss of log-probabilities, the same on all ranks."""
    return _as_torch(_loss(None, [_wide(ready[0]), *ready[1:]], args, kwargs, outcome, group), ready[0])


def _wide(tensor: Tensor) -> Tensor:
    """Sums of half precision are float32, as in torch's kernels."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _as_torch(made: Tensor, given: Tensor) -> Tensor:
    """In the type that torch gives: that of the logits, under autocast float32."""
    return made if torch.is_autocast_enabled(given.device.type) else made.to(given.dtype)


def _shifted(logits: Tensor, dim: int, group: Group) -> Tensor:
    """Collective. Logits less the largest of all classes."""
    return logits - group.largest(logits.detach().amax(dim, keepdim=True))


def _log_total(exponentials: Tensor, dim: int, group: Group) -> Tensor:
    """Collective. The logarithm of their sum over all classes."""
    return enter(total(exponentials.sum(dim, keepdim=True), group).log(), group)


def _loss(
    shifted: Tensor | None, ready: list[Tensor], args: Any, kwargs: Any, outcome: Outcome, group: Group
) -> Tensor:
    """Collective. From log-probabilities (``ready[0]``, classes second) or shifted logits, which are overwritten: one
    all-reduce of what each rank's classes contribute. Of the logits only their exponentials are kept for backward.
    """
    given = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    given |= dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    split, ignored, smoothing = outcome.targets[0], given["ignore_index"], given["label_smoothing"]
    assert split is not None
    values = (ready[0] if shifted is None else shifted).movedim(split.dim, -1)  # [..., this rank's classes]
    target, weight = ready[1], ready[2] if len(ready) > 2 else None  # [...], [this rank's classes]
    ((low, _, length),) = spans(split, group.degree, group.rank)
    valid = target != ignored
    torch._assert_async(
        (((target >= 0) & (target < split.size)) | ~valid).all(),
        f"a target is none of the {split.size} classes, which are divided over the tensor axis, nor {ignored}",
    )
    here = valid & (target >= low) & (target < low + length)
    place = torch.where(here, target - low, 0)
    own = here.to(values.dtype) if weight is None else torch.where(here, weight[place], 0.0)
    picked = _picked(values, place)
    smooth = (values if weight is None else values * weight).sum(-1) if smoothing else None
    if shifted is not None:
        log_total = _log_total(shifted.exp_(), split.dim, group).squeeze(split.dim)
        picked = picked - log_total
        if smooth is not None:
            smooth = smooth - log_total * (length if weight is None else weight.sum())
    rows = [-torch.where(here, picked, 0.0) * own, own]
    if smooth is not None:
        rows.append(torch.where(valid, -smooth, 0.0))
    loss, counted, *smoothed = total(torch.stack(rows), group).unbind()
    if smoothing:
        loss = loss * (1 - smoothing) + smoothed[0] * (smoothing / split.size)
    if given["reduction"] == "none":
        return loss
    return loss.sum() if given["reduction"] == "sum" else loss.sum() / counted.sum()


def _picked(values: Tensor, place: Tensor) -> Tensor:
    """One entry of each last dimension. By index, whose backward needs shapes only: gather keeps all the values."""
    rows = torch.arange(place.numel(), device=place.device)
    return values.flatten(0, -2)[rows, place.flatten()].view(place.shape) if place.dim() else values[place]
