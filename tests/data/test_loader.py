"""Windows of map-style data: which samples, whose randomness, what is reported."""

import random
import warnings

import numpy as np
import pytest
import torch
from tests.data.toys import Ids, Noise, ids_of, read, settings, values_of

from shoal.core.errors import DataError
from shoal.data import DataSettings, Windows, eval_micro_batches
from shoal.data import fetch as fetching

pytestmark = pytest.mark.unit


def test_a_window_is_the_same_set_for_any_ranks_micro_batches_and_workers():
    sets = []
    for ranks, micro, workers in ((1, 8, 0), (2, 2, 0), (4, 1, 0), (3, 1, 0), (2, 4, 1)):
        per_rank = read(Ids(20), 0, 6, ranks, micro_batch=micro, loader_workers=workers)
        sets.append([sorted(sum((ids_of([window]) for window in group), [])) for group in zip(*per_rank, strict=True)])
    assert all(found == sets[0] for found in sets)
    assert [len(window) for window in sets[0]] == [8, 8, 4, 8, 8, 4]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 3, 10])
def test_evaluation_counts_each_sample_once_and_a_rank_may_have_none(size, ranks):
    """https://github.com/pytorch/pytorch/issues/25162
    and https://github.com/Chris-hughes10/pytorch-accelerated/pull/53."""
    per_rank = [list(eval_micro_batches(Ids(size), settings(rank, ranks))) for rank in range(ranks)]
    assert len({len(micros) for micros in per_rank}) == 1
    seen = [sample for micros in per_rank for micro in micros for sample in micro.ids]
    assert sorted(seen) == list(range(size))
    values = [v for micros in per_rank for m in micros if not m.padding for v in m.batch.tolist()]
    assert sorted(values) == sorted(seen)
    assert all(len(micro.batch) > 0 for micros in per_rank for micro in micros)


def test_uneven_data_is_used_or_dropped_as_asked_and_said():
    """https://github.com/pytorch/pytorch/pull/41171
    and https://github.com/Lightning-AI/pytorch-lightning/issues/5060."""
    used = Windows(Ids(10), settings(global_batch=4))
    assert used.windows_per_epoch == 3
    assert sorted(ids_of(used.iterate(0, 3))) == list(range(10))
    assert used.notes == ["10 samples: the last window of each epoch has 2 instead of 4"]
    dropped = Windows(Ids(10), settings(global_batch=4, short_windows="drop"))
    assert len(set(ids_of(dropped.iterate(0, dropped.windows_per_epoch)))) == 8
    assert dropped.notes == ["2 of 10 samples are dropped each epoch (others each time)"]
    per_rank = read(Ids(10), 0, 3, 4, global_batch=4, micro_batch=1, short_windows="pad")
    drawn = [sample for windows in per_rank for sample in ids_of(windows)]
    assert len(drawn) == 12 and sorted(set(drawn)) == list(range(10))
    assert sum(drawn.count(sample) == 2 for sample in range(10)) == 2
    padded = Windows(Ids(10), settings(global_batch=4, short_windows="pad"))
    assert padded.notes == [
        "10 samples: 2 are repeated in the last window of each epoch to fill it up to 4 (others each time)"
    ]


@pytest.mark.parametrize("size", [10, 3, 12])
def test_padded_windows_are_full_and_the_same_for_any_workers_and_after_a_resume(size):
    """https://github.com/pytorch/pytorch/pull/41171."""
    alone = read(Ids(size), 0, 6, global_batch=8, short_windows="pad")[0]
    assert all(window.global_samples == len(ids_of([window])) == 8 for window in alone)
    for epoch in range(alone[-1].epoch + 1):
        drawn = ids_of([window for window in alone if window.epoch == epoch])
        assert sorted(drawn[:size]) == list(range(size))
        assert drawn[size:] == [drawn[i % size] for i in range(len(drawn) - size)]
    for ranks, micro, workers in ((2, 2, 0), (4, 1, 0), (2, 4, 1)):
        more = {"global_batch": 8, "short_windows": "pad", "micro_batch": micro, "loader_workers": workers}
        for first in (0, 1, 3):
            groups = zip(*read(Ids(size), first, 6, ranks, **more), strict=True)
            found = [sorted(sample for window in group for sample in ids_of([window])) for group in groups]
            assert found == [sorted(ids_of([window])) for window in alone[first:]]
    assert not any(micro.padding for window in alone for micro in window.micro_batches)
    full = Windows(Ids(8), settings(short_windows="pad"))
    assert full.notes == [] and full.windows_per_epoch == 1


def test_the_order_ignores_each_ranks_own_global_seed():
    """https://github.com/Lightning-AI/pytorch-lightning/pull/17713."""
    seen = []
    for rank in range(4):
        torch.manual_seed(rank * 1000)
        np.random.seed(rank * 1000)
        random.seed(rank * 1000)
        seen += ids_of(Windows(Ids(64), settings(rank, 4)).iterate(0, 8))
    assert sorted(seen) == list(range(64))


