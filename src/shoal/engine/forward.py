"""Forward and backward over a window, micro-batch by micro-batch, on whole chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal.core.errors import NumericsError
from shoal.data.loader import MicroBatch, Window
from shoal.engine.randomness import seed_all
from shoal.engine.terms import combined, term_counts, term_weights
from shoal.job import Loss

if TYPE_CHECKING:
    from shoal.engine.run import Run


class Tally(NamedTuple):
    """What this rank's part of a window gave: float64 scalars on the device, and counts of tokens."""

    loss: Tensor
    count: Tensor
    bad_counts: Tensor
    tokens: float
    padded_tokens: float


def forward_backward(run: Run, window: Window, scale: float) -> Tally:
    """Sum loss and count over this rank's micro-batches; gradients of ``scale * loss`` are left in the buckets.

    Collective in its last backward, where gradients are sent, in forwards with batch normalisation, and before the
    first where the job's loss has several terms.
    """
    loss, count, bad = (torch.zeros((), dtype=torch.float64, device=run.device) for _ in range(3))
    tokens = padded = 0.0
    weights = term_weights(run, window)
    run.check_frozen()
    run.buckets.start_window()
    final = len(window.micro_batches) - 1
    for number, micro in enumerate(window.micro_batches):
        run.buckets.start_backward(last=number == final)
        seed_all(run.settings.seed, window.index, number, run.rank)
        part, real, full = micro_loss(run, micro, weights)
        if not isinstance(part.sum, Tensor) or not part.sum.requires_grad:
            raise NumericsError(
                "the loss does not depend on any parameter that trains: backward has nothing to do; "
                "check for .detach(), torch.no_grad() or a frozen model"
            )
        (part.sum * scale).backward()
        loss += part.sum.detach()
        count += part.count
        bad += ~torch.isfinite(part.count) | (part.count < 0)
        tokens, padded = tokens + real, padded + full
    return Tally(loss, count, bad, tokens, padded)


def micro_loss(run: Run, micro: MicroBatch, weights: dict[str, Tensor] | None) -> tuple[Loss, float, float]:
    """The summed loss (masked where the rows are padding), its count as a float64 tensor, and token counts.

    ``weights``: the window's, of a loss of several terms.
    """
    counts = term_counts(run, micro) if weights else None
    inputs, targets = run.job.inputs(micro.batch)
    real, full = (0.0, 0.0) if micro.padding else count_tokens(inputs)
    if full and run.data_settings.collate and not (isinstance(inputs, Mapping) and "attention_mask" in inputs):
        run.note_once("padding, if collate() adds any, counts as tokens: the inputs have no attention_mask")
    inputs, targets = run.precision.place(inputs, run.device), run.precision.place(targets, run.device)
    run.mark_padding(micro.padding)
    with run.precision.forward():
        output = call(run.model, inputs)
        value = run.job.loss(output, targets)
        loss = combined(value, counts, weights) if counts and weights else as_loss(value, micro.samples)
    if isinstance(value, Tensor):
        run.note_once("the loss is a scalar: taken as a mean over the micro-batch's samples, weighted by their number")
    total, count = loss
    if micro.padding:
        total, count = torch.where(torch.zeros((), dtype=torch.bool, device=run.device), total, 0.0), 0
    return Loss(total, torch.as_tensor(count, dtype=torch.float64, device=run.device).detach()), real, full


def call(model: Any, inputs: Any) -> Any:
    """The model on a tensor, a tuple (positional) or a dict (keywords)."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def as_loss(value: Any, samples: int) -> Loss:
    """A job's loss as sum and count; a scalar is a mean over the micro-batch's samples. Raises NumericsError."""
    if isinstance(value, Loss):
        total, count = value
    elif isinstance(value, Tensor):
        total, count = value, samples
    elif isinstance(value, dict):
        raise NumericsError(
            f"the loss returned the terms {', '.join(map(str, value))}; write counts(inputs, targets) -> "
            "{term: count} in the job, so that each is divided by its own count over the global batch"
        )
    else:
        raise NumericsError(
            f"the loss returned {type(value).__name__}; return shoal.Loss(sum, count) or a scalar tensor (a mean)"
        )
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise NumericsError(f"the loss must be a scalar, found {shape}; sum it and return shoal.Loss(sum, count)")
    total = total.reshape(())
    return Loss(total if isinstance(value, Loss) else total * samples, count)


def count_tokens(inputs: Any) -> tuple[float, float]:
    """(real, padded) tokens of a batch: elements of the first integer tensor of two dimensions or more (B, T).

    Real ones are those of ``attention_mask`` where the inputs have one. (0, 0) where nothing looks like tokens.
    """
    values = (
        inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else [inputs]
    )
    for value in values:
        if isinstance(value, Tensor) and value.dim() >= 2 and not value.is_floating_point():
            mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
            real = float(mask.sum()) if isinstance(mask, Tensor) else float(value.numel())
            return real, float(value.numel())
    return 0.0, 0.0
