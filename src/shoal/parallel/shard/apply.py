"""Putting FSDP2 on a model: one gathered unit per block, and the root; every reduction a sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from shoal.blueprint.facts import inside
from shoal.core.errors import ConfigError
from shoal.parallel.shard.order import Turns
from shoal.parallel.shard.spec import ShardSettings
from shoal.parallel.shard.units import check_model, own_units


@dataclass(frozen=True)
class Sharded:
    """A model whose weights lie in shards. ``units``: gathered modules by path, in the order of their calls, root last.

    ``whole``: names of parameters without dimensions, which every rank keeps.
    """

    model: nn.Module
    mesh: DeviceMesh
    settings: ShardSettings
    units: dict[str, FSDPModule]
    whole: frozenset[str]
    group: dist.ProcessGroup
    turns: Turns
    staged: bool = False

    @property
    def hybrid(self) -> bool:
        """Whether shards have copies on other ranks."""
        return self.mesh.ndim == 2

    def release(self) -> None:
        """Free weights that a forward without a backward left whole; the model then shows its shards."""
        for unit in self.units.values():
            unit.reshard()


def apply(
    model: nn.Module, units: list[str], mesh: DeviceMesh, settings: ShardSettings, staged: bool = False
) -> Sharded:
    """Collective. Shard ``model`` in place over ``mesh``: ("shard",), or ("replicate", "shard") for the hybrid.

    ``staged``: the model runs in a pipeline's stages, so that units stand alone and what lies in none stays whole; a
    rank's weights and gradients are whole within the step. Parameters keep their names and become DTensors split by
    rows. They are gathered in their own dtype, never lower: FSDP2's mixed precision casts a unit's norms together with
    its matrices, where autocast would not. Raises ConfigError or ModelError.
    """
    names = mesh.mesh_dim_names or ()
    if names not in (("shard",), ("replicate", "shard")):
        raise ConfigError(f"shard: a mesh of axes {names} was given; give ('shard',) or ('replicate', 'shard')")
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            "shard: this torch cannot reduce gradients of parameters that some ranks do not use "
            "(FSDPModule.set_reduce_scatter_unused_params); install torch 2.13 or newer, or use replicate"
        )
    check_model(model, units)
    group = mesh.get_group() if mesh.ndim == 1 else mesh._flatten("data").get_group()
    chosen = own_units(model, units)
    whole = {
        name: param
        for name, param in model.named_parameters()
        if not param.dim() or (staged and not any(inside(name, unit) for unit in chosen))
    }
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if settings.cpu_offload else OffloadPolicy()
    turns = Turns(model, group)
    made = {}
    for path in chosen if staged else [*chosen, ""]:
        module = model.get_submodule(path)
        turns.before(module, path)
        unit = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=bool(path) and settings.level == 3 and not staged,
            offload_policy=offload,
            ignored_params=set(whole.values()),
        )
        unit.set_force_sum_reduction_for_comms(True)  # a factor alone needs PREMUL_SUM, which gloo lacks
        unit.set_gradient_divide_factor(1.0)
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        turns.after(unit, path)
        made[path] = unit
    return Sharded(model, mesh, settings, made, frozenset(whole), group, turns, staged)
