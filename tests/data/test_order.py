"""The order of samples: a permutation of each epoch, the same for any number of ranks."""

import numpy as np
import pytest

from shoal.core.errors import DataError
from shoal.data.order import Order, cut

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 65537])
def test_every_epoch_is_a_permutation_and_epochs_differ(size):
    order = Order(size, seed=3)
    epochs = [order.ids(epoch, 0, size) for epoch in range(3)]
    for ids in epochs:
        assert np.array_equal(np.sort(ids), np.arange(size))
    if size >= 16:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(Order(size, seed=4).ids(0, 0, size), epochs[0])


def test_any_part_equals_that_part_of_the_whole():
    order = Order(1000, seed=3)
    assert np.array_equal(order.ids(2, 137, 411), order.ids(2, 0, 1000)[137:411])


def test_far_positions_of_a_huge_data_set_are_at_hand():
    ids = Order(10**13, seed=1).ids(5, 10**13 - 64, 10**13)
    assert len(set(ids.tolist())) == 64
    assert ids.min() >= 0 and ids.max() < 10**13


def test_positions_spread_evenly():
    ids = Order(10_000, seed=9).ids(0, 0, 1000)
    counts = np.bincount(ids // 1000, minlength=10)
    assert counts.min() > 60 and counts.max() < 140  # 100 expected, standard deviation 9.5


def test_the_order_never_changes_between_versions():
    assert Order(10, seed=7).ids(0, 0, 10).tolist() == FROZEN


FROZEN = [5, 4, 3, 9, 8, 0, 2, 6, 7, 1]


def test_positions_outside_are_refused():
    with pytest.raises(DataError, match="positions 0 to 11 .* has 10 samples"):
        Order(10, seed=0).ids(0, 0, 11)
    with pytest.raises(DataError, match="order over 0 samples"):
        Order(0, seed=0)


def test_cut_gives_each_id_once_with_equal_numbers_of_micro_batches():
    shares = cut(np.arange(11), ranks=3, micro_batch=2)
    assert [[part.tolist() for part in share] for share in shares] == [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9], [10]],
    ]


def test_cut_of_a_short_block_is_even_and_may_leave_ranks_empty():
    assert [part.tolist() for part in cut(np.arange(2), 4, 3)[0]] == [[0], [1], [], []]
    with pytest.raises(DataError, match="cut over 0 ranks"):
        cut(np.arange(2), 0, 3)
