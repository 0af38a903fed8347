"""What codecs keep goes into checkpoints and comes back, whatever the number of workers; replicas stay equal."""

from __future__ import annotations

import pytest
import torch
from tests.compress.coded_runs import CODECS, KEEPING, coded, digest, errors, kept, same, stepped, summed
from tests.harness import run_ranks

from shoal.checkpoint.reader import Reader
from shoal.core.errors import CheckpointError
from shoal.engine.compression import account
from shoal.engine.loop import summarise
from shoal.engine.record import read_json

pytestmark = pytest.mark.ranks


def saved(run):
    list(stepped(run))
    run.save()
    run.close()
    return run


@pytest.mark.parametrize("name", CODECS)
def test_replicas_stay_equal_and_a_resumed_run_is_the_same_to_the_bit(tmp_path, name):
    """Sums in another order on each rank would part the replicas; a memory that is not saved starts anew."""

    def body(rank):
        whole, digests = coded(tmp_path / "whole", name, 6, global_batch=9, micro_batch=1), []
        for window in whole.windows():
            whole.step(window)
            digests.append(digest(whole))
        saved(coded(tmp_path / "cut", name, 3, global_batch=9, micro_batch=1))
        resumed = saved(coded(tmp_path / "cut", name, 6, global_batch=9, micro_batch=1, resume=True))
        return digests, digest(resumed), same(kept(whole), kept(resumed)), whole.last_loss == resumed.last_loss

    found = run_ranks(body, 3)
    assert len(set(found[0][0])) == 6
    for digests, resumed, equal, loss in found:
        assert (digests, resumed) == (found[0][0], found[0][0][-1])
        assert equal and loss


@pytest.mark.parametrize("name", KEEPING)
def test_another_number_of_workers_keeps_the_sum_of_errors(tmp_path, name):
    """Errors are each rank's own: of ranks that are no more they would be lost, or those of others taken twice."""

    def first(rank):
        return summed(errors(saved(coded(tmp_path, name, 3, micro_batch=1))))

    def then(rank):
        notes = []
        run = coded(tmp_path, name, 4, notes.append, resume=True, micro_batch=1, global_batch=8)
        told = summed(errors(run))
        saved(run)
        return told, notes

    two = run_ranks(first, 2)[0]
    assert max(float(tensor.abs().max()) for tensor in two.values()) > 1e-4
    told, notes = run_ranks(then, 4)[0]
    assert same(told, two)
    assert f"compress {name}: what 2 workers had not sent yet was summed, and worker 0 of 4 has it now" in notes
    reader = Reader(tmp_path / "checkpoints" / "step-4")
    rows = {part: reader.read(f"compress/error/{part}") for part in told}
    for part, tensor in run_ranks(then, 1)[0][0].items():
        assert len(rows[part]) == 4 and rows[part][3].abs().max() > 0
        assert torch.allclose(tensor, rows[part].sum(0), atol=1e-6)


def test_what_was_not_sent_is_not_dropped_with_the_codec(tmp_path):
    def first(rank):
        saved(coded(tmp_path, "topk:0.1", 3))

    def without(rank):
        said = []
        for name in (None, "bf16"):
            with pytest.raises(CheckpointError) as error:
                coded(tmp_path, name, 6, resume=True)
            said.append(str(error.value))
        return said

    def with_another(rank):
        before = {
            name.removeprefix("compress/error/"): Reader(tmp_path / "checkpoints" / "step-3").read(name)[rank]
            for name in Reader(tmp_path / "checkpoints" / "step-3").names()
            if name.startswith("compress/error/")
        }
        run = coded(tmp_path, "powersgd:2", 6, resume=True)
        found = {name: tensor for name, tensor in errors(run).items() if name in before}
        run.close()
        return same(found, before)

    run_ranks(first, 2)
    for said, asked in zip(run_ranks(without, 2)[0], ("None", "'bf16'"), strict=True):
        assert "step-3 holds what compress = 'topk:0.1' had not sent yet of 13 gradients" in said
        assert f"and compress = {asked} keeps nothing of them, so that it would be lost" in said
        assert "resume with --compress topk:0.1" in said
    assert run_ranks(with_another, 2) == [True, True]


def test_a_codec_may_come_later(tmp_path):
    """Early steps without (Vogels et al. begin so), and from some step on with one."""

    def body(rank):
        notes = []
        saved(coded(tmp_path, None, 3))
        run = coded(tmp_path, "topk:0.1", 6, notes.append, resume=True)
        saved(run)
        return notes, sum(float(tensor.abs().sum()) for tensor in errors(run).values())

    notes, left = run_ranks(body, 2)[0]
    assert "compress topk:0.1: the checkpoint holds no errors of earlier steps; they begin at zero" in notes
    assert left > 0


def test_a_checkpoint_of_a_coded_run_holds_each_workers_errors(tmp_path):
    def body(rank):
        run = saved(coded(tmp_path, "powersgd:2", 2))
        told = read_json(tmp_path / "run.json")["compress"], account(run), summarise(run, 1.0)["compress"]
        assert told[0] == told[1] == told[2] and told[0]["codec"] == "powersgd:2"
        return errors(run), sorted(Reader(tmp_path / "checkpoints" / "step-2").names())

    found = run_ranks(body, 2)
    reader = Reader(tmp_path / "checkpoints" / "step-2")
    for part, tensor in found[0][0].items():
        assert torch.equal(reader.read(f"compress/error/{part}"), torch.stack([tensor, found[1][0][part]]))
        assert f"compress/factor/{part}" in found[0][1]
