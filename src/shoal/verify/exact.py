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

from shoal.blueprint.structures import attributes, tensors
from shoal.verify.dropout import FORMS, Keyed, dropped

#: Functions with a dropout of other forms, which is switched off, and where its probability stands.
OFF: dict[Any, tuple[str, int]] = {
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout), ("p", 1)),
    F.multi_head_attention_forward: ("dropout_p", 10),
}
_CASTS: dict[Any, Any] = {Tensor.float: Tensor.double}


class Exactly(TorchFunctionMode):
    """Dropout has masks that no layout changes; with ``lift``, what the job's code casts to float32 becomes float64.

    Around the whole run, so that it holds in tracing, forward and recomputation alike. The job's code runs with float64
    as the default dtype, or, recomputed, inside backward.
    """

    recomputes = True

    def __init__(self, lift: bool) -> None:
        super().__init__()
        self.lift = lift
        self.keyed = Keyed()
        self.off: set[str] = set()  # what dropout there was to switch off
        self.lifted = False
        self.paused = False  # while the optimizer runs, whose counters are float32 by its own choice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in FORMS:
            return dropped(self.keyed, func, args, kwargs)
        if func in OFF:
            args, kwargs = self._keep_all(func, list(args), kwargs)
        wide = torch.get_default_dtype() is torch.float64 or torch._C._current_graph_task_id() >= 0
        if self.lift and wide and not self.paused:
            func, args, kwargs = self._wide(func, args, kwargs)
        return func(*args, **kwargs)

    def _keep_all(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        name, place = OFF[func]
        if (args[place] if len(args) > place else kwargs.get(name, 0.0)) > 0:
            self.off.add(func.__name__)
        if len(args) > place:
            args[place] = 0.0
        else:
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


def keep_all(model: nn.Module) -> set[str]:
    """Set the dropout inside of torch's recurrent and attention layers to 0; the classes of those that had any."""
    found = set()
    for module in model.modules():
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0:
            found.add(type(module).__name__)
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


class Carried:
    """Finds what a model's modules keep from one forward to the next. ``found``: names of buffers and attributes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: set[str] = set()
        self._before: dict[str, tuple[Tensor, int]] = {}

    def look(self) -> None:
        """A forward has ended."""
        now = {
            f"{path}.{name}" if path else name: (tensor, tensor._version)
            for path, module in self.model.named_modules()
            if not isinstance(module, nn.modules.batchnorm._BatchNorm)
            for name, value in (attributes(module) | module._buffers).items()
            for tensor in tensors(value)
            if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
        }
        for name in now.keys() & self._before.keys():
            (tensor, version), (old, before) = now[name], self._before[name]
            if tensor is not old or version != before:
                self.found.add(name)
        self._before = now


def _state(device: torch.device) -> Any:
    """The state of every generator that a forward may draw from."""
    kept = np.random.get_state(legacy=False)
    numpy_state = (kept["state"]["key"].tobytes(), kept["state"]["pos"]) if isinstance(kept, dict) else None
    on_device = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
    return torch.get_rng_state().numpy().tobytes(), on_device, random.getstate(), numpy_state
