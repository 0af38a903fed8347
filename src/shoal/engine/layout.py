"""Where this rank stands in a plan's mesh, and the groups in which it talks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.engine.names import plain
from shoal.plan.fingerprint import Parameter, check_model, fingerprint
from shoal.plan.mesh import AXES
from shoal.plan.plan import Plan
from shoal.plan.ranks import Coordinates, coordinates, data_rank, data_ranks


@dataclass(frozen=True)
class Layout:
    """A plan as this rank sees it. ``data``: the ranks that hold the same part of the model and read other samples.

    A group is None where it is the whole world.
    """

    plan: Plan
    rank: int
    at: Coordinates
    data: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    device_mesh: DeviceMesh | None = None

    @property
    def data_rank(self) -> int:
        """Which part of each global batch this rank reads."""
        return data_rank(self.plan.mesh, self.rank)

    @property
    def data_ranks(self) -> int:
        """Into how many parts the samples are cut."""
        return data_ranks(self.plan.mesh)

    @property
    def divides(self) -> bool:
        """Whether ranks hold parts of the model rather than all of it."""
        return self.device_mesh is not None

    @property
    def tells_loss(self) -> bool:
        """Whether this rank's loss counts: those that differ in tensor only work out the same one. (Stages but the
        last have none.)"""
        return self.at.tensor == 0

    @property
    def tells_tokens(self) -> bool:
        """Whether this rank's tokens count: ranks that differ in pipeline or tensor only read the same ones."""
        return self.at.tensor == 0 and self.at.pipeline == 0

    def of_model(self, model: nn.Module) -> Layout:
        """The same with the model's fingerprint in the plan. Raises ConfigError where the plan is for another model."""
        found = fingerprint(
            Parameter(plain(name), tuple(param.shape), str(param.dtype).removeprefix("torch."))
            for name, param in model.named_parameters()
        )
        if self.plan.model:
            check_model(self.plan.model, found, "the plan")
        return replace(self, plan=self.plan.model_copy(update={"model": found}))

    def axes(self, *names: str) -> DeviceMesh:
        """The device mesh of some axes."""
        assert self.device_mesh is not None
        return self.device_mesh[names]


def lay_out(plan: Plan, device_type: str) -> Layout:
    """This rank's layout. Collective where the mesh is more than replicate."""
    rank = dist.get_rank()
    at = coordinates(plan.mesh, rank)
    if plan.mesh.size == plan.mesh.replicate:
        return Layout(plan, rank, at)
    mesh = init_device_mesh(device_type, tuple(plan.mesh.degrees.values()), mesh_dim_names=AXES)
    data = mesh["replicate", "shard"]._flatten("data").get_group()
    pipeline = mesh["pipeline"].get_group()
    return Layout(plan, rank, at, data, pipeline, mesh)
