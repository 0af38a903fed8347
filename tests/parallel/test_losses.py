"""The loss of logits whose classes are divided."""

import itertools
import pytest, torch
import torch.nn.functional as F
from tests.harness import run_ranks
from torch import nn
import torch.distributed as dist
from shoal.blueprint.split import Split
from shoal.parallel.tensor.moves import Group
from shoal.parallel.tensor.part import marked, take, Part

pytestmark = pytest.mark.ranks


def grid():
    for smoothing, ignore, reduction, weight in itertools.product(
        (0.0, 0.1), (-100, 3), ("mean", "sum", "none"), (False, True)
    ):
        yield smoothing, ignore, reduction, weight


@pytest.mark.parametrize("degree", [2, 4])
def test_ce(degree):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 61, generator=g, dtype=torch.float64) * 5
    targets = torch.randint(0, 61, (2, 5), generator=g)
    targets[0, 1] = 3
    targets[1, 2] = 3
    weights = torch.rand(61, generator=g, dtype=torch.float64)

    def rank(rank):
        group = Group(dist.group.WORLD, degree, rank)
        for smoothing, ignore, reduction, weighted in grid():
            given = dict(
                ignore_index=ignore,
                label_smoothing=smoothing,
                reduction=reduction,
                weight=weights if weighted else None,
            )
            for form in ("flat", "classes second", "nll"):

                def loss(x):
                    if form == "flat":
                        return F.cross_entropy(x.flatten(0, 1), targets.flatten(), **given).sum()
                    if form == "classes second":
                        return F.cross_entropy(x.transpose(1, 2), targets, **given).sum()
                    more = {k: v for k, v in given.items() if k != "label_smoothing"}
                    return F.nll_loss(F.log_softmax(x, -1).view(-1, 61), targets.view(-1), **more).sum()

                whole = logits.clone().requires_grad_()
                part = logits.clone().requires_grad_()
                want, found = loss(whole), loss(marked(take(part, Split(2, (61,)), group), Split(2, (61,)), group))
                assert type(found) is torch.Tensor
                want.backward()
                found.backward()
                torch.testing.assert_close(found, want, rtol=1e-13, atol=1e-13)
                torch.testing.assert_close(part.grad, whole.grad, rtol=1e-12, atol=1e-14)
        return group.gathers

    assert run_ranks(rank, degree) == [{}] * degree
