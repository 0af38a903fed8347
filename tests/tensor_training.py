"""Training a model divided over a tensor group, and on one process, to hold one against the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tests.harness import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shoal.blueprint.positions import shared_positions
from shoal.blueprint.roles import Roles, roles
from shoal.blueprint.trace import trace
from shoal.parallel.tensor.apply import Layout, apply


class Case(NamedTuple):
    """A model, its inputs as keywords, and the loss of its output."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    loss: Callable[[Any], Tensor]


class Trained(NamedTuple):
    """Losses, gradients of every step, weights at the end, by name."""

    losses: list[float]
    grads: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def built(case: Case) -> nn.Module:
    """The model in float64, the same weights every time, training."""
    torch.manual_seed(0)
    return case.model().double().train()


def found_roles(case: Case, degree: int, overrides: dict[str, str] | None = None) -> tuple[Any, Roles]:
    """The blueprint and the roles."""
    inputs = case.inputs()
    blueprint = trace(built(case), (), inputs, samples=len(next(iter(inputs.values()))))
    return blueprint, roles(blueprint, degree, overrides)


def full_tensor(layout: Layout, name: str, local: Tensor | None = None) -> Tensor:
    """Collective. The whole parameter, or the whole of another tensor that is divided like it."""
    split = layout.split(name)
    local = (layout.model.get_parameter(name) if local is None else local).detach()
    return local.clone() if split is None else layout.group.gathered(local, split)


def train(case: Case, model: nn.Module, layout: Layout | None = None, steps: int = 3) -> Trained:
    """Three AdamW steps on the same batch; dropout is seeded alike on every rank.

    The optimizer's eps keeps it from blowing up gradients that are zero but for rounding (attention's key biases).
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    losses, grads = [], []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = case.loss(model(**case.inputs()))
        loss.backward()
        losses.append(loss.item())
        full = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        grads.append({n: full_tensor(layout, n, g) if layout else g.clone() for n, g in full.items()})
        optimizer.step()
    weights = {n: full_tensor(layout, n) if layout else p.detach().clone() for n, p in model.named_parameters()}
    return Trained(losses, grads, weights)


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error and its tensor: max|a - b| / max(max|a|, 1e-3 of the largest such value)."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    floor = 1e-3 * max(float(t.abs().max()) for t in wanted.values())
    return max((float((found[n] - t).abs().max()) / max(float(t.abs().max()), floor), n) for n, t in wanted.items())


def hold(
    case: Case, degree: int, overrides: dict[str, str] | None = None, sequence: bool = False
) -> tuple[float, float, dict[str, int]]:
    """Train both ways; (largest error, share of bytes divided, unplanned gathers). Every rank must agree.

    ``sequence``: positions are shared out between the tensor regions.
    """
    wanted = train(case, built(case))

    def rank(rank: int) -> tuple[float, float, dict[str, int], str]:
        blueprint, found = found_roles(case, degree, overrides)
        model = built(case)
        mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("tensor",))
        positions = shared_positions(blueprint, found).layers if sequence else {}
        assert bool(positions) == sequence
        layout = apply(model, blueprint, found, mesh, positions)
        trained = train(case, model, layout)
        worst = max(
            *(abs(a - b) / abs(b) for a, b in zip(trained.losses, wanted.losses, strict=True)),
            *(error(a, b)[0] for a, b in zip(trained.grads, wanted.grads, strict=True)),
            error(trained.weights, wanted.weights)[0],
        )
        where = error(trained.grads[0], wanted.grads[0])
        return worst, found.share(blueprint), layout.group.gathers, f"{where} {trained.losses} {wanted.losses}"

    results = run_ranks(rank, degree, timeout_s=120)
    assert len({result[0] for result in results}) <= degree
    worst = max(results)
    assert worst[0] < 1e-10, worst
    return worst[:3]
