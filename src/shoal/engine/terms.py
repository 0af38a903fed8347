"""Losses of several terms, each divided by its own count over the global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.core.errors import NumericsError
from shoal.data.loader import MicroBatch, Window
from shoal.job import Job, Loss

if TYPE_CHECKING:
    from shoal.engine.run import Run


def term_counts(run: Run, micro: MicroBatch) -> dict[str, Tensor] | None:
    """Each term's count in a micro-batch as the job tells it (0 where the rows are padding); None: one term."""
    if run.one_term:
        return None
    told = run.job.counts(*run.job.inputs(micro.batch))
    if told is None:
        run.one_term = True
        return None
    if not isinstance(told, dict) or not told:
        raise NumericsError(f"counts() returned {told!r}; return {{term: count}}, or None for a loss of one term")
    return {
        name: torch.as_tensor(0 if micro.padding else count, dtype=torch.float64).reshape(()).to(run.device)
        for name, count in told.items()
    }


def term_weights(run: Run, window: Window) -> dict[str, Tensor] | None:
    """What to multiply each term's sum with, so that one division by all counts together leaves sum/count of each.

    That is (all terms' counts) / (its own count), both over the global batch, known before the first backward.
    None for a loss of one term, which the first micro-batch tells. Collective where the job counts terms.
    """
    if type(run.job).counts is Job.counts:
        return None
    counts = [term_counts(run, micro) or {} for micro in window.micro_batches]
    names = _agreed(run, counts)
    if not names:
        return None
    total = torch.stack([torch.stack([count[name] for name in names]) for count in counts]).sum(0)
    dist.all_reduce(total)
    weights = torch.where(total > 0, total.sum() / total, 0.0)
    return dict(zip(names, weights, strict=True))


def _agreed(run: Run, counts: list[dict[str, Tensor]]) -> tuple[str, ...]:
    """The terms' names, the same in every micro-batch; none: one term. Collective in a run's first window."""
    told = sorted({tuple(sorted(count)) for count in counts})
    agreed = run.terms
    if agreed is None:
        every: list[Any] = [None] * run.ranks
        dist.all_gather_object(every, told)
        told = sorted({names for ranks in every for names in ranks})
        run.terms = agreed = told[0]
    if told != [agreed]:
        other = next(names for names in told if names != agreed)
        raise NumericsError(
            f"counts() told the terms {', '.join(agreed) or '(None)'} and, for another micro-batch, "
            f"{', '.join(other) or '(None)'}; tell the same terms every time, with a count of 0 where none is there"
        )
    return agreed


def combined(value: Any, counts: dict[str, Tensor], weights: dict[str, Tensor]) -> Loss:
    """The terms' sums, each with its weight, as one sum with one count. Raises NumericsError."""
    terms = term_losses(value, counts)
    total = sum(loss.sum * weights[name].to(loss.sum.dtype) for name, loss in terms.items())
    return Loss(total, sum(counts.values()))


def term_losses(value: Any, counts: dict[str, Tensor]) -> dict[str, Loss]:
    """Each term's sum beside its count. Raises NumericsError unless loss() and counts() name the same terms."""
    if not isinstance(value, dict) or set(value) != set(counts):
        given = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        raise NumericsError(
            f"counts() tells the terms {', '.join(counts)}, loss() returned {given}; return {{term: sum}} from loss() "
            "with the same names, each a scalar tensor"
        )
    for name, total in value.items():
        if not isinstance(total, Tensor) or total.numel() != 1:
            shape = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise NumericsError(f"loss term {name!r} must be a scalar tensor, found {shape}; sum it over its items")
    return {name: Loss(total.reshape(()), counts[name]) for name, total in value.items()}
