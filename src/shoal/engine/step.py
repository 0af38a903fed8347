"""THE step: one optimizer update over one global batch, the same body in every layout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from shoal.core.errors import NumericsError
from shoal.data.loader import Window
from shoal.engine.forward import Tally, forward_backward
from shoal.engine.optimizer import clip_factor

if TYPE_CHECKING:
    from shoal.engine.run import Run

FIGURES = ("loss", "count", "bad_counts", "squared_norm", "tokens", "padded_tokens")


class Verdict(NamedTuple):
    """What all ranks decided together: loss and norm are the global batch's, normalised once."""

    applied: bool
    reason: str | None
    factor: float
    loss: float
    count: float
    grad_norm: float
    tokens: float
    padded_tokens: float
    used: list[bool]
    signals: dict[str, float]
    changed_buffers: list[float]


class StepReport(NamedTuple):
    """What one step measured. ``loss`` and ``grad_norm`` are global; ``lr`` is the rate that was used."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    count: float
    samples: int
    tokens: float
    padded_tokens: float
    applied: bool
    reason: str | None


def train_step(run: Run, window: Window) -> StepReport:
    """One optimizer update over one global batch. Collective."""
    run.enter("forward_backward")
    tally = forward_backward(run, window, run.scaler.scale)  # summed loss and its count, as tensors
    run.enter("sync_exposed")
    run.buckets.finish()  # SUM over the ranks that split the work, and over holders of tied weights; divides nothing
    total = reduce(run, window, tally)  # ONE all-reduce (loss, count, squared norm, signals) and one read by the host
    verdict = judge(run, total)  # norm, whether to apply, one factor
    run.enter("optimizer")
    lr = run.schedule.lr
    apply(run, verdict)  # optimizer with one factor, lr_schedule, scaler, gradients freed
    run.enter("other")
    report = StepReport(
        window.index + 1, window.epoch, verdict.loss, verdict.grad_norm, lr, verdict.count,
        window.global_samples, verdict.tokens, verdict.padded_tokens, verdict.applied, verdict.reason,
    )  # fmt: skip
    if run.hooks.observer:
        run.hooks.observer.stepped(run, report)
    return report


def reduce(run: Run, window: Window, tally: Tally, dtype: torch.dtype | None = None) -> list[float]:
    """Collective. Everything that ranks must know of each other, summed in one float64 vector and read once."""
    squares = run.buckets.squared_norm(dtype).to(run.device)
    head = torch.stack([tally.loss, tally.count, tally.bad_counts])
    head = head if run.layout.tells_loss else torch.zeros_like(head)  # 0 times NaN is NaN
    told = [
        tally.tokens * run.layout.tells_tokens,
        tally.padded_tokens * run.layout.tells_tokens,
        *run.signals(window).values(),
        *run.used(),
        *run.watch.changed(),
    ]
    total = torch.cat([head, squares[None], torch.tensor(told, dtype=torch.float64).to(run.device, non_blocking=True)])
    dist.all_reduce(total)
    values = run.read(total)
    if dtype is None and not math.isfinite(values[FIGURES.index("squared_norm")]):
        return reduce(run, window, tally, torch.float64)  # float32 squares may have overflowed: all ranks see it
    return values


def judge(run: Run, values: list[float]) -> Verdict:
    """What to do with the step, the same on all ranks. Raises NumericsError for a count that is none."""
    loss, count, bad, squared, tokens, padded = values[: len(FIGURES)]
    if bad or not math.isfinite(count):
        raise NumericsError(
            f"the loss count of a micro-batch is negative or not finite (sum over ranks: {count}); "
            "return shoal.Loss(sum, count) with the number of items summed over"
        )
    rest = values[len(FIGURES) :]
    signals = dict(zip(run.signal_names, rest, strict=False))
    rest = rest[len(run.signal_names) :]
    used, changed = rest[: len(run.trained)], rest[len(run.trained) :]
    scaled = count * run.scaler.scale
    norm = math.sqrt(squared) / scaled if count else 0.0
    reason = None
    if count == 0:
        reason = "no item counts in this global batch"
    elif not (math.isfinite(loss) and math.isfinite(norm)):
        reason = "the loss is not finite" if not math.isfinite(loss) else "a gradient is not finite"
    return Verdict(
        reason is None, reason, clip_factor(norm, run.layout.plan.clip) / scaled if reason is None else 0.0,
        loss / count if count else 0.0, count, norm, tokens, padded,
        [value > 0 for value in used], signals, changed,
    )  # fmt: skip


def apply(run: Run, verdict: Verdict) -> None:
    """Update weights with the verdict's factor, or skip; on all ranks alike."""
    run.watch.equalise(verdict.changed_buffers)
    if verdict.applied:
        run.buckets.assign(used for used, held in zip(verdict.used, run.holds, strict=True) if held)
        if run.hooks.observer:
            run.hooks.observer.gradients(run, verdict)
        with run.precision.user_code():  # an optimizer makes its counters in the default dtype
            if not run.optimizer.step(verdict.factor):
                run.buckets.scale(verdict.factor)
                run.optimizer.step(1.0)
        run.schedule.step()
        run.average.update()
        run.skips_in_a_row = 0
    elif verdict.count:
        run.skipped(verdict)
    run.scaler.update(verdict.reason is None or not verdict.count)
    run.buckets.start_window()  # frees the gradients
    run.heard(verdict.signals)
