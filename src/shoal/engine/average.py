"""Averaged weights (EMA): average = decay * average + (1 - decay) * weight after each applied step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.engine.names import plain


class WeightAverage:
    """Keeps an exponential average of the parameters that train; does nothing where ``decay`` is None."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.decay = decay
        trained = [
            (plain(name), param)
            for name, param in model.named_parameters()
            if param.requires_grad and not param.is_meta
        ]
        self._params = [param for _, param in trained] if decay is not None else []
        self._average = [param.detach().clone() for param in self._params]
        self._names = [name for name, _ in trained] if decay is not None else []

    def update(self) -> None:
        """After each applied step."""
        if self.decay is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self._average, [p.detach() for p in self._params], 1 - self.decay)

    def tensors(self) -> dict[str, Tensor]:
        """``ema/<name>`` -> average."""
        return {f"ema/{name}": tensor for name, tensor in zip(self._names, self._average, strict=True)}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model holds the averaged weights inside, its own again after."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for param, average in zip(self._params, self._average, strict=True):
                held = param.detach().clone()
                param.copy_(average)
                average.copy_(held)
