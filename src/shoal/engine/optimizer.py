"""The job's optimizer: torch's fastest form of it, and its state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adam, Optimizer

from shoal.core.errors import CheckpointError, ModelError
from shoal.engine.held import Held
from shoal.engine.names import plain

KERNELS = ("fused", "foreach")  # how a step is computed, not what


class NamedOptimizer:
    """A torch optimizer whose parameters are known by the model's names."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        if isinstance(optimizer, LBFGS):
            raise ModelError("LBFGS evaluates the loss several times per step; use a first-order optimizer")
        self.optimizer = optimizer
        self.names = {id(param): plain(name) for name, param in model.named_parameters()}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self.names:
                    raise ModelError(
                        f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the model; "
                        "build it over model.named_parameters() of the model it is given"
                    )
        #: Each group's parameters as the job built it over the whole model; this rank may hold some of them only.
        self.groups = [[self.names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
        self.fused = _make_fast(optimizer)
        self._untried = False  # state was loaded, and no step was taken with it yet
        self.built = self.describe()

    def hold(self, model: nn.Module, here: Held) -> None:
        """Take ``model``'s present parameters, by name, in place of those it was built over; none that is elsewhere.

        State that was made with the optimizer goes along: of a tensor shaped as the parameter, what is held ``here``.
        """
        held = {plain(name): param for name, param in model.named_parameters() if not param.is_meta}
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            for name, old in zip(names, group["params"], strict=True):
                if held.get(name) is not old and (state := self.optimizer.state.pop(old, None)) and name in held:
                    self.optimizer.state[held[name]] = {
                        key: _part(name, old, value, held[name], here) for key, value in state.items()
                    }
            group["params"] = [held[name] for name in names if name in held]
        self.names = {id(param): name for name, param in held.items()}
        self.fused = _make_fast(self.optimizer)
        if any(isinstance(param, DTensor) for param in held.values()):
            self.fused = False  # the kernels that take a factor want it as a DTensor too: gradients are scaled first
        for group in self.optimizer.param_groups:
            kinds = {isinstance(param, DTensor) for param in group["params"]}
            if len(kinds) > 1:
                group.update({name: False for name in KERNELS if name in group})  # they take one kind at a time
            elif True in kinds and group.get("fused") and not isinstance(self.optimizer, Adam):
                group.update(fused=False, foreach=True)  # torch has rules for Adam's fused kernels alone on DTensors

    def describe(self) -> list[dict[str, Any]]:
        """Each group's hyperparameters as JSON values."""
        return [_plain(group) for group in self.optimizer.param_groups]

    def step(self, factor: float) -> bool:
        """Apply gradients times ``factor``; False where the caller must scale them first and call with 1.0."""
        if factor != 1.0 and not self.fused:
            return False
        if self.fused:
            device = next((p.device for group in self.optimizer.param_groups for p in group["params"]), "cpu")
            inverse = None if factor == 1.0 else torch.tensor(1.0 / factor, dtype=torch.float32, device=device)
            self.optimizer.grad_scale = inverse  # type: ignore[attr-defined]  # read by torch's fused kernels
            self.optimizer.found_inf = None  # type: ignore[attr-defined]
        try:
            self.optimizer.step()
        except KeyError as error:
            if (lacking := self._lacking(error)) is None:
                raise
            raise lacking from error
        self._untried = False
        return True

    def _lacking(self, error: KeyError) -> CheckpointError | None:
        """What to say where the error is about state that the checkpoint did not hold."""
        key = error.args[0]
        names = [self.names[id(param)] for param, state in self.optimizer.state.items() if state and key not in state]
        if not (self._untried and names):
            return None
        return CheckpointError(
            f"the checkpoint's optimizer state of {names[0]} has no {key!r}, which {type(self.optimizer).__name__} "
            "needs; resume with the torch and the optimizer that wrote it, or take weights alone with --init-from"
        )

    def tensors(self) -> dict[str, Tensor]:
        """State tensors as ``optimizer/<key>/<parameter name>``."""
        return {f"optimizer/{key}/{name}": value for key, name, _, value in self.state_tensors()}

    def state_tensors(self) -> list[tuple[str, str, Tensor, Tensor]]:
        """(key, parameter's name, parameter, state tensor) of every state tensor."""
        return [
            (key, self.names[id(param)], param, value)
            for param, state in self.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]

    def values(self) -> dict[str, Any]:
        """Groups, which state each parameter has, and state that is not tensors: JSON values."""
        return {
            "class": type(self.optimizer).__name__,
            "groups": [
                {
                    "parameters": names,
                    "now": _plain(group),
                    "built": built,
                }
                for names, group, built in zip(self.groups, self.optimizer.param_groups, self.built, strict=True)
            ],
            "state": {
                self.names[id(param)]: {
                    key: None if isinstance(value, Tensor) else value for key, value in state.items()
                }
                for param, state in self.optimizer.state.items()
            },
        }

    def load(
        self, values: dict[str, Any], read: Callable[[str, str, Tensor], Tensor], tied: Mapping[str, str]
    ) -> tuple[list[str], list[float]]:
        """Take up saved state; ``read(key, parameter's name, parameter)`` gives a tensor of it.

        Returns notes and new/saved base rates per group. State is saved under a tied parameter's first name. What
        other ranks hold (on the meta device here) is left out.
        A hyperparameter that the job now builds differently wins over the saved one, one that only the job or only
        the checkpoint has is the job's; a note says so.
        Raises CheckpointError naming state that is missing or groups that differ.
        """
        mine = [first_names(names, tied) for names in self.groups]
        saved = [first_names(group["parameters"], tied) for group in values["groups"]]
        if values["class"] != type(self.optimizer).__name__ or mine != saved:
            raise CheckpointError(
                f"the checkpoint's optimizer is {values['class']} over groups of {[len(g) for g in saved]} parameters, "
                f"the job's is {type(self.optimizer).__name__} over {[len(g) for g in mine]}; "
                "resume with the same optimizer, or take weights alone with --init-from"
            )
        notes, ratios = self._merge(values["groups"])
        for group in self.optimizer.param_groups:
            on_host = not (group.get("fused") or group.get("capturable"))  # where torch keeps its step counters
            for param in group["params"]:
                name = self.names[id(param)]
                saved_state = {} if param.is_meta else values["state"].get(tied.get(name, name), {})
                for key, value in saved_state.items():
                    if value is None:
                        value = read(key, name, param)
                        value = value if key == "step" and on_host else _beside(param, value)
                    self.optimizer.state[param][key] = value
        self._untried = True
        return notes, ratios

    def _merge(self, saved_groups: list[dict[str, Any]]) -> tuple[list[str], list[float]]:
        notes, ratios = [], []
        for number, (group, built, saved) in enumerate(
            zip(self.optimizer.param_groups, self.built, saved_groups, strict=True)
        ):
            before, now = saved["built"], saved["now"]
            notes += _strangers(number, built, now)
            for key, value in now.items():
                if key not in group or key in KERNELS:
                    continue
                if built.get(key) == before.get(key):
                    group[key] = tuple(value) if isinstance(value, list) else value
                elif key != "initial_lr":
                    notes.append(
                        f"optimizer group {number}: {key} was {before.get(key)} and is now {built.get(key)}; "
                        "the new value is used"
                    )
            old, new = before.get("initial_lr", before.get("lr")), built.get("initial_lr", built["lr"])
            ratio = new / old if old else 1.0
            if ratio != 1.0:
                group["initial_lr"], group["lr"] = new, now.get("lr", old) * ratio
            ratios.append(ratio)
        return notes, ratios


def _part(name: str, old: Tensor, value: Any, param: Tensor, here: Held) -> Any:
    """A parameter's state as it belongs to what is held of the parameter."""
    if not isinstance(value, Tensor) or not value.ndim or value.shape != old.shape:
        return value
    made = torch.empty_like(param, dtype=value.dtype, requires_grad=False)
    for part in here.piece(name, made).parts:
        part.tensor.copy_(part.box.of(value))
    return made


def first_names(names: Iterable[str], tied: Mapping[str, str]) -> list[str]:
    """Each tied parameter once, under its first name."""
    return list(dict.fromkeys(tied.get(name, name) for name in names))


def _beside(param: Tensor, value: Tensor) -> Tensor:
    """``value`` on the parameter's device, and in its layout where the shapes agree, as fused kernels need it."""
    if isinstance(param, DTensor) or value.shape != param.shape or value.stride() == param.stride():
        return value.to(param.device)
    return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)


def _strangers(number: int, built: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Notes on hyperparameters that only one side has: torch adds some and drops some between its versions."""
    where = f"optimizer group {number}: the checkpoint"
    new = [f"{where} has no {key}; {value!r} is used" for key, value in built.items() if key not in saved]
    gone = [
        f"{where}'s {key} = {value!r} is left out: there is no such setting"
        for key, value in saved.items()
        if key not in built
    ]
    return [*new, *gone]


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, Tensor):
            value = value.item()
        kept[key] = list(value) if isinstance(value, tuple) else value
    return kept


def _make_fast(optimizer: Optimizer) -> bool:
    """Switch on torch's fused (else foreach) form where the user left the choice open. True: fused and float32.

    Nothing is chosen for parameters that are shapes only."""
    groups = optimizer.param_groups
    params = [param for group in groups for param in group["params"]]
    if any(param.is_meta for param in params):
        return False
    open_choice = all(group.get("fused") is None and group.get("foreach") is None for group in groups)
    wanted = "fused" in optimizer.defaults and all(
        p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params
    )
    for group in groups:
        if open_choice and wanted and not (group.get("capturable") or group.get("differentiable")):
            group["fused"] = True
        elif open_choice and "foreach" in group:
            group["foreach"] = True
    fused = all(group.get("fused") for group in groups)
    return bool(fused and params and all(p.dtype == torch.float32 for p in params))


def clip_factor(norm: float, clip: float | None) -> float:
    """min(1, clip / norm): what clipping by the global norm multiplies gradients with."""
    if clip is None or norm <= clip or not math.isfinite(norm):
        return 1.0
    return clip / norm
