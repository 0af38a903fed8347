"""Which reshapes copy, and how a rank's part lies in memory: plain arithmetic held against torch."""

from __future__ import annotations

import itertools

import pytest
import torch

from shoal.blueprint.split import Split, local_strides, viewable

pytestmark = pytest.mark.unit

TENSORS = [
    torch.empty(2, 3, 4),
    torch.empty(2, 3, 4).transpose(0, 1),
    torch.empty(2, 3, 4).transpose(1, 2),
    torch.empty(2, 1, 4).expand(2, 3, 4),
    torch.empty(2, 1, 1, 4).expand(2, 1, 3, 4),
    torch.empty(2, 2, 1, 4).expand(2, 2, 3, 4),
    torch.empty(2, 5, 12)[..., 4:8],
    torch.empty(2, 1, 5, 3).transpose(1, 2),
    torch.empty(1, 6)[:, :3],
    torch.empty(()),
    torch.empty(0, 3),
]


def shapes(numel: int) -> list[tuple[int, ...]]:
    """Every shape of up to four dimensions."""
    sizes = [size for size in range(1, numel + 1) if numel % size == 0]
    found = [shape for dims in range(5) for shape in itertools.product(sizes, repeat=dims)]
    return [shape for shape in found if torch.Size(shape).numel() == numel]


@pytest.mark.parametrize("number", range(len(TENSORS)))
def test_a_reshape_is_a_view_where_torch_makes_one(number):
    tensor = TENSORS[number]
    for after in shapes(tensor.numel()) if tensor.numel() else [(3, 0)]:
        try:
            tensor.view(after)
            wanted = True
        except RuntimeError:
            wanted = False
        assert viewable(tuple(tensor.shape), tensor.stride(), after) is wanted, after


def heads(width: int, number: int) -> torch.Tensor:
    """Queries of a packed projection [B, H, T, K]."""
    return torch.empty(2, 5, 3 * width).chunk(3, -1)[0].unflatten(-1, (number, -1)).transpose(1, 2)


def test_the_strides_of_a_part_are_those_of_the_smaller_tensor():
    whole, part = heads(8, 4), heads(4, 2)
    assert local_strides(tuple(whole.shape), whole.stride(), Split(1, (4,)), 2) == part.stride()
    rows, mine = torch.empty(5, 7, 4), torch.empty(3, 7, 4)
    assert local_strides(tuple(rows.shape), rows.stride(), Split(0, (5,)), 2) == mine.stride()
    repeated, one = torch.empty(2, 2, 1, 4).expand(2, 2, 3, 4), torch.empty(2, 1, 1, 4).expand(2, 1, 3, 4)
    found = local_strides(tuple(repeated.shape), repeated.stride(), Split(1, (2,)), 2)
    assert found == one.stride()
    assert viewable((2, 1, 3, 4), found, (2, 3, 4)) and not viewable((2, 2, 3, 4), repeated.stride(), (2, 6, 4))
