"""Gradient accumulation: one normalisation, one step, one message per global batch, however it is cut."""

import pytest
import torch
import torch.distributed as dist
from tests.harness import run_ranks
from tests.small_jobs import (
    LM,
    Rows,
    Scalar,
    classes_loss,
    error,
    job,
    mlp,
    mlp_rows,
    sgd,
    stack,
    start,
    token_loss,
    token_rows,
    weights,
)
from torch import nn

from shoal import Loss
from shoal.core.errors import NumericsError
from shoal.engine.loop import train_loop

pytestmark = pytest.mark.ranks


def first_step(made, out, **settings):
    """(report, weights before, weights after) of one step."""
    run = start(made, out, steps=1, **settings)
    before = weights(run.model)
    report = next(iter([run.step(window) for window in run.windows()]))
    run.close()
    return report, before, weights(run.model)


def drive(made, out, **settings):
    """(reports, run, notes) of a whole run by an own loop."""
    notes = []
    run = start(made, out, notes.append, **settings)
    windows = list_of(run)
    run.close()
    return windows, run, notes


def list_of(run):
    return [(window, run.step(window)) for window in run.windows()]


def test_every_token_weighs_the_same_however_rows_are_cut(tmp_path):
    """Averages of micro-batch averages weigh short rows too much.

    https://github.com/huggingface/transformers/pull/34191 https://github.com/meta-pytorch/torchtune/pull/1875
    """
    rows = token_rows([3, 11, 1, 9])

    def body(rank):
        found = []
        for micro in (1, 2, 4):
            made = job(model=LM, data=rows, loss=token_loss)
            report, before, after = first_step(
                made, tmp_path / str(micro), global_batch=4, micro_batch=micro, precision="fp64"
            )
            found.append((report.count, report.loss, {name: before[name] - after[name] for name in before}, before))
        model = LM().double()
        model.load_state_dict(found[0][3])
        tokens, targets = stack(rows, [0, 1, 2, 3])
        loss, count = token_loss(model(tokens), targets)
        (loss / count).backward()
        return found, (loss / count).item(), {name: param.grad for name, param in model.named_parameters()}

    found, loss, grads = run_ranks(body, 1)[0]
    for count, reported, gradient, _ in found:
        assert count == 24
        assert reported == pytest.approx(loss, rel=1e-12)
        assert error(gradient, grads) < 1e-10


def test_the_loss_of_unequal_counts_is_sum_over_count(tmp_path):
    """Means 4, 1, 8, 2 over 3, 11, 1, 9 tokens are 49/24, not 3.75.

    https://github.com/huggingface/transformers/pull/34191
    """
    data = Rows(
        [(torch.tensor(mean), torch.tensor(count)) for mean, count in ((4.0, 3), (1.0, 11), (8.0, 1), (2.0, 9))]
    )

    def body(rank):
        made = job(model=Scalar, data=data, loss=lambda out, n: Loss((out * n).sum(), n.sum()), optimizer=sgd(0.0))
        return first_step(made, tmp_path, global_batch=4, micro_batch=1)[0]

    assert run_ranks(body, 1)[0].loss == pytest.approx(49 / 24, rel=1e-7)


def test_loss_and_norm_do_not_depend_on_accumulation_or_workers(tmp_path):
    """The logged loss grew with accumulation, or was divided by the device count once more.

    https://github.com/huggingface/transformers/issues/35204 https://github.com/huggingface/transformers/issues/37766
    https://github.com/huggingface/transformers/issues/37474 https://github.com/huggingface/transformers/pull/41530
    """
    found = []
    for ranks in (1, 2, 4):

        def body(rank, ranks=ranks):
            reports = []
            for micro in (1, 2, 4, 8):
                if ranks * micro <= 8:
                    made = job(
                        model=LM, data=token_rows([3, 11, 1, 9, 12, 2, 7, 5]), loss=token_loss, optimizer=sgd(0.0)
                    )
                    out = tmp_path / f"{ranks}-{micro}"
                    report, _, _ = first_step(made, out, global_batch=8, micro_batch=micro, precision="fp64")
                    reports.append((report.loss, report.grad_norm, report.count))
            return reports

        for reports in run_ranks(body, ranks):
            found += reports
    assert len(found) == 4 + 2 * 3 + 4 * 2
    for report in found:
        assert report == pytest.approx(found[0], rel=1e-9)


def test_a_mean_loss_and_a_sum_with_count_give_the_same_update(tmp_path):
    """A loss that ignores the count was normalised twice, or never.

    https://github.com/unslothai/unsloth-zoo/pull/1023 https://github.com/huggingface/transformers/issues/37766
    """

    def body(rank):
        found = []
        for name, loss in (("sum", classes_loss), ("mean", nn.functional.cross_entropy)):
            made = job(model=mlp, data=mlp_rows(8), loss=loss)
            found.append(first_step(made, tmp_path / name, global_batch=8, micro_batch=2, precision="fp64"))
        return found

    (report, _, after), (other_report, _, other) = run_ranks(body, 1)[0]
    assert error(other, after) < 1e-10
    assert other_report.loss == pytest.approx(report.loss, rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"), "must be a scalar"),
        (lambda out, y: nn.functional.cross_entropy(out, y).item(), "loss returned float"),
        (lambda out, y: (out.sum(), 2), "loss returned tuple"),
        (lambda out, y: Loss(out.sum(), -1), "count"),
        (lambda out, y: Loss(out.sum(), float("nan")), "count"),
        (lambda out, y: out.sum().detach(), "does not depend on any parameter"),
    ],
)
def test_a_loss_of_neither_kind_is_refused(tmp_path, loss, said):
    """A loss that follows neither contract must not be normalised by guess.

    https://github.com/unslothai/unsloth-zoo/pull/1023
    """

    def body(rank):
        before = None
        try:
            run = start(
                job(model=mlp, data=mlp_rows(8), loss=loss), tmp_path, steps=1, global_batch=8, precision="fp64"
            )
            before = weights(run.model)
            run.step(next(run.windows_source.iterate(0, 1)))
        except NumericsError as error:
            return str(error), error_free(before, run)
        return "", False

    text, unchanged = run_ranks(body, 1)[0]
    assert said in text
    assert unchanged


