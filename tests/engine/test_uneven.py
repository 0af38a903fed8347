"""Ranks whose data differ: bad batches, shards of unequal length, positions of their own, ends of epochs."""

import warnings

import pytest
import torch
from tests.data.toys import Shards
from tests.harness import run_ranks
from tests.small_jobs import classes_loss, job, mlp, mlp_rows, sgd, start, weights

from shoal import Loss
from shoal.checkpoint.reader import Reader, newest_good
from shoal.core.errors import DataError

pytestmark = pytest.mark.ranks


def seen(window):
    """The first number of each real sample of a window."""
    return [value for micro in window.micro_batches if not micro.padding for value in micro.batch[0][:, 0].tolist()]


def train(made, out, save_at=None, **settings):
    """What a run took and did, step by step: (epoch, samples, count, applied); saves after step ``save_at``."""
    run = start(made, out, **{"micro_batch": 1, **settings})
    done = []
    for window in run.windows():
        report = run.step(window)
        done.append((window.epoch, seen(window), report.count, report.applied))
        if report.step == save_at:
            run.save()
    run.close()
    return done, weights(run.model), run


@pytest.mark.parametrize("bad", ["not a number", "nothing that counts"])
def test_a_batch_that_is_bad_on_one_rank_is_skipped_by_all_together(tmp_path, bad):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2468 https://github.com/huggingface/accelerate/issues/2258"""

    def body(rank):
        calls = []

        def loss(output, targets):
            calls.append(1)
            total, count = classes_loss(output, targets)
            if rank == 1 and len(calls) == 3:
                return Loss(total * float("nan"), count) if bad == "not a number" else Loss(total * 0, 0)
            return Loss(total, count)

        made = job(model=mlp, data=mlp_rows(12), loss=loss, optimizer=sgd(0.1))
        done, end, _ = train(made, tmp_path, epochs=1, global_batch=2)
        return [(count, applied) for *_, count, applied in done], end

    (first, end_0), (second, end_1) = run_ranks(body, 2, timeout_s=30)
    assert first == second
    assert [applied for _, applied in first] == [number != 2 or bad != "not a number" for number in range(6)]
    assert bad == "not a number" or [count for count, _ in first] == [2, 2, 1, 2, 2, 2]
    assert all(torch.equal(end_0[name], end_1[name]) and end_0[name].isfinite().all() for name in end_0)


def test_data_of_another_length_on_one_rank_is_refused_before_the_first_step(tmp_path):
    """https://github.com/huggingface/accelerate/issues/2258"""

    def body(rank):
        made = job(model=mlp, data=mlp_rows(12 - rank), loss=classes_loss)
        with pytest.raises(DataError) as caught:
            start(made, tmp_path, epochs=1, global_batch=2)
        return str(caught.value)

    for said in run_ranks(body, 2, timeout_s=30):
        assert "ranks 0 and 1 were given different data: 12 samples on rank 0 and 11 samples on rank 1" in said
        assert "give the whole data on every rank" in said


def test_shards_of_unequal_length_end_at_the_same_step_on_all_ranks(tmp_path):
    """https://github.com/huggingface/datasets/issues/6437 https://github.com/huggingface/datasets/pull/7854"""
    rows = mlp_rows(26).samples

    def body(rank):
        made = job(model=mlp, data=Shards([rows[:16], rows[16:]]), loss=classes_loss, optimizer=sgd(0.1))
        done, end, _ = train(made, tmp_path / "one epoch", global_batch=4)
        more, *_ = train(made, tmp_path / "more", global_batch=4, steps=10)
        return done, end, more

    (done_0, end_0, more_0), (done_1, end_1, more_1) = run_ranks(body, 2, timeout_s=30)
    assert [count for _, _, count, _ in done_0] == [count for _, _, count, _ in done_1] == [4] * 5 + [2] * 3
    assert sum((taken for _, taken, *_ in done_0), []) == [float(x[0]) for x, _ in rows[:16]]
    assert sum((taken for _, taken, *_ in done_1), []) == [float(x[0]) for x, _ in rows[16:]]
    assert all(torch.equal(end_0[name], end_1[name]) for name in end_0)
    assert more_0[:8] == done_0 and more_1[:8] == done_1
    assert [epoch for epoch, *_ in more_0] == [epoch for epoch, *_ in more_1] == [0] * 8 + [1] * 2
    assert [more[8:] for more in (more_0, more_1)] == [[(1, *row[1:]) for row in done[:2]] for done in (done_0, done_1)]


