"""Evaluation: every held-out sample exactly once, over any number of ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shoal.core.errors import NumericsError
from shoal.data.loader import Window, eval_micro_batches
from shoal.engine.buffers import unchanged_buffers
from shoal.engine.forward import as_loss, call, micro_loss
from shoal.engine.terms import term_counts, term_losses, term_weights
from shoal.job import Loss

if TYPE_CHECKING:
    from shoal.engine.run import Run

STOP_CHECK_EVERY = 8  # micro-batches between looks at a stop request, on all ranks at the same place


def evaluate(run: Run, dataset: Any) -> dict[str, float] | None:
    """Loss and metrics over ``dataset``: sum of sums / sum of counts. Collective. None: stopped on request."""
    sums: dict[str, torch.Tensor] = {}
    modes = [(module, module.training) for module in run.model.modules()]
    was_training = run.model.training
    run.model.eval()
    try:
        with torch.no_grad(), run.average.in_place():
            for number, micro in enumerate(eval_micro_batches(dataset, run.data_settings)):
                if number % STOP_CHECK_EVERY == 0 and _stop(run):
                    return None
                run.hooks.beat(run.step_count, "evaluate")
                _add(run, sums, micro)
    finally:
        run.model.train(was_training)
        for module, mode in modes:  # parts that the user froze stay as they were
            module.training = mode
        run.mark_padding(False)
    names = _names(run, sums)
    none = torch.zeros(2, dtype=torch.float64, device=run.device)
    total = torch.cat([sums.get(name, none) for name in names])
    dist.all_reduce(total)
    values = total.view(-1, 2).tolist()
    means = {name: value / count if count else float("nan") for name, (value, count) in zip(names, values, strict=True)}
    terms = [mean for name, mean in means.items() if name.startswith("loss/") and not math.isnan(mean)]
    return means if "loss" in means else {"loss": sum(terms) if terms else float("nan"), **means}


def _names(run: Run, sums: dict[str, torch.Tensor]) -> list[str]:
    """Collective. The names of all ranks' figures: which a rank has may depend on its samples."""
    every: list[Any] = [None] * run.ranks
    dist.all_gather_object(every, list(sums))
    return sorted({name for names in every for name in names})


def _stop(run: Run) -> bool:
    asked = torch.tensor([float(run.stop_requested())], device=run.device)
    dist.all_reduce(asked)
    return bool(asked.item())


def _add(run: Run, sums: dict[str, torch.Tensor], micro: Any) -> None:
    inputs, targets = run.job.inputs(micro.batch)
    inputs, targets = run.precision.place(inputs, run.device), run.precision.place(targets, run.device)
    run.mark_padding(micro.padding)
    with run.precision.forward():
        output = call(run.model, inputs)
        value = run.job.loss(output, targets)
        counts = term_counts(run, micro)
        found: dict[str, Any] = (
            {"loss": as_loss(value, micro.samples)}
            if counts is None
            else {f"loss/{name}": loss for name, loss in term_losses(value, counts).items()}
        )
        found.update(run.job.metrics(output, targets))
    for name, value in found.items():
        if not isinstance(value, Loss):
            raise NumericsError(
                f"metric {name!r} is {type(value).__name__}; return shoal.Loss(sum, count), so that it can be "
                "averaged over any number of ranks"
            )
        pair = [torch.as_tensor(part, dtype=torch.float64, device=run.device).reshape(()) for part in value]
        part = torch.zeros_like(torch.stack(pair)) if micro.padding else torch.stack(pair)
        sums[name] = sums[name] + part if name in sums else part


def largest_count(run: Run, window: Window) -> float:
    """The largest loss count of a micro-batch in the first of ``window``, over the ranks. Collective."""
    weights = term_weights(run, window)
    with torch.no_grad(), unchanged_buffers(run.model):
        loss, _, _ = micro_loss(run, window.micro_batches[0], weights)
    largest = loss.count.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
