"""A resumed run goes on where the saved one stood: step, rate, data, optimizer, to the bit."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
import torch
from tests.checkpoint.saving import FullDisk, edit_manifest, names
from tests.data.toys import Shards
from tests.harness import run_ranks
from tests.run_tensors import all_tensors
from tests.small_jobs import classes_loss, job, mlp, mlp_rows, start
from torch import nn
from torch.optim import lr_scheduler

from shoal import warmup_cosine
from shoal.checkpoint.reader import Reader, newest_good
from shoal.core.errors import CheckpointError
from shoal.engine.build import Place, build
from shoal.engine.loop import train_loop
from shoal.engine.run import Hooks
from shoal.engine.settings import RunSettings
from shoal.launch.stop import StopRequest
from shoal.monitor.events import read_events

pytestmark = pytest.mark.ranks


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def plain_job(rows=24, **given):
    return job(**{"model": mlp, "data": mlp_rows(rows), "loss": classes_loss, "optimizer": adamw, **given})


@pytest.mark.parametrize("kind", ["function", "one cycle", "chained"])
def test_the_first_rate_after_a_resume_is_the_schedules(tmp_path, kind):
    """A scheduler that was built after the optimizer was loaded put the rate back to its base.

    https://github.com/torch-points3d/torch-points3d/pull/630
    """
    schedules = {
        "function": lambda optimizer, steps: warmup_cosine(8, warmup=3),
        "one cycle": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=8),
        "chained": lambda optimizer, steps: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 5)],
            milestones=[3],
        ),
    }

    def rates(out, steps, **settings):
        run = start(plain_job(lr_schedule=schedules[kind]), out, steps=steps, global_batch=4, **settings)
        found = [run.step(window).lr for window in run.windows()]
        run.save()
        run.close()
        return found

    def body(rank):
        return [
            rates(tmp_path / "whole", 8), rates(tmp_path / "cut", 5), rates(tmp_path / "cut", 8, resume=True)
        ]  # fmt: skip

    whole, first, rest = run_ranks(body, 1)[0]
    assert len(set(whole)) > 5
    assert (first, rest) == (whole[:5], whole[5:])


def test_a_resume_skips_batches_in_their_own_unit(tmp_path):
    """20 batches an epoch, 4 a step, saved after step 3: batch 12 is the next, 8 remain.

    https://github.com/huggingface/transformers/issues/5605 https://github.com/huggingface/transformers/pull/8624
    https://github.com/kohya-ss/sd-scripts/pull/2425
    """

    def batches(out, steps, **settings):
        run = start(plain_job(rows=40), out, steps=steps, epochs=1, global_batch=8, micro_batch=2, **settings)
        found = []
        for window in run.windows():
            found += [micro.ids for micro in window.micro_batches]
            run.step(window)
        run.save()
        run.close()
        return found

    def body(rank):
        return [
            batches(tmp_path / "whole", 5), batches(tmp_path / "cut", 3), batches(tmp_path / "cut", 5, resume=True)
        ]  # fmt: skip

    whole, first, rest = run_ranks(body, 1)[0]
    assert len(whole) == 20 and len(first) == 12
    assert rest[0] == whole[12] and len(rest) == 8
    assert rest == whole[12:]


def normed():
    """Its buffers change in each forward."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))


def samples(kind):
    """96 samples: 6 windows of 16, read by index or as two shards with a position of their own."""
    rows = mlp_rows(96)
    return rows if kind == "indexed" else Shards([rows.samples[:48], rows.samples[48:]])


def end_of(out, kind, at=None, act=lambda run: None, steps=6, **settings):
    """This rank's run to its end; ``act(run)`` is called in training loss number ``at``."""
    calls, held = [], []

    def loss(output, targets):
        calls.append(1)
        if len(calls) == at:
            act(held[0])
        return classes_loss(output, targets)

    made = plain_job(model=normed, data=samples(kind), loss=loss)
    stop = StopRequest()
    stop.listen()
    given = {"steps": steps, "global_batch": 16, "micro_batch": 2, "kernels": "default", "sinks": (), **settings}
    run = build(made, RunSettings(out=str(out), **given), Place(torch.device("cpu")), Hooks(stop_requested=stop))
    held.append(run)
    found = train_loop(run)
    run.close()
    return found, {name: tensor.clone() for name, tensor in all_tensors(run).items()}


@pytest.mark.parametrize("kind", ["indexed", "split"])
@pytest.mark.parametrize("request_", ["signal", "save"])
def test_a_save_asked_for_inside_a_window_lands_at_its_end(tmp_path, request_, kind):
    """Asked for in micro-batch 2 of 4 of step 3: partial gradients were dropped, or the window shifted.

    https://github.com/huggingface/transformers/issues/22143 https://github.com/vllm-project/speculators/pull/859
    """

    def act(run):
        if request_ == "save":
            run.save()
        elif run.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def body(rank):
        _, whole = end_of(tmp_path / "whole", kind)
        found, _ = end_of(tmp_path / "cut", kind, at=2 * 4 + 2, act=act)
        torch.distributed.barrier()
        kept = names(tmp_path / "cut" / "checkpoints")
        torch.distributed.barrier()
        if rank == 0 and request_ == "save":
            shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-6")
        torch.distributed.barrier()
        _, resumed = end_of(tmp_path / "cut", kind, resume=True)
        return kept, found["steps"], whole, resumed

    for kept, steps, whole, resumed in run_ranks(body, 2):
        assert (kept, steps) == ((["step-3"], 3) if request_ == "signal" else (["step-3", "step-6"], 6))
        assert whole.keys() == resumed.keys()
        for name, tensor in whole.items():
            assert torch.equal(tensor, resumed[name]), name
    losses = [[row["loss"] for row in read_events(tmp_path / out, kind="step")] for out in ("whole", "cut")]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_a_save_before_the_step_of_a_window_does_not_lose_the_window(tmp_path):
    """The position that is saved is where training stood, not what was read already.

    https://github.com/huggingface/transformers/issues/22143
    """

    def drive(out, save_at=None, **settings):
        made = plain_job(data=samples("split"))
        run = start(made, out, steps=6, global_batch=16, **settings)
        found = []
        for window in run.windows():
            if window.index == save_at:
                run.save()
            found.append([micro.ids for micro in window.micro_batches])
            run.step(window)
        run.close()
        return found

    def body(rank):
        whole = drive(tmp_path, save_at=4)
        return whole, drive(tmp_path, resume=True)

    for whole, rest in run_ranks(body, 2):
        assert rest == whole[4:] and len(rest) == 2


