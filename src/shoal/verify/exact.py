"""What is changed in a job on both sides, so that two runs of it can be compared; and what makes that impossible."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

#: Functions with a dropout probability, and where it stands among their arguments.
DROPOUT: dict[Any, tuple[str, int]] = {
    **dict.fromkeys(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout), ("p", 1)
    ),
    **dict.fromkeys((torch.dropout, torch.alpha_dropout, torch.feature_dropout), ("p", 1)),
    F.scaled_dot_product_attention: ("dropout_p", 4),
    F.multi_head_attention_forward: ("dropout_p", 11),
}
_CASTS: dict[Any, Any] = {Tensor.float: Tensor.double}


class Exactly(TorchFunctionMode):
    """Dropout keeps everything; with ``lift``, what the job's code casts to float32 becomes float64.

    Around the whole run, so that it holds in tracing, forward and recomputation alike. The job's code runs with float64
    as the default dtype, or, recomputed, inside backward.
    """

    def __init__(self, lift: bool) -> None:
        super().__init__()
        self.lift = lift
        self.dropped = False  # whether there was a dropout to switch off
        self.lifted = False
        self.paused = False  # while the optimizer runs, whose counters are float32 by its own choice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUT:
            args, kwargs = self._keep_all(*DROPOUT[func], list(args), kwargs)
        wide = torch.get_default_dtype() is torch.float64 or torch._C._current_graph_task_id() >= 0
        if self.lift and wide and not self.paused:
            func, args, kwargs = self._wide(func, args, kwargs)
        return func(*args, **kwargs)

    def _keep_all(self, name: str, place: int, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if len(args) > place:
            self.dropped |= args[place] > 0
            args[place] = 0.0
        else:
            self.dropped |= kwargs.get(name, 0.0) > 0
            kwargs[name] = 0.0
        return args, kwargs

    def _wide(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        narrow = torch.float32
        if func in _CASTS or narrow in kwargs.values() or any(arg is narrow for arg in args):
            self.lifted = True
            func = _CASTS.get(func, func)
            args = [torch.float64 if arg is narrow else arg for arg in args]
            kwargs = {name: torch.float64 if arg is narrow else arg for name, arg in kwargs.items()}
        return func, args, kwargs


def keep_all(model: nn.Module) -> bool:
    """Set the dropout of the model's modules to 0; whether there was any."""
    found = False
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found |= module.p > 0
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            found |= module.dropout > 0
            module.dropout = 0.0
    return found


def perturb(model: nn.Module, unit: float) -> None:
    """Move every weight up or down by ``unit`` of itself, as rounding might."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                signs = torch.randint(0, 2, param.shape, generator=generator).to(param) * 2 - 1
                param.mul_(1 + unit * signs)


class RandomForward:
    """Finds the innermost module whose first forward draws random numbers. ``found``: its path and class."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.found: str | None = None
        self._before: list[Any] = []
        self._handles: list[RemovableHandle] = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave(path)))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._before.append(_state(self.device))

    def _leave(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            before = self._before.pop()
            if self.found is None and before != _state(self.device):
                self.found = f"{path or 'the model'} ({type(module).__name__})"

        return hook

    def end(self) -> None:
        """Look no further."""
        for handle in self._handles:
            handle.remove()


def _state(device: torch.device) -> Any:
    """The state of every generator that a forward may draw from."""
    kept = np.random.get_state(legacy=False)
    numpy_state = (kept["state"]["key"].tobytes(), kept["state"]["pos"]) if isinstance(kept, dict) else None
    on_device = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
    return torch.get_rng_state().numpy().tobytes(), on_device, random.getstate(), numpy_state
