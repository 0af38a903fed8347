"""Forward and backward over a window, micro-batch by micro-batch, on whole chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from shoal.core.errors import NumericsError
from shoal.data.loader import MicroBatch, Window
from shoal.engine.randomness import seed_all
from shoal.engine.terms import combined, term_counts, term_weights
from shoal.job import Loss

if TYPE_CHECKING:
    from shoal.engine.run import Run


class Tally:
    """What this rank's part of a window gave: float64 scalars on the device, and counts of tokens."""

    def __init__(self, device: torch.device) -> None:
        self.loss, self.count, self.bad_counts = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
        self.tokens = self.padded_tokens = 0.0

    def add(self, loss: Loss) -> None:
        """A micro-batch's loss."""
        self.loss += loss.sum.detach()
        self.count += loss.count
        self.bad_counts += ~torch.isfinite(loss.count) | (loss.count < 0)


@dataclass
class Pass:
    """A micro-batch on its way through the model. ``end``: from what the model returned to what backward begins with.

    ``seed``: of the forward's randomness; None leaves it as it is.
    """

    run: Run
    micro: MicroBatch
    end_with: Callable[[Pass, Any], Tensor | None]
    seed: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.host_inputs, self.host_targets = self.run.job.inputs(self.micro.batch)

    @cached_property
    def inputs(self) -> Any:
        """The model's inputs on the device."""
        return self.run.precision.place(self.host_inputs, self.run.device)

    @cached_property
    def targets(self) -> Any:
        """The targets on the device."""
        return self.run.precision.place(self.host_targets, self.run.device)

    @property
    def args(self) -> tuple[Any, ...]:
        """The model's positional inputs."""
        return split_inputs(self.inputs)[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The model's keyword inputs."""
        return split_inputs(self.inputs)[1]

    @contextmanager
    def around(self) -> Iterator[None]:
        """What holds during forward and loss: randomness, which rows batch statistics leave out, precision."""
        if self.seed is not None:
            seed_all(*self.seed)
        self.run.mark_padding(self.micro.padding)
        with self.run.precision.forward():
            yield

    def end(self, output: Any) -> Tensor | None:
        """The job's own part after the model's forward."""
        return self.end_with(self, output)


class Forwards(Protocol):
    """How forwards and backwards of a window run: on the whole model, or as a pipeline's schedule."""

    def least(self, micro_batches: int) -> int:
        """How many passes ``micro_batches`` become: more where a schedule needs them."""
        ...

    def train(self, passes: Iterable[Pass], number: int) -> None:
        """Forward and backward of each. Collective where gradients are sent on the way."""
        ...

    def evaluate(self, passes: Iterable[Pass]) -> None:
        """Forward of each. Collective in a pipeline."""
        ...


class Whole:
    """The whole model on this rank: one micro-batch after another."""

    def __init__(
        self, model: nn.Module, start_backward: Callable[[bool], None], release: Callable[[], None] = lambda: None
    ) -> None:
        self.model, self.start_backward, self.release = model, start_backward, release

    def least(self, micro_batches: int) -> int:
        """As many as there are."""
        return micro_batches

    def train(self, passes: Iterable[Pass], number: int) -> None:
        """Gradients are sent during the last backward."""
        for at, each in enumerate(passes, 1):
            self.start_backward(at == number)
            with each.around():
                loss = each.end(self.model(*each.args, **each.kwargs))
            assert loss is not None
            loss.backward()

    def evaluate(self, passes: Iterable[Pass]) -> None:
        """Forward alone."""
        for each in passes:
            with each.around():
                each.end(self.model(*each.args, **each.kwargs))
        self.release()


def forward_backward(run: Run, window: Window, scale: float) -> Tally:
    """Sum loss and count over this rank's micro-batches; gradients of ``scale * loss`` are left in the buckets.

    Collective in its last backward, where gradients are sent, in forwards with batch normalisation, and before the
    first where the job's loss has several terms.
    """
    tally = Tally(run.device)
    weights = term_weights(run, window)
    run.check_frozen()
    run.buckets.start_window()

    def end(each: Pass, output: Any) -> Tensor:
        loss = micro_loss(each, output, weights)
        if not isinstance(loss.sum, Tensor) or not loss.sum.requires_grad:
            raise NumericsError(
                "the loss does not depend on any parameter that trains: backward has nothing to do; "
                "check for .detach(), torch.no_grad() or a frozen model"
            )
        tally.add(loss)
        if run.hooks.observer:
            run.hooks.observer.micro_batch(each, loss)
        return loss.sum * scale

    micros = padded(window.micro_batches, run.forwards.least(len(window.micro_batches)))
    run.forwards.train(passes(run, window, micros, end, tally), len(micros))
    return tally


def passes(
    run: Run, window: Window, micros: Sequence[MicroBatch], end: Callable[[Pass, Any], Tensor | None], tally: Tally
) -> Iterator[Pass]:
    """Each micro-batch's pass, when it is asked for; its tokens are counted."""
    for number, micro in enumerate(micros):
        each = Pass(run, micro, end, (run.settings.seed, window.index, number, run.layout.data_rank))
        count_into(tally, each)
        if run.hooks.observer:
            run.hooks.observer.takes(each)
        yield each


def padded(micros: Sequence[MicroBatch], number: int) -> list[MicroBatch]:
    """``number`` micro-batches: those there are, and then the last one's rows as padding."""
    more = [replace(micros[-1], ids=(), padding=True)] * (number - len(micros))
    return [*micros, *more]


def micro_loss(each: Pass, output: Any, weights: dict[str, Tensor] | None) -> Loss:
    """The summed loss (masked where the rows are padding), and its count as a float64 tensor.

    ``weights``: the window's, of a loss of several terms.
    """
    run, micro = each.run, each.micro
    counts = term_counts(run, micro) if weights else None
    value = run.job.loss(output, each.targets)
    loss = combined(value, counts, weights) if counts and weights else as_loss(value, micro.samples)
    if isinstance(value, Tensor):
        run.note_once("the loss is a scalar: taken as a mean over the micro-batch's samples, weighted by their number")
    total, count = loss
    if micro.padding:
        total, count = torch.where(torch.zeros((), dtype=torch.bool, device=run.device), total, 0.0), 0
    return Loss(total, torch.as_tensor(count, dtype=torch.float64, device=run.device).detach())


def count_into(tally: Tally, each: Pass) -> None:
    """Count a pass's tokens."""
    real, full = (0.0, 0.0) if each.micro.padding else count_tokens(each.host_inputs)
    collates = each.run.data_settings.collate
    if full and collates and not (isinstance(each.host_inputs, Mapping) and "attention_mask" in each.host_inputs):
        each.run.note_once("padding, if collate() adds any, counts as tokens: the inputs have no attention_mask")
    tally.tokens, tally.padded_tokens = tally.tokens + real, tally.padded_tokens + full


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch's inputs as the model takes them: a tensor alone or a tuple (positional), or a dict (keywords)."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


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