def interrupted(out):
    """Leaves a checkpoint of step 2 of 4 in ``out``, and returns the end that nothing interrupts."""
    ends = []
    for steps, where in ((4, out.with_name("whole")), (2, out)):
        run = start(plain_job(), where, steps=steps, global_batch=4)
        train_loop(run)
        run.close()
        ends.append({name: tensor.clone() for name, tensor in all_tensors(run).items()})
    return ends[0]


def go_on(out):
    """The resumed run, before its first step, and what it told."""
    told = []
    return start(plain_job(), out, told.append, steps=4, global_batch=4, resume=True), told


def test_optimizer_settings_that_only_one_version_has_take_todays_default(tmp_path):
    """A state without a flag that a later version added could not be loaded.

    https://github.com/pytorch/pytorch/issues/146157
    """

    def older(manifest):
        for group in manifest["values"]["optimizer"]["groups"]:
            for known in (group["now"], group["built"]):
                del known["maximize"]
                known["zeal"] = 3

    def body(rank):
        whole = interrupted(tmp_path / "cut")
        edit_manifest(tmp_path / "cut" / "checkpoints" / "step-2", older)
        run, told = go_on(tmp_path / "cut")
        assert run.optimizer.optimizer.param_groups[0]["maximize"] is False
        assert "zeal" not in run.optimizer.optimizer.param_groups[0]
        train_loop(run)
        run.close()
        return told, whole, {name: tensor.clone() for name, tensor in all_tensors(run).items()}

    told, whole, resumed = run_ranks(body, 1)[0]
    assert "optimizer group 0: the checkpoint has no maximize; False is used" in told
    assert "optimizer group 0: the checkpoint's zeal = 3 is left out: there is no such setting" in told
    assert sum(text.startswith("optimizer group") for text in told) == 2
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_optimizer_state_that_is_missing_is_named(tmp_path):
    """https://github.com/pytorch/pytorch/issues/146157"""

    def no_tensor(manifest):
        del manifest["tensors"]["optimizer/exp_avg/2.bias"]

    def no_trace(manifest):
        no_tensor(manifest)
        del manifest["values"]["optimizer"]["state"]["2.bias"]["exp_avg"]

    def body(rank):
        interrupted(tmp_path / "cut")
        shutil.copytree(tmp_path / "cut", tmp_path / "traceless")
        edit_manifest(tmp_path / "cut" / "checkpoints" / "step-2", no_tensor)
        edit_manifest(tmp_path / "traceless" / "checkpoints" / "step-2", no_trace)
        with pytest.raises(CheckpointError, match=r"holds no tensor 'optimizer/exp_avg/2\.bias'"):
            go_on(tmp_path / "cut")
        run, _ = go_on(tmp_path / "traceless")
        with pytest.raises(CheckpointError, match=r"state of 2\.bias has no 'exp_avg', which AdamW needs; resume with"):
            train_loop(run)

    run_ranks(body, 1)


def test_a_key_that_an_optimizer_misses_of_its_own_is_not_the_checkpoints(tmp_path):
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("own")

    def body(rank):
        made = plain_job(optimizer=lambda model: Broken(model.parameters(), lr=0.1))
        run = start(made, tmp_path, steps=1, global_batch=4)
        with pytest.raises(KeyError, match="own"):
            train_loop(run)

    run_ranks(body, 1)


def test_a_full_disk_on_one_rank_ends_all_of_them_and_costs_no_checkpoint(tmp_path):
    """An exception in a save left rubbish as the newest checkpoint; all ranks agree on the failure.

    https://github.com/axolotl-ai-cloud/axolotl/pull/2177 https://github.com/facebookresearch/mmf/issues/870
    https://github.com/bghira/SimpleTuner/pull/2989
    """

    def body(rank):
        run = start(plain_job(rows=96), tmp_path, steps=24, global_batch=4)
        held = {}
        with pytest.raises(CheckpointError) as caught:
            for window in run.windows():
                step = run.step(window).step
                if step == 2:
                    run.save()
                    run.saver.drain(run)
                    held = {name: tensor.clone() for name, tensor in all_tensors(run).items()}
                    if rank == 1:
                        run.saver.writer.files = FullDisk(room_bytes=100)
                if step == 4:
                    run.save()
                    run.saver.writer.wait()
        return str(caught.value), held

    for text, held in run_ranks(body, 2, timeout_s=30):
        assert text.startswith("rank 1: cannot write rank 1's shard of step 4")
        assert "; it needs " in text and " bytes are free; free space" in text
        assert names(tmp_path / "checkpoints") == ["step-2"]
        found, skipped = newest_good(tmp_path / "checkpoints")
        assert found is not None and not skipped
        reader = Reader(found.path)
        assert reader.names() == sorted(held)
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in held.items())
