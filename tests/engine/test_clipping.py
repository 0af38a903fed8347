"""Clipping by the global norm, and what happens when numbers are not finite."""

import pytest
import torch
import torch.distributed as dist
from tests.harness import run_ranks
from tests.small_jobs import Rows, Scalar, classes_loss, error, job, mlp, mlp_rows, sgd, start, weights
from torch import nn

from shoal import Loss
from shoal.checkpoint.reader import newest_good
from shoal.core.errors import NumericsError
from shoal.engine.loop import train_loop

pytestmark = pytest.mark.ranks


class Dot(nn.Module):
    """Inner product with a weight that begins at zero."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return x @ self.weight


def mean(output, targets):
    return Loss(output.sum(), len(output))


def test_the_clipped_gradient_is_the_mean_of_the_step(tmp_path):
    """Clipping saw the gradient before its division by the accumulation count.

    https://github.com/petuum/adaptdl/pull/26
    """
    data = Rows([(torch.tensor([3.0, 4.0]), 0)] * 4)

    def body(rank):
        found = []
        for clip in (5.0, 2.5):
            run = start(
                job(model=lambda: Dot(2), data=data, loss=mean),
                tmp_path / f"{dist.get_world_size()}-{clip}", steps=1, global_batch=4, micro_batch=1, clip=clip,
            )  # fmt: skip
            report = run.step(next(run.windows_source.iterate(0, 1)))
            run.close()
            found.append((report.grad_norm, run.model.weight.tolist()))
        return found

    for ranks in (1, 2):
        for whole, half in run_ranks(body, ranks):
            assert whole == (5.0, pytest.approx([-3.0, -4.0]))
            assert half == (5.0, pytest.approx([-1.5, -2.0]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_norm_whose_squares_overflow_is_still_right(tmp_path, ranks):
    """The sum of squares overflowed in float32 though the norm did not.

    https://github.com/deepmodeling/deepmd-kit/pull/5519
    """
    data = Rows([(torch.full((128,), 1e19), 0)] * 2)

    def body(rank):
        run = start(
            job(model=lambda: Dot(128), data=data, loss=mean),
            tmp_path,
            steps=1,
            global_batch=2,
            micro_batch=1,
            clip=2.0,
        )
        report = run.step(next(run.windows_source.iterate(0, 1)))
        run.close()
        return report.applied, report.grad_norm, float(run.model.weight.detach().double().norm())

    for applied, norm, moved in run_ranks(body, ranks):
        assert applied
        assert norm == pytest.approx(1e19 * 128**0.5, rel=1e-5)
        assert moved == pytest.approx(2.0, rel=1e-5)


def test_checkpoints_with_nan_weights_do_not_push_out_the_last_good_one(tmp_path):
    """After going NaN the run kept saving, and rotation removed the last good checkpoint.

    https://github.com/kyutai-labs/pocket-tts/pull/262
    """

    def body(rank):
        made = job(model=mlp, data=mlp_rows(8), loss=classes_loss, optimizer=sgd(0.1))
        run = start(made, tmp_path, steps=12, global_batch=4, save_every=2, keep=2)
        step = run.step

        def spoiled(window):
            report = step(window)
            if report.step == 6:
                with torch.no_grad():
                    run.model[0].weight[0, 0] = float("nan")
            return report

        run.step = spoiled
        train_loop(run)
        run.close()
        return run.step_count

    assert run_ranks(body, 1) == [12]
    good, skipped = newest_good(tmp_path / "checkpoints")
    assert good is not None and good.step == 4
    assert {found.step for found in skipped} >= {12}
    assert all("not finite" in found.problem for found in skipped)


def test_a_step_with_a_nan_on_one_rank_is_skipped_on_all_and_training_goes_on(tmp_path):
    """Clipping a non-finite gradient, or skipping it on one rank only, breaks the weights.

    https://github.com/kyutai-labs/pocket-tts/pull/262
    """

    def body(rank):
        rows = mlp_rows(16)
        rows.samples[5] = (rows.samples[5][0] * float("nan"), rows.samples[5][1])
        made = job(model=mlp, data=rows, loss=classes_loss, optimizer=sgd(0.1, momentum=0.9))
        run = start(made, tmp_path, epochs=1, global_batch=4, clip=1.0, precision="fp64")
        applied, kept = [], []
        for window in run.windows():
            before = weights(run.model)
            applied.append(run.step(window).applied)
            kept.append(error(weights(run.model), before) == 0)
        run.close()
        return applied, kept, weights(run.model)

    ranks = run_ranks(body, 2)
    for applied, kept, last in ranks:
        assert sorted(applied) == [False, True, True, True]
        assert kept == [not done for done in applied]
        assert all(torch.equal(last[name], ranks[0][2][name]) for name in last)
        assert all(torch.isfinite(tensor).all() for tensor in last.values())


def test_a_run_of_skipped_steps_ends_and_names_the_parameter(tmp_path):
    """Nothing but skipped steps is no training: it ends, and says where to look."""

    def body(rank):
        made = job(model=lambda: Scalar(float("inf")), data=Rows([(torch.tensor(1.0), 0)] * 8), loss=mean)
        run = start(made, tmp_path, steps=8, global_batch=2, max_skips=3)
        try:
            for window in run.windows():
                run.step(window)
        except NumericsError as error:
            return str(error)
        return ""

    for text in run_ranks(body, 2):
        assert "3 steps in a row" in text
        assert "the loss is not finite" in text
