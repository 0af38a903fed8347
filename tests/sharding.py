"""Training in shards through a plain loop, as the engine does a step, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tests.small_jobs import stack
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shoal.checkpoint.pieces import Part
from shoal.engine.held import Held
from shoal.parallel.shard.apply import Sharded, apply
from shoal.parallel.shard.gradients import ShardedGradients
from shoal.parallel.shard.spec import ShardSettings
from shoal.parallel.shard.units import shard_units
from shoal.plan.mesh import Mesh

Steps = list[list[int]]  # the samples of each step


class Trained(NamedTuple):
    """What a training gave: per step the loss, the gradient norm and all gradients; weights at the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """(shards,) or (replicas, shards) on the CPU. Collective."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def sharded(model: nn.Module, shape: tuple[int, ...], units: list[str] | None = None, **settings: Any) -> Sharded:
    """The model in shards. Collective."""
    return apply(model, shard_units(model) if units is None else units, mesh_of(shape), ShardSettings(**settings))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def gradients_of(held: Sharded) -> ShardedGradients:
    """Over all that trains."""
    return ShardedGradients(
        held, [(name, param) for name, param in held.model.named_parameters() if param.requires_grad]
    )


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor. Collective where it lies in shards."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def regions(name: str, tensor: Tensor) -> tuple[Part, ...]:
    """Where what this rank has of a tensor lies in the whole."""
    return Held(Mesh(shard=dist.get_world_size()), dist.get_rank()).piece(name, tensor.detach()).parts


def micro_batches(rank: int, ranks: int, ids: list[int], size: int) -> list[list[int]]:
    """This rank's micro-batches of a global batch; as many on all ranks, empty ones at the end."""
    count = -(-len(ids) // (ranks * size))
    starts = [(number * ranks + rank) * size for number in range(count)]
    return [ids[start : start + size] for start in starts]


def run_window(
    model: nn.Module, gradients: ShardedGradients, micros: list[list[int]], rows: Any, loss: Callable[..., Any]
) -> Tensor:
    """Forward and backward over a window; (summed loss, count)."""
    total = torch.zeros(2, dtype=torch.float64)
    gradients.start_window()
    for number, ids in enumerate(micros):
        gradients.start_backward(number == len(micros) - 1)
        x, y = stack(rows, ids or [0])
        part, count = loss(model(x.double() if x.is_floating_point() else x), y)
        part = part if ids else torch.where(torch.tensor(False), part, 0.0)
        part.backward()
        total += torch.tensor([float(part.detach()), float(count) if ids else 0.0], dtype=torch.float64)
    gradients.finish()
    return total


def train(
    held: Sharded,
    rows: Any,
    loss: Callable[..., Any],
    steps: Steps,
    micro_batch: int,
    *,
    clip: float = 1e9,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> Trained:
    """Train as the engine does, one optimizer step per entry of ``steps``. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gradients, made = gradients_of(held), optimizer(held.model)
    found = Trained([], [], [], {})
    for ids in steps:
        micros = micro_batches(rank, ranks, ids, micro_batch)
        total = run_window(held.model, gradients, micros, rows, loss)
        told = torch.cat(
            [total, gradients.squared_norm(None)[None], torch.tensor(gradients.used(), dtype=torch.float64)]
        )
        dist.all_reduce(told)
        count = float(told[1])
        norm = float(told[2]) ** 0.5 / count
        gradients.assign([value > 0 for value in told[3:].tolist()])
        found.gradients.append(
            {name: whole(p.grad) / count for name, p in held.model.named_parameters() if p.grad is not None}
        )
        gradients.scale(min(1.0, clip / norm) / count)
        made.step()
        found.losses.append(float(told[0]) / count)
        found.norms.append(norm)
        gradients.start_window()
    return found._replace(weights={name: whole(param) for name, param in held.model.named_parameters()})


def plain(
    model: nn.Module,
    rows: Any,
    loss: Callable[..., Any],
    steps: Steps,
    *,
    clip: float = 1e9,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> Trained:
    """The same in one process, the whole global batch in one forward."""
    made = optimizer(model)
    found = Trained([], [], [], {})
    for ids in steps:
        x, y = stack(rows, ids)
        total, count = loss(model(x.double() if x.is_floating_point() else x), y)
        made.zero_grad()
        (total / count).backward()
        grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        norm = float(torch.stack([grad.square().sum() for grad in grads.values()]).sum()) ** 0.5
        for param in model.parameters():
            if param.grad is not None:
                param.grad *= min(1.0, clip / norm)
        made.step()
        found.losses.append(float(total.detach() / count))
        found.norms.append(norm)
        found.gradients.append(grads)
    return found._replace(weights={name: param.detach().clone() for name, param in model.named_parameters()})
