"""The main loop: steps, evaluations and checkpoints when they are due, and the account of it all."""

from __future__ import annotations

import time
from typing import Any

from shoal.engine import compression
from shoal.engine.run import Run
from shoal.monitor.stragglers import stragglers


def train_loop(run: Run) -> dict[str, Any]:
    """Train to the end or to a stop request; returns the summary. Collective."""
    started = time.perf_counter()
    settings = run.settings
    for window in run.windows():
        report = run.step(window)
        if settings.save_every and run.record.totals.steps == 0:
            run.saver.reserve(run)  # the first save stalls no longer than later ones
        if settings.eval_every and report.step % settings.eval_every == 0:
            run.evaluate()
        if settings.save_every and report.step % settings.save_every == 0:
            run.save()
    if run.step_count and run.saver.last_step != run.step_count:
        run.save()
    if not run.stopped and run.eval_step != run.step_count:
        run.evaluate()
    return summarise(run, time.perf_counter() - started)


def summarise(run: Run, seconds: float) -> dict[str, Any]:
    """The run in plain values: what ``--json`` prints."""
    run.record.flush()
    totals = run.record.totals
    found = dict(run.last_eval or {})
    return {
        "steps": run.step_count,
        "steps_here": totals.steps,
        "loss": run.last_loss,
        "eval": found.pop("loss", None),
        "samples_per_s": totals.samples_per_s,
        "tokens_per_s": totals.tokens_per_s,
        "tokens": totals.tokens,
        "padded_tokens": totals.padded_tokens,
        "out": str(run.out),
        "metrics": found,
        "seconds": seconds,
        "skipped": totals.skipped,
        "parts": totals.parts(),
        "compress": compression.account(run),
        "stopped": run.stopped,
        "stragglers": [str(found) for found in stragglers(run.out, run.ranks)] if run.rank == 0 else [],
    }
