"""One precision policy per operation: autocast's list. Weights, sums and optimizer state stay wide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.engine.settings import Precision as PrecisionName

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE = 65536.0  # of a mean loss, as in torch.amp.GradScaler
GROWTH_INTERVAL = 2000  # good steps before the scale doubles, as in torch.amp.GradScaler


def widest(dtype: torch.dtype) -> torch.dtype:
    """float64 for a floating dtype, complex128 for a complex one; another as it is."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


class Precision:
    """What runs in which dtype: ``fp32``, ``bf16`` and ``fp16`` by autocast over forward and loss, ``fp64`` whole."""

    def __init__(self, name: PrecisionName, device_type: str, recomputes: bool = False) -> None:
        """``recomputes``: blocks run again in backward. Autocast then keeps no cast weights until the forward's end,
        nor where there is no backward: recomputing, and gathering shards unit by unit, would save nothing of them."""
        self.name, self.recomputes = name, recomputes
        self.device_type = device_type
        self.default_dtype = torch.float64 if name == "fp64" else None

    def forward(self) -> AbstractContextManager[Any]:
        """The context of forward and loss; backward and the optimizer run outside it."""
        if self.name in AUTOCAST:
            kept = torch.is_grad_enabled() and not self.recomputes
            return torch.autocast(self.device_type, dtype=AUTOCAST[self.name], cache_enabled=kept)
        return self.user_code()

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """float64 as the default dtype while the job's own code runs, in fp64."""
        if self.default_dtype is None:
            yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def place(self, value: Any, device: torch.device) -> Any:
        """Move a batch to ``device``; in fp64 floating tensors become float64, complex ones complex128.

        Containers keep their type."""
        if isinstance(value, Tensor):
            dtype = widest(value.dtype) if self.default_dtype else value.dtype
            return value.to(device=device, dtype=dtype, non_blocking=True)
        if isinstance(value, Mapping):
            return {key: self.place(item, device) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.place(item, device) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(self.place(item, device) for item in value)
        return value

    def widen(self, model: nn.Module) -> list[str]:
        """Raise narrower floating parameters to float32 master weights (float64 in fp64); says which, in sentences."""
        wide = self.default_dtype or torch.float32
        raised = []
        for name, param in model.named_parameters():
            if param.is_floating_point() and param.element_size() < wide.itemsize:
                raised.append(f"{name} ({str(param.dtype).removeprefix('torch.')})")
                param.data = param.data.to(wide)
        if self.default_dtype:
            model._apply(lambda tensor: tensor.to(widest(tensor.dtype)))  # .to(float64) would drop imaginary parts
        if not raised:
            return []
        more = f" and {len(raised) - 3} more" if len(raised) > 3 else ""
        return [f"weights kept as {str(wide).removeprefix('torch.')} masters: {', '.join(raised[:3])}{more}"]


class Scaler:
    """Dynamic loss scaling for fp16: halves on overflow, doubles after a run of good steps. Else a scale of 1."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = FIRST_SCALE if enabled else 1.0
        self.good_steps = 0
        self.fitted = not enabled

    def fit(self, count: float) -> None:
        """Choose the first scale for a loss summed over ``count`` items in one micro-batch."""
        if not self.fitted:
            self.scale = 2.0 ** math.floor(math.log2(FIRST_SCALE / max(count, 1.0)))
            self.fitted = True

    def update(self, finite: bool) -> None:
        """After each step, on all ranks alike."""
        if not self.enabled:
            return
        if not finite:
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, float]) -> None:
        """Take up a saved state."""
        if self.enabled:
            self.scale, self.good_steps, self.fitted = state["scale"], int(state["good_steps"]), True