def test_a_checkpoint_holds_every_ranks_own_position_in_the_data(tmp_path):
    """https://github.com/pytorch/torchtitan/issues/409 https://github.com/pytorch/torchtitan/issues/291"""
    rows = mlp_rows(40).samples
    shards = [rows[:12], rows[12:24], rows[24:26], rows[26:]]

    def body(rank):
        made = job(model=mlp, data=Shards(shards), loss=classes_loss, optimizer=sgd(0.1))
        whole, end, _ = train(made, tmp_path / "whole", global_batch=4, steps=6)
        train(made, tmp_path / "saved", global_batch=4, steps=3, save_at=3)
        rest, end_again, run = train(made, tmp_path / "saved", global_batch=4, steps=6, resume=True)
        assert rest == whole[3:], (rest, whole)
        assert all(torch.equal(end[name], end_again[name]) for name in end)
        return rest

    assert len({str(rest) for rest in run_ranks(body, 4, timeout_s=50)}) == 4
    found, _ = newest_good(tmp_path / "saved" / "checkpoints")
    readers = Reader(found.path).values["readers"]
    assert [(entry["readers"], entry["reader"], entry["read"]) for entry in readers] == [
        (4, 0, 3), (4, 1, 3), (4, 2, 2), (4, 3, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_run_saved_at_an_epochs_end_takes_the_next_epoch_whole(tmp_path, kind):
    """https://github.com/meta-pytorch/data/issues/1437 https://github.com/pytorch/torchtitan/pull/1358"""
    rows = mlp_rows(8)

    def body(rank):
        data = Shards([rows.samples[:4], rows.samples[4:]]) if kind == "iterable" else rows
        made = job(model=mlp, data=data, loss=classes_loss, optimizer=sgd(0.1))
        more = {"global_batch": 4}
        whole, end, _ = train(made, tmp_path / "whole", steps=6, **more)
        train(made, tmp_path / "saved", steps=2, save_at=2, **more)
        rest, end_again, _ = train(made, tmp_path / "saved", steps=6, resume=True, **more)
        assert rest == whole[2:] and [epoch for epoch, *_ in rest] == [1, 1, 2, 2]
        assert all(torch.equal(end[name], end_again[name]) for name in end)
        return sum((taken for epoch, taken, *_ in rest if epoch == 1), [])

    ids = sum(run_ranks(body, 2, timeout_s=50), [])
    assert sorted(ids) == sorted(float(x[0]) for x, _ in rows.samples)


def test_padded_epochs_count_repeated_samples_on_any_number_of_ranks(tmp_path):
    """https://github.com/pytorch/pytorch/pull/41171 https://github.com/Lightning-AI/pytorch-lightning/issues/5060"""

    def body(rank):
        ranks = torch.distributed.get_world_size()
        told = []
        made = job(model=mlp, data=mlp_rows(10), loss=classes_loss, optimizer=sgd(0.1))
        run = start(
            made, tmp_path / str(ranks), told.append, epochs=1, global_batch=4, micro_batch=1, short_windows="pad",
            precision="fp64",
        )  # fmt: skip
        counts = [run.step(window).count for window in run.windows()]
        run.close()
        return counts, weights(run.model), told

    (counts, alone, told), *_ = run_ranks(body, 1)
    assert counts == [4, 4, 4]
    assert "10 samples: 2 are repeated in the last window of each epoch to fill it up to 4 (others each time)" in told
    for other, end, _ in run_ranks(body, 4):
        assert other == counts
        assert all(torch.allclose(end[name], alone[name], rtol=0, atol=1e-10) for name in alone)


def test_pinned_memory_is_off_without_a_gpu_and_nothing_is_said_of_it(tmp_path):
    def body(rank):
        told = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = job(model=mlp, data=mlp_rows(8), loss=classes_loss)
            run = start(made, tmp_path, told.append, steps=2, global_batch=4)
            for window in run.windows():
                run.step(window)
            run.close()
        said = [text for text in [*told, *(str(one.message) for one in caught)] if "pin" in text.lower()]
        return run.data_settings.pin_memory, said

    assert run_ranks(body, 1) == [(False, [])]
