"""A cell of the zoo: one family trained under one layout, held against one process."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.harness import RankFailed, run_ranks
from tests.small_jobs import Rows, error, job, start
from tests.zoo.families import FAMILIES, SAMPLES
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.core.errors import ShoalError
from shoal.engine.names import plain
from shoal.plan.mesh import Mesh
from shoal.verify.exact import Exactly

LAYOUTS = (
    "shard=2", "tensor=2", "pipeline=2", "pipeline=2,tensor=2", "shard=2,tensor=2", "pipeline=2,replicate=2",
)  # fmt: skip
BOUND, STEPS, MICRO_BATCH = 1e-9, 3, 4
LEAST_SHARE = 0.5  # of the weights' bytes: a tensor layout that divides less is not called split


#: What does not split, and why: family -> (status under every layout with a tensor axis, reason).
NOT_DIVIDED = {
    "resnet": ("whole", "batch normalisation, which keeps statistics of all channels, stands between its convolutions"),
    "Fourier operator": ("whole", "Fourier layers mix along the width in an einsum of complex numbers"),
}


def expected_status(family: str, layout: str) -> str:
    """What a cell must be."""
    return NOT_DIVIDED[family][0] if family in NOT_DIVIDED and "tensor" in layout else "split"


class Cell(NamedTuple):
    """``status``: split, refused, whole (less than half of the bytes are divided), wrong or failed."""

    status: str
    told: str = ""
    error: float = math.nan
    divided: float = 1.0  # share of the weights' bytes that the tensor axis divides
    held: float = math.nan  # the largest share of the weights' bytes that a rank holds


class Trained(NamedTuple):
    """What a rank tells of its run."""

    figures: list[tuple[float, float]]  # loss, gradient norm
    weights: dict[str, Tensor]
    divided: list[str]  # names
    elements: int  # of this rank's parameters


def train(family: str, out: Path, **settings: Any) -> Trained | str:
    """This rank's run of three steps, or why the layout is refused. Collective.

    AdamW's eps keeps it from blowing up gradients that are zero but for rounding (attention's key biases).
    """
    case = FAMILIES[family]
    made = job(
        model=case.model, data=Rows(case.samples()), loss=case.loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6),
    )  # fmt: skip
    try:
        run = start(made, out, precision="fp64", global_batch=SAMPLES, steps=STEPS, epochs=STEPS, **settings)
    except ShoalError as refusal:
        return str(refusal)
    told = [run.step(window) for window in run.windows()]
    run.save()
    run.close()
    own = [p.to_local() if isinstance(p, DTensor) else p for p in run.model.parameters() if not p.is_meta]
    weights = {n: p.detach() for n, p in run.whole_model().named_parameters()} if run.rank == 0 else {}
    elements = sum(p.numel() for p in own)
    return Trained([(t.loss, t.grad_norm) for t in told], weights, [plain(n) for n in run.held.packed], elements)


def trained(family: str, out: Path, **settings: Any) -> Trained | str:
    """The same with casts to float32 lifted. Collective."""
    with Exactly(lift=True):
        return train(family, out, **settings)


@cache
def alone(family: str, folder: Path) -> Trained:
    """One process, whose micro-batches are as large as those of all data ranks together."""
    FAMILIES[family].model()  # its modules are imported here, once, rather than in every forked process
    (found,) = run_ranks(lambda rank: trained(family, folder / "alone", micro_batch=MICRO_BATCH), 1, 120)
    assert isinstance(found, Trained), found
    return found


def cell(family: str, layout: str, folder: Path) -> Cell:
    """Train the family under the layout and compare."""
    mesh = Mesh(**{axis: int(degree) for axis, degree in (part.split("=") for part in layout.split(","))})
    micro = MICRO_BATCH // (mesh.replicate * mesh.shard)
    expected = alone(family, folder)
    try:
        every = run_ranks(lambda rank: trained(family, folder / layout, mesh=layout, micro_batch=micro), mesh.size, 120)
    except RankFailed as failure:
        return Cell("failed", str(failure))
    if any(isinstance(each, str) for each in every):
        return Cell("refused" if all(isinstance(each, str) for each in every) else "failed", str(every[0]))
    worst = difference(every, expected)
    sizes = {name: tensor.numel() for name, tensor in expected.weights.items()}
    whole = sum(sizes.values())
    divided = sum(sizes[name] for name in every[0].divided) / whole if mesh.tensor > 1 else 1.0
    held = max(each.elements for each in every) / whole
    if not worst < BOUND:
        return Cell("wrong", f"differs by {worst:.1e}", worst, divided, held)
    if divided < LEAST_SHARE:
        return Cell("whole", f"the tensor axis divides {divided:.0%} of the weights' bytes", worst, divided, held)
    return Cell("split", "", worst, divided, held)


def difference(every: list[Trained], expected: Trained) -> float:
    """The largest error of losses and norms on any rank, and of the weights."""
    pairs = [
        (mine, other)
        for each in every
        for step, reference in zip(each.figures, expected.figures, strict=True)
        for mine, other in zip(step, reference, strict=True)
    ]
    return max(*(abs(mine - other) / abs(other) for mine, other in pairs), error(every[0].weights, expected.weights))
