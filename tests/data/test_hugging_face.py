"""Hugging Face data sets as they are: in memory by index, and as streams with a split and a state of their own."""

import pytest
import torch
from tests.data.toys import read, settings
from tests.harness import run_ranks
from tests.small_jobs import classes_loss, job, mlp, mlp_rows, sgd, start, weights

from shoal.core.errors import DataError
from shoal.data import Windows, eval_micro_batches
from shoal.monitor.events import read_events

datasets = pytest.importorskip("datasets")


def table(size=16, first=0):
    """Row i: x, 8 numbers, and y, one of 4 classes; ``id`` is ``first`` + i."""
    rows = mlp_rows(size)
    columns = {
        "x": [x.tolist() for x, _ in rows.samples],
        "y": [int(y) for _, y in rows.samples],
        "id": list(range(first, first + size)),
    }
    return datasets.Dataset.from_dict(columns).with_format("torch")


def stream(size=16, shards=4, first=0):
    return table(size, first).to_iterable_dataset(num_shards=shards)


def generated(rows_by_shard):
    """A stream that is not cut from a table."""

    def rows(shard):
        for number in shard:
            for row in range(rows_by_shard[number]):
                yield {"id": 100 * number + row}

    made = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shard": list(range(len(rows_by_shard)))})
    return made.with_format("torch")


def rows_of(windows):
    return [v for w in windows for m in w.micro_batches if not m.padding for v in m.batch["id"].tolist()]


@pytest.mark.unit
@pytest.mark.parametrize("workers", [0, 2])
def test_a_table_is_read_by_index_the_same_for_any_ranks(workers):
    alone = read(table(20), 0, 4)[0]
    assert isinstance(alone[0].micro_batches[0].batch["x"], torch.Tensor)
    assert rows_of(alone) == [sample for w in alone for m in w.micro_batches for sample in m.ids]
    pair = read(table(20), 0, 4, 2, loader_workers=workers)
    for k, window in enumerate(alone):
        assert sorted(rows_of([pair[0][k]]) + rows_of([pair[1][k]])) == sorted(rows_of([window]))
    found = [m for rank in range(3) for m in eval_micro_batches(table(10), settings(rank, 3)) if not m.padding]
    assert sorted(v for m in found for v in m.batch["id"].tolist()) == list(range(10))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda: stream(), set(range(16))),
        (lambda: stream().skip(1), set(range(1, 16))),
        (lambda: stream().take(3), 3),
        (lambda: stream().shuffle(seed=5, buffer_size=4), set(range(16))),
        (lambda: stream().shuffle(seed=5, buffer_size=4).skip(1).take(9), 9),
        (lambda: datasets.interleave_datasets([stream(), stream(first=100)]), None),
        (
            lambda: stream().with_format(None).filter(lambda row: row["id"] % 2 == 0).with_format("torch"),
            set(range(0, 16, 2)),
        ),
    ],
    ids=["plain", "skip", "take", "shuffle", "shuffle skip take", "interleave", "filter"],
)
def test_what_a_stream_goes_through_before_the_split_keeps_the_split(change, wanted):
    """https://github.com/huggingface/datasets/issues/8568 https://github.com/huggingface/datasets/issues/7868"""
    first, second = (rows_of(windows) for windows in read(change(), 0, 4, 2, global_batch=16))
    seen = first + second
    assert first and second and not set(first) & set(second)
    assert len(set(seen)) == len(seen)
    assert wanted is None or (len(seen) == wanted if isinstance(wanted, int) else set(seen) == wanted)


@pytest.mark.unit
def test_fewer_shards_than_ranks_are_refused_and_unequal_ones_read_once():
    """https://github.com/huggingface/datasets/issues/6594 https://github.com/huggingface/datasets/pull/8565"""
    data = generated([2, 3, 4])
    with pytest.raises(DataError, match="3 shards was to be split over 4 readers; use at most 3 workers"):
        Windows(data, settings(0, 4))
    seen = [row for windows in read(data, 0, 4, 2, global_batch=4, loader_workers=2) for row in rows_of(windows)]
    assert sorted(seen) == [0, 1, 100, 101, 102, 200, 201, 202, 203]