def test_no_random_value_repeats_over_ranks_workers_and_epochs():
    """https://github.com/pytorch/pytorch/issues/5059, https://github.com/Lightning-AI/pytorch-lightning/pull/6960
    and https://github.com/facebookresearch/fairseq/issues/1383."""
    first, second = ([values_of(windows) for windows in read(Noise(32), 0, 8, 2, loader_workers=2)] for _ in range(2))
    flat = first[0] + first[1]
    assert len(flat) == len(set(flat)) == 192
    assert first == second
    assert first == [values_of(windows) for windows in read(Noise(32), 0, 8, 2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_differs_between_epochs(workers):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/20412."""
    windows = read(Noise(8), 0, 3, loader_workers=workers)[0]
    epochs = [sorted(values_of([window])) for window in windows]
    assert not set(epochs[0]) & set(epochs[1]) and not set(epochs[1]) & set(epochs[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_skips_once_and_later_epochs_are_whole(workers):
    """https://github.com/allenai/open-instruct/pull/681
    and https://github.com/meta-pytorch/data/issues/1437."""
    whole = read(Ids(16), 0, 24, global_batch=2, loader_workers=workers)[0]
    for first in (3, 8):  # inside an epoch, and on its end
        rest = read(Ids(16), first, 24, global_batch=2, loader_workers=workers)[0]
        assert ids_of(rest) == ids_of(whole[first:])
        assert [window.epoch for window in rest] == [index // 8 for index in range(first, 24)]
        for epoch in (1, 2):
            assert sorted(ids_of([window for window in rest if window.epoch == epoch])) == list(range(16))
        assert [window.index for window in rest if window.last_of_epoch] == [7, 15, 23][first == 8 :]


def test_resume_counts_windows_not_micro_batches():
    """https://github.com/huggingface/transformers/issues/5605."""
    whole = read(Ids(40), 0, 5)[0]
    assert len(whole[0].micro_batches) == 4
    rest = read(Ids(40), 3, 5)[0]
    assert ids_of(rest) == ids_of(whole)[24:]
    assert sum(len(window.micro_batches) for window in rest) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_and_skipping_leave_the_models_randomness_alone(workers):
    """https://github.com/huggingface/transformers/pull/46628."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    rest = read(Noise(40), 3, 5, loader_workers=workers)[0]
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected
    assert values_of(rest) == values_of(read(Noise(40), 0, 5)[0][3:])


@pytest.mark.parametrize("workers", [0, 1])
def test_user_code_runs_under_the_default_dtype(workers):
    class Made(Ids):
        def __getitem__(self, index):
            return torch.zeros(2)

    window = read(Made(8), 0, 1, default_dtype=torch.float64, loader_workers=workers)[0][0]
    assert window.micro_batches[0].batch.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_without_a_gpu_gives_no_warning(workers):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read(Ids(8), 0, 2, loader_workers=workers)[0]) == 2


def test_data_that_cannot_serve_is_refused():
    with pytest.raises(DataError, match="global batch of 8 .* has 5 samples; lower the global batch"):
        Windows(Ids(5), settings(short_windows="drop"))
    with pytest.raises(DataError, match="Ids is empty"):
        Windows(Ids(0), settings())
    with pytest.raises(DataError, match="neither __getitem__ and __len__ nor __iter__"):
        Windows(object(), settings())
    with pytest.raises(DataError, match="rank 2 of 2 ranks"):
        settings(2, 2)
    with pytest.raises(DataError, match="micro_batch = 0"):
        settings(micro_batch=0)
    with pytest.raises(DataError, match="short_windows = 'fill' was asked for; give 'use', 'drop' or 'pad'"):
        DataSettings(global_batch=1, micro_batch=1, rank=0, ranks=1, seed=0, short_windows="fill")  # type: ignore


def test_local_functions_collate_in_loader_workers_or_are_named_before_one_starts(monkeypatch):
    """Lambdas and local functions failed to pickle, deep in multiprocessing.

    https://github.com/cloneofsimo/lora/issues/38 https://github.com/claritychallenge/clarity/issues/424
    """

    class Local(Ids):
        pass

    asked = {"loader_workers": 1, "collate": lambda samples: torch.tensor(samples) + 100}
    ((window, *_),) = read(Local(8), 0, 1, 1, **asked)
    (micro, *_) = window.micro_batches
    assert micro.batch.tolist() == [100 + sample for sample in micro.ids]
    monkeypatch.setattr(fetching, "START_METHOD", "spawn")
    with pytest.raises(DataError, match=r"fresh processes; but collate <function .*<lambda>.* cannot be sent to them"):
        read(Ids(8), 0, 1, 1, **asked)
    with pytest.raises(DataError, match=r"but the data set <.*Local object .* cannot be sent to them"):
        read(Local(8), 0, 1, 1, loader_workers=1)
