"""A run: job and settings applied in this process group. The step, the loop and the own-loop way share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.reader import Reader
from shoal.core.errors import ModelError, NumericsError
from shoal.data.loader import DataSettings, Window, Windows
from shoal.data.randomness import undisturbed
from shoal.engine import evaluate as evaluation
from shoal.engine.average import WeightAverage
from shoal.engine.buffers import BufferWatch
from shoal.engine.clock import Clock
from shoal.engine.forward import Forwards
from shoal.engine.held import Held
from shoal.engine.layout import Layout
from shoal.engine.lr_schedule import LrSchedule
from shoal.engine.names import plain
from shoal.engine.observer import Observer
from shoal.engine.optimizer import NamedOptimizer
from shoal.engine.parts import Gradients
from shoal.engine.precision import Precision, Scaler
from shoal.engine.randomness import seed_all
from shoal.engine.record import Record
from shoal.engine.saver import Saver
from shoal.engine.settings import RunSettings
from shoal.engine.state import load_model
from shoal.engine.step import StepReport, Verdict, train_step
from shoal.job import Job
from shoal.parallel.replicate.batchnorm import GlobalBatchNorm
from shoal.parallel.shard.pieces import local

SIGNALS = ("stop", "ended", "written", "failed", "save_calls")


@dataclass(frozen=True)
class Hooks:
    """What surrounds a run: how to report progress, whether a stop was asked for, who looks on. Reads nothing back."""

    beat: Callable[[int, str], None] = lambda step, phase: None
    stop_requested: Callable[[], bool] = lambda: False
    tell: Callable[[str], None] = lambda text: None
    observer: Observer | None = None


@dataclass
class Run:
    """Everything one rank holds of a run. Made by ``engine.build``; ``step_count`` counts optimizer steps."""

    job: Job
    settings: RunSettings
    rank: int
    ranks: int
    device: torch.device
    layout: Layout
    model: nn.Module
    trained: list[str]
    holds: list[bool]  # of each trained parameter, whether this rank holds it
    forwards: Forwards
    norms: list[GlobalBatchNorm]
    buckets: Gradients
    optimizer: NamedOptimizer
    schedule: LrSchedule
    precision: Precision
    scaler: Scaler
    average: WeightAverage
    watch: BufferWatch
    data_settings: DataSettings
    windows_source: Windows
    saver: Saver
    record: Record
    hooks: Hooks
    kernels: dict[str, Any]
    total_steps: int | None
    model_flops: float | None = None  # of a whole sample's forward, where the layout had the model traced
    held: Held = field(default_factory=Held)
    read: Callable[[Tensor], list[float]] = Tensor.tolist  # how the host reads what a step sums
    step_count: int = 0
    reader_state: Any = None  # where this rank's data stood after the last step
    last_loss: float | None = None
    last_eval: dict[str, float] | None = None
    eval_step: int | None = None
    skips_in_a_row: int = 0
    one_term: bool = False  # known that the job's loss has one term
    terms: tuple[str, ...] | None = None  # of the loss, by name; known from the first window on
    stopped: bool = False
    finished: bool = False
    signal_names: tuple[str, ...] = SIGNALS
    clock: Clock = field(init=False)
    _looping: bool = field(default=False, init=False)
    _stepping: bool = field(default=False, init=False)
    _save_asked: bool = field(default=False, init=False)
    _report: StepReport | None = field(default=None, init=False)
    _ended: bool = field(default=False, init=False)
    _asked_to_stop: bool = field(default=False, init=False)
    _noted: set[str] = field(default_factory=set, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)
        self._frozen = [(plain(name), p) for name, p in self.model.named_parameters() if not p.requires_grad]

    # -- the own-loop way ---------------------------------------------------------------------------------------

    def windows(self) -> Iterator[Window]:
        """Each window that is left to train on; ends at the last step, at the data's end, or on a stop request."""
        self._looping = True
        alive = lambda: self.hooks.beat(self.step_count, "data_wait")  # noqa: E731
        source = self.windows_source.iterate(self.step_count, self.total_steps, self.reader_state, alive)
        try:
            while not (self._ended or self._asked_to_stop):
                self.enter("data_wait")
                window = next(source, None)
                if window is None:
                    self._note_early_end()
                    break
                yield window
                self._finish_step()
        finally:
            self._finish_step()
            self._looping = False
        self.saver.drain(self)
        self.stopped = self._asked_to_stop
        self.finished = True

    def step(self, window: Window) -> StepReport:
        """One optimizer update over ``window``. Collective."""
        if not self.scaler.fitted:
            self._fit_scale(window)
        self._stepping = True
        try:
            report = train_step(self, window)
        finally:
            self._stepping = False
        self.step_count = report.step
        self.reader_state = self.windows_source.state()
        if report.count:
            self.last_loss = report.loss
        self._report = report
        self._save_if_asked()
        return report

    def evaluate(self, dataset: Any = None) -> dict[str, float] | None:
        """Loss and metrics on ``dataset`` (default: the job's held-out data); None where there is none. Collective."""
        if dataset is None:
            with undisturbed(self.precision.default_dtype):
                seed_all(self.settings.seed)  # as for data(): a random split in both is one split, on every rank
                dataset = self.job.eval_data()
        if dataset is None:
            return None
        self._pause("evaluate")
        self._stepping = True  # a save called in there waits: the averaged weights are in place
        try:
            found = evaluation.evaluate(self, dataset)
        finally:
            self._stepping = False
        if found is None:
            self._asked_to_stop = True
        else:
            self.last_eval, self.eval_step = found, self.step_count
            self.schedule.evaluated(found["loss"])
            metrics = {name: value for name, value in found.items() if name != "loss"}
            self.record.row("eval", step=self.step_count, loss=found["loss"], metrics=metrics)
        self._resume()
        self._save_if_asked()
        return found

    def save(self) -> None:
        """Write a checkpoint of the last step; in the background inside the loop, at once outside. Collective.

        Called while a step or an evaluation runs (from the loss, say), it saves at its end: never inside a window.
        """
        if self._stepping:
            self._save_asked = True
            return
        self.enter("checkpoint_stall")
        self.saver.save(self)
        if self._looping:
            self.enter("other")
        else:
            self.saver.drain(self)
            self.clock.close()

    def whole_model(self) -> nn.Module:
        """The trained model: this rank's own where it holds all of it, else built anew from the last checkpoint."""
        if not self.held.packed and not any(p.is_meta or local(p) is not p for p in self.model.parameters()):
            return self.model
        with self.precision.user_code():
            model = self.job.model()
        path = self.out / "checkpoints" / f"step-{self.saver.last_step}"
        load_model(model, Reader(path), str(path))
        return model

    def close(self, alone: bool = False) -> None:
        """End the run's files and readers. Collective, unless ``alone``: after a failure the others may be anywhere."""
        if self._closed:
            return
        self._closed = True
        if not alone:
            self.saver.drain(self)
        self.record.close()
        self.windows_source.close()

    # -- what the step asks for ---------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """Time belongs to ``phase`` from now on, and whoever watches this rank knows."""
        self.clock.lap(phase)
        self.hooks.beat(self.step_count, phase)

    def mark_padding(self, padding: bool) -> None:
        """Whether the rows that come are outside batch statistics."""
        for norm in self.norms:
            norm.padding = padding

    def note_once(self, text: str) -> None:
        """Tell the user a sentence, the first time only."""
        if text not in self._noted:
            self._noted.add(text)
            self.record.note(text)

    def used(self) -> list[float]:
        """1.0 for each trained parameter of the whole model that received a gradient on this rank in this window."""
        held = iter(self.buckets.used())
        return [next(held) if holds else 0.0 for holds in self.holds]

    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.hooks.stop_requested()

    def signals(self, window: Window) -> dict[str, float]:
        """What this rank tells the others with each step."""
        return {
            "stop": float(self.stop_requested()),
            "ended": float(not window.more),
            **self.saver.signals(),
        }

    def heard(self, signals: dict[str, float]) -> None:
        """The sums of all ranks' signals."""
        self._asked_to_stop = signals["stop"] > 0
        if signals["ended"] == self.ranks:
            self._ended = self.total_steps is None
            self.windows_source.end_epoch()
        self.saver.heard(self, signals)

    def skipped(self, verdict: Verdict) -> None:
        """A step was skipped for numbers that are not finite. Raises NumericsError after too many in a row."""
        if self.scaler.enabled and self.scaler.scale > 1:
            return  # dynamic loss scaling is looking for its scale
        self.skips_in_a_row += 1
        if self.skips_in_a_row >= self.settings.max_skips:
            name = self.buckets.first_non_finite()
            raise NumericsError(
                f"{self.skips_in_a_row} steps in a row were skipped because {verdict.reason}; "
                f"first parameter with such a gradient: {name or 'none (the loss alone)'}; lower the learning rate, "
                "clip, or look at the data of the steps marked 'skip' in the events"
            )

    def all_finite(self) -> bool:
        """Whether every floating parameter is finite."""
        held = [local(p.detach()) for p in self.model.parameters() if not p.is_meta and p.numel()]
        params = [
            torch.view_as_real(p) if p.is_complex() else p
            for p in held
            if p.numel() and (p.is_floating_point() or p.is_complex())
        ]
        return all(math.isfinite(value) for value in torch.stack(torch._foreach_norm(params, math.inf)).tolist())

    def check_frozen(self) -> None:
        """Raises ModelError for a parameter that was unfrozen since the run was built: nobody sums its gradient."""
        if late := next((name for name, param in self._frozen if param.requires_grad), None):
            raise ModelError(
                f"parameter {late!r} requires a gradient, but was frozen when the run was made, so that its gradient "
                "would stay each rank's own; leave it unfrozen until the run is made and freeze it then, "
                "or start another run with --init-from"
            )

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def _fit_scale(self, window: Window) -> None:
        """Collective. The first fp16 scale from the largest count of a micro-batch over the ranks."""
        self.scaler.fit(evaluation.largest_count(self, window))

    def _note_early_end(self) -> None:
        if self.total_steps is not None and self.step_count < self.total_steps:
            self.record.note(
                f"the data ended after step {self.step_count} of {self.total_steps}: it can be read once only; "
                "return a data set whose __iter__ begins anew each time"
            )

    def _save_if_asked(self) -> None:
        if self._save_asked:
            self._save_asked = False
            self.save()

    def _finish_step(self) -> None:
        if self._report is not None:
            laps = self.clock.close()
            if laps is not None:
                self.record.step(self._report, laps, self.clock.late)
            self._report = None

    def _pause(self, phase: str) -> None:
        self.clock.lap("paused")
        self.hooks.beat(self.step_count, phase)

    def _resume(self) -> None:
        if self._looping:
            self.enter("other")
        else:
            self.clock.close()

    @property
    def out(self) -> Path:
        """The run's folder."""
        return self.record.out
