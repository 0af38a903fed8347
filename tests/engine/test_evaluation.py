"""Evaluation: each held-out sample counts once, whatever the number of ranks and the cut."""

import math

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import LM, Rows, Scalar, job, mlp, mlp_rows, start, token_loss, token_rows, weights
from torch import nn

from shoal import Loss
from shoal.core.errors import NumericsError

pytestmark = pytest.mark.ranks


def values(numbers):
    return Rows([(torch.tensor(float(number)), 0) for number in numbers])


def mean_loss(output, targets):
    return output.mean()


def summed(output, targets):
    return Loss(output.sum(), len(output))


def evaluated(out, ranks, loss, eval_data, data=None, model=Scalar, metrics=None, **settings):
    """What each rank's evaluation gave."""
    settings = {"global_batch": 4, "steps": 1, **settings}

    def body(rank):
        made = job(model=model, data=data or values([1] * 8), loss=loss, eval_data=eval_data, metrics=metrics)
        run = start(made, out, **settings)
        found = run.evaluate()
        run.close()
        return found

    return run_ranks(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("loss", [mean_loss, summed])
def test_a_short_last_batch_weighs_by_its_samples(tmp_path, ranks, loss):
    """Mean of batch means: the short last batch weighed as much as a full one.

    https://github.com/huggingface/transformers/pull/41904 https://github.com/huggingface/accelerate/issues/956
    https://github.com/ganslate-team/ganslate/issues/74
    """
    for found in evaluated(tmp_path, ranks, loss, values([1, 1, 1, 1, 5])):
        assert found["loss"] == pytest.approx(1.8, rel=1e-7)


def test_a_metric_counts_no_padding(tmp_path):
    """A metric was reduced to a scalar on each rank before padding was removed.

    https://github.com/huggingface/trl/issues/7010
    """

    def metrics(output, targets):
        return {"value": Loss(output.sum(), len(output))}

    for size, ranks, local in ((9, 2, 5), (9, 4, 5), (9, 4, 2), (5, 2, 1)):
        out = tmp_path / f"{size}-{ranks}-{local}"
        for found in evaluated(out, ranks, summed, values(range(size)), metrics=metrics, global_batch=local * ranks):
            assert found["value"] == (size - 1) / 2


def test_evaluation_is_free_of_training_factors(tmp_path):
    """Training's loss scaling by the process count was applied in evaluation too.

    https://github.com/huggingface/transformers/issues/35078
    """
    held_out = token_rows([3, 11, 1, 9, 12, 2, 7], seed=4)
    found = []
    for ranks in (1, 2, 4):
        for micro in (1, 8 // ranks):
            found += evaluated(
                tmp_path / f"{ranks}-{micro}", ranks, token_loss, held_out, data=token_rows([12] * 8), model=LM,
                global_batch=8, micro_batch=micro, precision="fp64",
            )  # fmt: skip
    assert len(found) == 14
    for each in found:
        assert each["loss"] == pytest.approx(found[0]["loss"], rel=1e-9)


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_without_a_sample_of_their_own(tmp_path, size):
    """Fewer evaluation samples than ranks, of different lengths: the gather hung or crashed.

    https://github.com/Chris-hughes10/pytorch-accelerated/pull/53
    """
    lengths = Rows([(torch.full((1 + i,), float(i + 1)), 0) for i in range(size)])

    def loss(output, targets):
        return Loss(output.sum(), output.numel())

    one = evaluated(tmp_path / "1", 1, loss, lengths, micro_batch=1)[0]
    assert one["loss"] == pytest.approx(sum((i + 1) ** 2 for i in range(size)) / sum(i + 1 for i in range(size)))
    for found in evaluated(tmp_path / "4", 4, loss, lengths, micro_batch=1):
        assert found == one


def test_evaluation_leaves_training_as_it_was(tmp_path):
    """Batch statistics, the training mode and the model's randomness are training's own.

    https://github.com/huggingface/transformers/issues/35078
    """

    def body(rank):
        finals = []
        for every in (1, 10):

            def model():
                return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))

            made = job(model=model, data=mlp_rows(16), eval_data=mlp_rows(5, seed=1), loss=nn.functional.cross_entropy)
            run = start(made, tmp_path / str(every), steps=4, global_batch=8)
            for window in run.windows():
                report = run.step(window)
                if report.step % every == 0:
                    run.evaluate()
                    assert run.model.training
            run.close()
            finals.append(weights(run.model))
        return finals

    for often, never in run_ranks(body, 2):
        assert all(torch.equal(often[name], never[name]) for name in often)


def test_a_metric_that_is_no_sum_and_count_is_refused(tmp_path):
    """A plain number cannot be averaged over ranks. https://github.com/huggingface/trl/issues/7010"""

    def body(rank):
        made = job(
            model=mlp, data=mlp_rows(8), loss=nn.functional.cross_entropy, eval_data=mlp_rows(3),
            metrics=lambda out, y: {"accuracy": 0.5},
        )  # fmt: skip
        run = start(made, tmp_path, steps=1, global_batch=4)
        try:
            run.evaluate()
        except NumericsError as error:
            return str(error)
        return ""

    for text in run_ranks(body, 2):
        assert "metric 'accuracy' is float" in text
        assert "shoal.Loss" in text


def test_nothing_to_count_is_no_number(tmp_path):
    """An evaluation whose every item is masked has no loss: not 0."""
    for found in evaluated(tmp_path, 2, lambda out, y: Loss(out.sum() * 0, 0), values([1, 2])):
        assert math.isnan(found["loss"])
