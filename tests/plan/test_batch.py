"""Batch arithmetic says what it cut, or which numbers would do."""

import pytest

from shoal.core.errors import ConfigError
from shoal.plan.batch import cut_batch

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_the_global_batch_is_ranks_times_micro_batch_times_accumulation(ranks, micro_batch):
    for accumulation in (1, 2, 5):
        plan = cut_batch(ranks * micro_batch * accumulation, micro_batch, ranks)
        assert plan == (ranks * micro_batch * accumulation, micro_batch, accumulation, ranks)


def test_without_a_micro_batch_each_rank_takes_its_share_at_once():
    assert cut_batch(12, None, 3) == (12, 4, 1, 3)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((10, 2, 3), "use a global batch of 6 or 12"),
        ((9, 2, 3), "use a global batch of 6 or 12"),
        ((10, None, 4), "use a global batch of 8 or 12"),
        ((3, 1, 4), "use a global batch of 4,"),
        ((0, None, 1), "must be at least 1"),
        ((8, 0, 1), "must be at least 1"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_do(asked, said):
    with pytest.raises(ConfigError, match=said):
        cut_batch(*asked)