def error_free(before, run):
    return all(torch.equal(before[name], now) for name, now in weights(run.model).items())


@pytest.mark.parametrize(("short", "steps", "used"), [("use", 3, 10), ("drop", 2, 8)])
def test_the_last_micro_batches_of_an_epoch_are_used_or_said_to_be_dropped(tmp_path, short, steps, used):
    """Micro-batches left over at the end of the epoch never reached the optimizer.

    https://github.com/huggingface/transformers/pull/29561 https://github.com/timoschick/pet/issues/36
    """

    def body(rank):
        made = job(model=mlp, data=mlp_rows(10), loss=classes_loss)
        done, run, notes = drive(
            made, tmp_path, epochs=1, global_batch=4, micro_batch=1, short_windows=short, precision="fp64"
        )
        return run.total_steps, run.step_count, sum(len(window.micro_batches) for window, _ in done), notes

    total, counted, micro_batches, notes = run_ranks(body, 1)[0]
    assert (total, counted, micro_batches) == (steps, steps, used)
    assert any(("2 of 10 samples are dropped" if short == "drop" else "last window") in note for note in notes)


def counting(model):
    """SGD that counts its steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.calls = 0

    def count(*_):
        optimizer.calls += 1

    optimizer.register_step_post_hook(count)
    return optimizer


def test_an_epoch_shorter_than_the_accumulation_takes_the_announced_steps(tmp_path):
    """With fewer batches than the accumulation factor the optimizer stepped on every batch.

    https://github.com/Lightning-AI/pytorch-lightning/issues/21808 https://github.com/huggingface/accelerate/issues/1847
    """

    def body(rank):
        made = job(model=mlp, data=mlp_rows(2), loss=classes_loss, optimizer=counting)
        done, run, notes = drive(made, tmp_path, epochs=4, global_batch=4, micro_batch=1, precision="fp64")
        return run.total_steps, run.optimizer.optimizer.calls, [report.lr for _, report in done], notes

    total, calls, rates, notes = run_ranks(body, 1)[0]
    assert total == calls == len(rates) == 4
    assert any("2 instead of 4" in note for note in notes)


def test_steps_count_optimizer_updates_in_every_epoch(tmp_path):
    """The step counter advanced per micro-batch, so that saves came at the wrong time.

    https://github.com/Lightning-AI/pytorch-lightning/issues/831
    https://github.com/Lightning-AI/pytorch-lightning/issues/2817
    """

    def body(rank):
        made = job(model=mlp, data=mlp_rows(6), loss=classes_loss)
        run = start(made, tmp_path, epochs=3, global_batch=2, micro_batch=1, save_every=3, keep=9, precision="fp64")
        ends = []
        step = run.step

        def watched(window):
            report = step(window)
            if window.last_of_epoch:
                ends.append((report.step, report.epoch))
            return report

        run.step = watched
        summary = train_loop(run)
        run.close()
        return ends, summary["steps"]

    ends, steps = run_ranks(body, 1)[0]
    assert ends == [(3, 0), (6, 1), (9, 2)]
    assert steps == 9
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-3", "step-6", "step-9"]


def test_the_schedule_advances_once_per_optimizer_step(tmp_path):
    """Warm-up ended too early by the accumulation factor.

    https://github.com/Lightning-AI/pytorch-lightning/issues/1476
    """

    def body(rank):
        made = job(
            model=mlp,
            data=mlp_rows(24),
            loss=classes_loss,
            optimizer=sgd(0.4),
            lr_schedule=lambda optimizer, steps: lambda step: min(1.0, (step + 1) / 4),
        )
        done, _, _ = drive(made, tmp_path, epochs=1, global_batch=4, micro_batch=1, precision="fp64")
        return [report.lr for _, report in done]

    assert run_ranks(body, 1)[0] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rel=1e-15)


def test_traffic_of_a_step_does_not_grow_with_accumulation(tmp_path):
    """Every micro-batch was all-reduced: right, twice as slow, and nobody noticed.

    https://github.com/huggingface/accelerate/pull/1153
    """

    def body(rank):
        found = []
        for micro in (8, 1):
            made = job(model=mlp, data=mlp_rows(16), loss=classes_loss)
            run = start(made, tmp_path / str(micro), steps=2, global_batch=16, micro_batch=micro)
            window = next(run.windows_source.iterate(0, 1))
            sent, real = [], dist.all_reduce
            dist.all_reduce = lambda tensor, *args, sent=sent, real=real, **kw: (
                sent.append(tensor.numel()) or real(tensor, *args, **kw)
            )
            run.step(window)
            dist.all_reduce = real
            run.close()
            found.append((len(window.micro_batches), sent))
        return found

    for (few, sent), (many, sent_many) in run_ranks(body, 2):
        assert (few, many) == (1, 8)
        assert sent == sent_many
        assert len(sent) == 2  # one bucket, one vector of figures
