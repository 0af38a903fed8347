"""Which modules are gathered together, and a model's parameters as facts."""

from __future__ import annotations

from torch import nn

from shoal.blueprint.facts import Parameter
from shoal.core.errors import ModelError
from shoal.parallel.pipeline.units import unit_paths
from shoal.parallel.shard.spec import check, parts


def shard_units(model: nn.Module) -> list[str]:
    """Paths of repeated blocks; all else belongs to the root, which every rank gathers in every forward.

    A module beside the blocks may be left out by a rank whose samples do not need it; blocks are called in their
    list's order, so that a block which a rank leaves out (stochastic depth) can take its turn in the collectives.
    """
    return [path for path in unit_paths(model) if _in_list(model, path)]


def _in_list(model: nn.Module, path: str) -> bool:
    holder = model.get_submodule(path.rpartition(".")[0])
    return isinstance(holder, nn.ModuleList | nn.Sequential)


def own_units(model: nn.Module, units: list[str]) -> list[str]:
    """The units that share no parameter with what lies outside them, and that have any."""
    facts = parts(parameters(model), units)
    shared = {name for parameter, unit in facts if not unit for name in (parameter.name, *parameter.ties)}
    kept = {unit for _, unit in facts}
    return [u for u in units if u in kept and not any(name.startswith(f"{u}.") for name in shared)]


def parameters(model: nn.Module) -> list[Parameter]:
    """The model's parameters as facts, tied ones once."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [
        Parameter(
            name=names[id(param)][0],
            shape=tuple(param.shape),
            dtype=str(param.dtype).removeprefix("torch."),
            bytes=param.numel() * param.element_size(),
            trains=param.requires_grad,
            buffer=False,
            ties=tuple(names[id(param)][1:]),
        )
        for param in model.parameters()
    ]


def check_model(model: nn.Module, units: list[str]) -> None:
    """Raises ModelError saying all that keeps these units of a model from being sharded."""
    reasons = check(parameters(model), units, [path for path, _ in model.named_modules()])
    reasons += [
        f"shard: {name} of shape {tuple(param.shape)} is not contiguous in memory; build it with .contiguous()"
        for name, param in model.named_parameters()
        if not param.is_contiguous()
    ]
    if reasons:
        raise ModelError("\n".join(reasons))
