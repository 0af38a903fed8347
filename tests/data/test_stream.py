"""Windows of iterable data."""

import pytest
from tests.data.toys import Shards, Stream, ids_of, read, settings, values_of

from shoal.core.errors import DataError
from shoal.data import Windows, eval_micro_batches

pytestmark = pytest.mark.unit


def batches_of(windows):
    """Values of real micro-batches of number streams, in order."""
    return [v for w in windows for m in w.micro_batches if not m.padding for v in m.batch.tolist()]


def test_unequal_shards_end_together_with_padding():
    """https://github.com/huggingface/datasets/issues/6437
    and https://github.com/huggingface/datasets/pull/7854."""
    data = Shards([list(range(100, 116)), list(range(200, 210))])
    readers = [Windows(data, settings(rank, 2, global_batch=4)) for rank in range(2)]
    streams, steps = [reader.iterate(0, None) for reader in readers], []
    while not steps or any(window.more for window in steps[-1]):
        steps.append([next(stream) for stream in streams])
        assert len({len(window.micro_batches) for window in steps[-1]}) == 1
    assert len(steps) == 8
    assert [window[1].micro_batches[0].padding for window in steps] == [False] * 5 + [True] * 3
    assert sorted(v for step in steps for v in batches_of(step)) == [*range(100, 116), *range(200, 210)]
    for reader in readers:
        reader.end_epoch()
    again = [next(stream) for stream in streams]
    assert [window.epoch for window in again] == [1, 1]
    assert batches_of(again) == [100, 101, 200, 201]


def test_transforms_before_the_split_keep_it():
    """https://github.com/huggingface/datasets/issues/8568
    and https://github.com/huggingface/datasets/issues/7868."""
    seen = [batches_of(windows) for windows in read(Shards([[1, 2], [3, 4], [5, 6], [7, 8]]), 0, 1, 2)]
    assert not set(seen[0]) & set(seen[1]) and len(seen[0] + seen[1]) == 8

    class Skipped(Stream):
        def __iter__(self):
            return iter(list(super().__iter__())[1:4])

    whole = [ids_of(windows) for windows in read(Skipped(16), 0, 1, 2, global_batch=2, micro_batch=1)]
    assert whole == [[0], [1]]


def test_fewer_shards_than_readers_are_refused_and_more_are_read_once():
    """https://github.com/huggingface/datasets/issues/6594
    and https://github.com/huggingface/datasets/pull/8565."""
    data = Shards([[0, 1], [2, 3, 4], [5, 6, 7, 8]])
    with pytest.raises(DataError, match="3 shards was to be split over 4 readers"):
        Windows(data, settings(0, 4))
    seen = [v for windows in read(data, 0, 4, 2, global_batch=4, loader_workers=2) for v in batches_of(windows)]
    assert sorted(seen) == list(range(9))


@pytest.mark.parametrize("saved_at", [1, 3, 4])
def test_each_rank_resumes_at_its_own_position(saved_at):
    """https://github.com/pytorch/torchtitan/issues/409
    and https://github.com/pytorch/torchtitan/issues/291."""
    data = Shards([[rank * 100 + i for i in range(10)] for rank in range(4)], noise=True)
    for rank in range(4):
        whole = Windows(data, settings(rank, 4))
        stream = whole.iterate(0, 6)
        for _ in range(saved_at):
            next(stream)
        state = whole.state()
        assert state["readers"] == 4 and state["reader"] == rank
        rest = list(Windows(data, settings(rank, 4)).iterate(saved_at, 6, state))
        for window, expected in zip(rest, stream, strict=True):
            assert (window.more, ids_of([window])) == (expected.more, ids_of([expected]))
            assert values_of([window]) == values_of([expected])


def test_a_state_saved_at_an_epochs_end_gives_the_next_epoch_whole():
    """https://github.com/meta-pytorch/data/issues/1437
    and https://github.com/pytorch/torchtitan/pull/1358."""
    data = Shards([list(range(8))])
    reader = Windows(data, settings())
    assert not next(reader.iterate(0, None)).more
    reader.end_epoch()
    window = next(Windows(data, settings()).iterate(1, None, reader.state()))
    assert window.epoch == 1
    assert batches_of([window]) == list(range(8))


def test_a_state_of_another_number_of_readers_is_refused():
    data = Shards([[1, 2], [3, 4]])
    reader = Windows(data, settings(0, 2))
    next(reader.iterate(0, None))
    with pytest.raises(DataError, match="reader 0 of 2, but reader 0 of 1 asks"):
        next(Windows(data, settings()).iterate(1, None, reader.state()))


def test_unsplit_streams_are_read_whole_and_resumed_by_reading_again():
    alone = read(Stream(20), 0, 6)[0]
    assert [window.epoch for window in alone] == [0, 0, 0, 1, 1, 1]
    assert [window.last_of_epoch for window in alone] == [False, False, True] * 2
    pair = read(Stream(20), 0, 6, 2)
    for k, window in enumerate(alone):
        assert sorted(ids_of([pair[0][k]]) + ids_of([pair[1][k]])) == sorted(ids_of([window]))
        assert sorted(values_of([pair[0][k]]) + values_of([pair[1][k]])) == sorted(values_of([window]))
    assert values_of(read(Stream(20), 4, 6)[0]) == values_of(alone[4:])
    assert [window.more for window in read(Stream(20), 0, None)[0]] == [True, True, False]


def test_streams_are_evaluated_once_over_all_ranks():
    data = Shards([list(range(9)), list(range(9, 10))])
    per_rank = [list(eval_micro_batches(data, settings(rank, 4))) for rank in range(4)]
    assert sorted(v for ms in per_rank for m in ms if not m.padding for v in m.batch.tolist()) == list(range(10))
    assert len({len(micros) for micros in per_rank}) == 1


def test_streams_that_cannot_serve_are_refused():
    with pytest.raises(DataError, match="Stream is empty"):
        next(Windows(Stream(0), settings()).iterate(0, 1))
    with pytest.raises(DataError, match="Stream is empty"):
        list(eval_micro_batches(Stream(0), settings()))
    with pytest.raises(DataError, match="Stream has 5 samples"):
        next(Windows(Stream(5), settings(short_windows="drop")).iterate(0, 1))
    with pytest.raises(DataError, match="short windows dropped were asked for, but data split"):
        Windows(Shards([[1]]), settings(short_windows="drop"))
    for data in (Shards([[1]]), Stream(5)):
        with pytest.raises(DataError, match="padded with repeated samples .* cannot go back"):
            Windows(data, settings(short_windows="pad"))
    with pytest.raises(DataError, match="reader 1 of 2 .* is empty; use fewer workers"):
        next(Windows(Shards([[1], []]), settings(1, 2)).iterate(0, 1))

    class Opaque(Shards):
        def shard(self, num_shards, index):
            return self

        def state_dict(self):
            return {"position": object()}

    with pytest.raises(DataError, match="what JSON cannot hold"):
        next(Windows(Opaque([[1, 2]]), settings()).iterate(0, 1))
