"""Sentences about a plan say what its numbers say."""

from __future__ import annotations

import pytest

from shoal.cluster.presets import preset
from shoal.plan.candidate import Candidate, Cost, Memory
from shoal.plan.explain import binds, lost
from shoal.plan.mesh import Mesh
from shoal.plan.search import Found

pytestmark = pytest.mark.unit

H100 = preset("h100", 8)


def found(world: int = 8, **parts: float) -> Found:
    cost = Cost(**{name: parts.get(name, 0.0) for name in Cost._fields})
    return Found(Candidate(Mesh(replicate=world), 4, 1), cost, Memory(0, "loss", 2**30, 0, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"compute_s": 0.48, "rest_s": 0.22, "tensor_s": 0.2, "bubble_s": 0.1},
            "No part binds alone: the largest is compute with 48% of the step (480 ms), then launches with 22%.",
        ),
        (
            {"compute_s": 0.85, "tensor_s": 0.14, "rest_s": 0.01},
            "What binds is compute: 85% of the step (850 ms), all else together 15%; the largest other part is tensor "
            "traffic with 14%.",
        ),
        (
            {"replicate_s": 0.997, "compute_s": 0.003},
            "What binds is summing gradients over copies: 99.7% of the step (997 ms), all else together 0.3%; the "
            "largest other part is compute with 0.3%.",
        ),
        ({"compute_s": 1.0, "rest_s": 1e-6}, "What binds is compute: it is all of the step (1 s)."),
        (
            {"compute_s": 0.5, "rest_s": 0.5},
            "No part binds alone: the largest is compute with 50% of the step (500 ms), then launches with 50%.",
        ),
    ],
)
def test_a_part_binds_where_it_is_more_than_all_others_together(parts: dict[str, float], said: str) -> None:
    """Arithmetic was said to bind at 48 % of a step."""
    assert binds(found(**parts), None, H100) == said
    assert binds(found(**parts), found(**{name: 0.99 * value for name, value in parts.items()}), H100) == said


def test_memory_binds_where_more_of_it_would_be_faster() -> None:
    said = binds(found(compute_s=1.31), found(compute_s=1.0), H100)
    assert said.startswith("Memory binds: with room for 1.00 GiB per device instead of 75.2 GiB, ")
    assert said.endswith(" would be 31% faster (1 s).")


def test_parts_that_matter_nothing_are_not_spoken_of() -> None:
    """2.76e-07 ms more optimizer."""
    best = found(compute_s=0.08, tensor_s=0.015, optimizer_s=1e-9)
    other = found(compute_s=0.08, replicate_s=0.0172, optimizer_s=2e-9)
    assert lost(best, other).endswith(
        "2% slower (97.2 ms): 17.2 ms more summing gradients over copies, though 15 ms less tensor traffic"
    )
