"""The learning rate over optimizer steps. A step counts once it was applied; skipped steps do not advance it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from shoal.core.errors import ConfigError
from shoal.job import Job

Factor = Callable[[int], float]
UNKNOWN_STEPS = (
    "lr_schedule() asks for the number of steps, but this iterable data does not tell its length; give --steps, or a "
    "schedule that needs no end"
)


def warmup_cosine(steps: int | None, warmup: int = 0, final: float = 0.1) -> Factor:
    """Linear warm-up over ``warmup`` steps to 1, then a cosine to ``final`` at the last of ``steps``."""
    steps = _known(steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def warmup_linear(steps: int | None, warmup: int = 0, final: float = 0.0) -> Factor:
    """Linear warm-up over ``warmup`` steps to 1, then a line to ``final`` at the last of ``steps``."""
    steps = _known(steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        return 1 + (final - 1) * done

    return factor


def warmup_constant(warmup: int = 0) -> Factor:
    """Linear warm-up over ``warmup`` steps, then 1."""
    return lambda step: min(1.0, (step + 1) / warmup) if warmup else 1.0


def _known(steps: int | None) -> int:
    if steps is None:
        raise ConfigError(UNKNOWN_STEPS)
    return steps


def make_schedule(job: Job, optimizer: Optimizer, steps: int | None) -> LrSchedule:
    """The job's schedule over ``steps``, None where the data does not tell. Raises ConfigError."""
    try:
        return LrSchedule(optimizer, job.lr_schedule(optimizer, steps))
    except (TypeError, ValueError) as error:
        if steps is not None:
            raise
        raise ConfigError(f"{UNKNOWN_STEPS} ({error})") from error


def scale_rates(optimizer: Optimizer, factor: float) -> str | None:
    """Multiply the base rate of every group, before its schedule is built; what to tell of it, None where nothing.

    Raises ConfigError where a schedule exists already, which has read the rates as they were.
    """
    if factor == 1.0:
        return None
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            f"lr_scaling linear (x {factor:g}) was asked for, but a scheduler over this optimizer exists already; "
            "give a function step -> factor, or build the scheduler in the job's lr_schedule()"
        )
    before = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    changes = [f"{lr:g} -> {lr * factor:g}" for lr in dict.fromkeys(before)]
    return f"learning rate x {factor:g} (linear, global batch / base batch): {', '.join(changes)}"


def check_scaled(chosen: Any, factor: float) -> None:
    """Raises ConfigError for a scheduler that sets rates of its own, whatever the optimizer's base rates."""
    for part in (chosen, *getattr(chosen, "_schedulers", ())):
        if factor != 1.0 and isinstance(part, OneCycleLR | CyclicLR):
            raise ConfigError(
                f"lr_scaling linear (x {factor:g}) was asked for, but {type(part).__name__} sets the rates it was "
                "given whatever the base rate is; scale them in the job, or use a function step -> factor"
            )


class LrSchedule:
    """Drives a job's schedule: None, a function of the step, or one of torch's schedulers."""

    def __init__(self, optimizer: Optimizer, chosen: Factor | LRScheduler | None) -> None:
        self.optimizer = optimizer
        self.chosen = chosen
        self.taken = 0
        if not (chosen is None or isinstance(chosen, LRScheduler) or callable(chosen)):
            raise ConfigError(
                f"lr_schedule returned {type(chosen).__name__}; return None, a function step -> factor, "
                "or a torch.optim.lr_scheduler"
            )
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._set()
        self.state()  # what cannot be saved is refused before the first step

    def _set(self) -> None:
        if self.chosen is not None and not isinstance(self.chosen, LRScheduler):
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self.chosen(self.taken)

    def step(self) -> None:
        """After each applied optimizer step. Past a fixed-length schedule's end the last rate holds."""
        self.taken += 1
        if isinstance(self.chosen, ReduceLROnPlateau):
            return
        if isinstance(self.chosen, OneCycleLR) and self.chosen.last_epoch >= self.chosen.total_steps - 1:
            return
        if isinstance(self.chosen, LRScheduler):
            self.chosen.step()
        else:
            self._set()

    def evaluated(self, loss: float) -> None:
        """After each evaluation, with the global loss: what a plateau schedule waits for."""
        if isinstance(self.chosen, ReduceLROnPlateau):
            self.chosen.step(loss)

    @property
    def lr(self) -> float:
        """The rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON values. Raises ConfigError for a scheduler whose state is not."""
        inner = _listed(self.chosen.state_dict()) if isinstance(self.chosen, LRScheduler) else None
        try:
            json.dumps(inner)
        except TypeError as error:
            raise ConfigError(
                f"the state of {type(self.chosen).__name__} cannot be saved as JSON ({error}); "
                "use a function step -> factor in its place"
            ) from None
        return {"taken": self.taken, "scheduler": inner}

    def load(self, state: dict[str, Any], ratios: list[float]) -> None:
        """Take up a saved state. ``ratios``: new over saved base rate of each group (1.0 where nothing changed)."""
        self.taken = state["taken"]
        if isinstance(self.chosen, LRScheduler) and state["scheduler"] is not None:
            self.chosen.load_state_dict(_unlisted(state["scheduler"]))
            if any(ratio != 1.0 for ratio in ratios) and hasattr(self.chosen, "base_lrs"):
                self.chosen.base_lrs = [base * ratio for base, ratio in zip(self.chosen.base_lrs, ratios, strict=True)]
        self._set()


def _listed(value: Any) -> Any:
    """A scheduler's state for JSON, which knows no keys but texts: MultiStepLR counts its milestones by number."""
    if isinstance(value, Mapping):
        if not isinstance(value, Counter) and all(isinstance(key, str) for key in value):
            return {key: _listed(item) for key, item in value.items()}
        pairs = [[key, _listed(item)] for key, item in value.items()]
        return {"shoal_pairs": pairs, "counter": isinstance(value, Counter)}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def _unlisted(value: Any) -> Any:
    if isinstance(value, dict) and "shoal_pairs" in value:
        pairs = {key: _unlisted(item) for key, item in value["shoal_pairs"]}
        return Counter(pairs) if value["counter"] else pairs
    if isinstance(value, dict):
        return {key: _unlisted(item) for key, item in value.items()}
    return [_unlisted(item) for item in value] if isinstance(value, list) else value
