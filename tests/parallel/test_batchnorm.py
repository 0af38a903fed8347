"""BatchNorm over all ranks' rows: values, gradients and buffers as of one device, and no more kept for backward."""

import pytest
import torch
import torch.distributed as dist
from tests.harness import run_ranks
from torch import nn

from shoal.parallel.replicate.batchnorm import globalise

ROWS = (3, 2, 4)  # of each rank; the last one's are padding


def same(affine: bool, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(sum(ROWS), 5, 4, 3, generator=generator, dtype=dtype) * 3 + 10
    weights = torch.randn(images.shape, generator=generator, dtype=dtype)

    def made():
        torch.manual_seed(2)
        norm = nn.BatchNorm2d(5, affine=affine, dtype=dtype)
        if affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        return norm

    def found(norm, rows, counts=True):
        given = images[rows].clone().requires_grad_()
        result = norm(given)
        (result * weights[rows] * counts).pow(2).sum().backward()
        return result, given.grad, [p.grad for p in norm.parameters()], list(norm.buffers())

    def rank(number):
        norm = made()
        globalise(norm, None)[0].padding = number == 2
        mine = slice(sum(ROWS[:number]), sum(ROWS[: number + 1]))
        result, back, grads, buffers = found(norm, mine, number != 2)
        wanted = found(made(), slice(0, ROWS[0] + ROWS[1]))
        for grad in grads:
            dist.all_reduce(grad)
        if number != 2:
            torch.testing.assert_close(result, wanted[0][mine], rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
            torch.testing.assert_close(
                back, wanted[1][mine], rtol=1e-10 if dtype == torch.float64 else 1e-4, atol=1e-10
            )
        assert back.isfinite().all()
        for mine, other in zip([*grads, *buffers], [*wanted[2], *wanted[3]], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-12)

    return rank


@pytest.mark.ranks
@pytest.mark.parametrize("affine", [True, False])
def test_all_ranks_rows_are_normalised_as_on_one_device(affine):
    run_ranks(same(affine, torch.float64), 3)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_its_input_and_a_few_figures_of_each_channel(dtype):
    """A copy about the mean and a normalised one lay there besides: twice what one device's kernel keeps."""

    def rank(_):
        norm = nn.BatchNorm2d(4)
        globalise(norm, None)
        images, kept = torch.randn(2, 4, 8, 8, dtype=dtype, requires_grad=True), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            result = norm(images)
        assert result.dtype == dtype
        assert sorted(t.numel() for t in kept) == [1, 4, 4, 4, images.numel()]
        assert next(t for t in kept if t.numel() == images.numel()).data_ptr() == images.data_ptr()
        result.float().sum().backward()
        assert images.grad.dtype == dtype

    run_ranks(rank, 2)
