"""The plain model's names: those it would have if neither it nor a part of it were wrapped."""

from __future__ import annotations

from torch import nn

from shoal.core.errors import ModelError

#: What torch.compile and activation checkpointing put between a module and its parameters.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
#: torch's wrappers that sum or split gradients themselves.
PARALLEL = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}


def plain(name: str) -> str:
    """``name`` without the parts that a wrapper has put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def refuse_parallel(model: nn.Module) -> None:
    """Raises ModelError where the model, or a part of it, is spread over processes already."""
    for name, module in model.named_modules():
        kinds = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.")}
        if found := sorted(kinds & PARALLEL):
            where = f"the model's part {plain(name)!r}" if name else "the model"
            raise ModelError(
                f"{where} is wrapped in {found[0]}, but the gradients are summed by Shoal itself and would be summed "
                "twice; give the plain module that was wrapped"
            )
