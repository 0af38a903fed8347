"""Activation checkpointing on a model's repeated blocks (Chen et al., https://arxiv.org/abs/1604.06174)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from shoal.core.errors import ConfigError
from shoal.parallel.pipeline.units import block_paths
from shoal.plan.plan import Recompute


def apply(model: nn.Module, how: Recompute) -> list[str]:
    """Let blocks keep their inputs alone: ``full`` every one, ``selective`` every second. Returns their paths.

    Names, hooks and randomness stay as they were: a block's forward runs again, inside its hooks, with the same
    random numbers. Raises ConfigError where the model has no repeated blocks.
    """
    if how == "none":
        return []
    paths = block_paths(model)
    if not paths:
        raise ConfigError(f"recompute {how!r} works on repeated blocks, and the model has none; leave it out")
    chosen = paths if how == "full" else paths[::2]
    for path in chosen:
        _recompute(model.get_submodule(path))
    return chosen


def _recompute(block: nn.Module) -> None:
    plain = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain, *args, use_reentrant=False, context_fn=_contexts, **kwargs)

    forward.__wrapped__ = plain  # type: ignore[attr-defined]  # its signature is read by some models
    block.forward = forward


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What holds around a block's forward, and when it runs again: torch leaves function modes out in backward, and
    those that say ``recomputes`` change what is computed."""
    modes = [mode for mode in _get_current_function_mode_stack() if getattr(mode, "recomputes", False)]
    return contextlib.nullcontext(), _Within(modes)


class _Within:
    """Modes, entered each time that a block runs again: zero-bubble schedules do so twice."""

    def __init__(self, modes: list[Any]) -> None:
        self.modes, self.stack = modes, contextlib.ExitStack()

    def __enter__(self) -> None:
        for mode in self.modes:
            self.stack.enter_context(mode)

    def __exit__(self, *error: Any) -> None:
        self.stack.close()
