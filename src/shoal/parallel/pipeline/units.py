"""Which modules of a model are units: what a stage runs as a whole, shards gather together, and recompute repeats."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup


def shapes_of(model: nn.Module, units: Iterable[str]) -> nn.Module:
    """A copy of ``model`` without data: parameters, and buffers of units that have parameters, on the meta device."""
    inside = [
        m for path in units for m in model.get_submodule(path).modules() if has_parameters(model.get_submodule(path))
    ]
    memo: dict[int, Any] = {
        id(param): nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        for param in model.parameters()
    }
    for module in inside:
        for buffer in module.buffers(recurse=False):
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    groups = (value for module in model.modules() for value in vars(module).values())
    memo |= {id(group): group for group in groups if isinstance(group, ProcessGroup)}
    return copy.deepcopy(model, memo)


def unit_paths(model: nn.Module) -> list[str]:
    """Paths of a model's units: repeated blocks, and the modules beside them and beside what contains them.

    Repeated blocks are the outermost lists (or sequences) of two or more modules of one class; what contains them runs
    its own Python code on every stage. A model without any is cut between the root's own modules.
    """
    opened = {""}
    for path, module in model.named_modules():
        if _is_block_list(module) and not _inside_block(path, model):
            parts = path.split(".") if path else []
            opened |= {".".join(parts[:length]) for length in range(len(parts) + 1)}
    paths: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if below in opened or _never_called(child):
                visit(below, child)
            else:
                paths.append(below)

    visit("", model)
    first = {}
    for path in paths:
        first.setdefault(id(model.get_submodule(path)), path)
    return list(first.values())


def block_paths(model: nn.Module) -> list[str]:
    """Paths of the repeated blocks among the units."""
    return [path for path in unit_paths(model) if _is_block_list(model.get_submodule(path.rpartition(".")[0]))]


def _is_block_list(module: nn.Module) -> bool:
    children = list(module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(children) > 1
        and len({type(child) for child in children}) == 1
        and any(True for _ in children[0].children())
    )


def _inside_block(path: str, model: nn.Module) -> bool:
    """Whether a module lies inside a block of an outer list."""
    parts = path.split(".")
    return any(_is_block_list(model.get_submodule(".".join(parts[:length]))) for length in range(len(parts)))


def _never_called(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def has_parameters(module: nn.Module) -> bool:
    """Whether a module or a part of it has any parameter."""
    return next(module.parameters(), None) is not None