@pytest.mark.unit
@pytest.mark.parametrize("saved_at", [1, 2, 5, 9])
@pytest.mark.parametrize("kind", ["table", "generated", "table shuffled", "generated shuffled"])
def test_a_stream_goes_on_at_the_next_sample_also_one_with_a_shuffle_buffer(kind, saved_at):
    """https://github.com/pytorch/torchtitan/issues/409 https://github.com/huggingface/transformers/pull/46628"""
    data = stream(48) if kind.startswith("table") else generated([12] * 4)
    if kind.endswith("shuffled"):
        data = data.shuffle(seed=5, buffer_size=8)
    for rank in range(2):
        whole = Windows(data, settings(rank, 2, global_batch=4))
        assert kind.endswith("shuffled") == any("leaves out its shuffle buffer" in note for note in whole.notes)
        windows = whole.iterate(0, 12)
        for _ in range(saved_at):
            next(windows)
        rest = Windows(data, settings(rank, 2, global_batch=4)).iterate(saved_at, 12, whole.state())
        assert rows_of(rest) == rows_of(windows)


@pytest.mark.unit
def test_a_position_beyond_the_data_is_refused():
    reader = Windows(generated([12, 12]).shuffle(seed=5, buffer_size=8), settings(0, 2, global_batch=16))
    next(reader.iterate(0, 2))
    shorter = Windows(generated([3, 3]).shuffle(seed=5, buffer_size=8), settings(0, 2, global_batch=16))
    with pytest.raises(DataError, match="go on after 8 samples of its shard, but it holds 3; resume with the data"):
        next(shorter.iterate(1, 2, reader.state()))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["table", "stream", "shuffled stream"])
def test_a_job_trains_on_it_and_resumes_to_the_same_weights(tmp_path, kind):
    made = {
        "table": lambda: table(32),
        "stream": lambda: stream(32),
        "shuffled stream": lambda: stream(32).shuffle(seed=5, buffer_size=8),
    }[kind]

    def body(rank):
        given = job(
            model=mlp, data=made(), loss=classes_loss, optimizer=sgd(0.1),
            inputs=lambda batch: (batch["x"], batch["y"]),
        )  # fmt: skip

        def go(out, steps, **more):
            run = start(given, out, steps=steps, global_batch=8, micro_batch=2, **more)
            for window in run.windows():
                run.step(window)
            run.save()
            run.close()
            return weights(run.model)

        whole = go(tmp_path / "whole", 6)
        go(tmp_path / "two", 3)
        again = go(tmp_path / "two", 6, resume=True)
        return all(torch.equal(whole[name], again[name]) for name in whole)

    assert run_ranks(body, 2, timeout_s=50) == [True, True]
    counts = [[row["count"] for row in read_events(tmp_path / out, 0, "step")] for out in ("whole", "two")]
    assert counts[0] == counts[1] == [8] * 6


@pytest.mark.ranks
def test_a_stream_shuffled_without_a_seed_is_refused_on_several_ranks(tmp_path):
    """https://github.com/Lightning-AI/pytorch-lightning/pull/17713"""

    def body(rank):
        said = ""
        for number, seed in enumerate((None, 5)):
            given = job(
                model=mlp, data=stream(32).shuffle(seed=seed, buffer_size=8), loss=classes_loss,
                inputs=lambda batch: (batch["x"], batch["y"]),
            )  # fmt: skip
            try:
                start(given, tmp_path / str(number), steps=1, global_batch=8).close()
            except DataError as error:
                said += str(error)
        return said

    for said in run_ranks(body, 2, timeout_s=50):
        assert said.count("ranks 0 and 1 were given different data: 4 shards, shuffled by generator") == 1
        assert "shuffle with the same seed" in said
