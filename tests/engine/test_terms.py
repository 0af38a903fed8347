"""Losses of several terms: each is divided by its own count over the global batch, in every cut."""

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import error, job, mlp, mlp_rows, sgd, stack, start, weights
from torch import nn

from shoal import Loss
from shoal.core.errors import NumericsError

pytestmark = pytest.mark.ranks

ROWS = mlp_rows(8)


def few(targets):
    """A term that only some rows have: of the first 4 rows 3, of the last 4 none or one."""
    return targets == ROWS[0][1]


def two_terms(output, targets):
    return {
        "class": nn.functional.cross_entropy(output, targets, reduction="sum"),
        "size": output.square().mean(1)[few(targets)].sum(),
    }


def two_counts(inputs, targets):
    return {"class": len(targets), "size": few(targets).sum()}


def terms_job(**more):
    made = {"model": mlp, "data": ROWS, "loss": two_terms, "counts": two_counts, "optimizer": sgd(0.1), **more}
    return job(**made)


def wanted(initial, steps=3):
    """(losses, weights) of plain PyTorch on the whole batch."""
    model = mlp().double()
    model.load_state_dict(initial)
    inputs, targets = stack(ROWS, range(8))
    inputs = inputs.double()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(steps):
        sums, counts = two_terms(model(inputs), targets), two_counts(inputs, targets)
        loss = sum(sums[name] / counts[name] for name in sums)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights(model)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 1)])
def test_each_term_is_divided_by_its_own_global_count(tmp_path, ranks, micro):
    def train(rank):
        run = start(
            terms_job(), tmp_path, precision="fp64", global_batch=8, micro_batch=micro, steps=3, epochs=3, seed=0
        )
        initial = weights(run.model)
        losses = [run.step(window).loss for window in run.windows()]
        run.close()
        return losses, weights(run.model), initial

    found, after, initial = run_ranks(train, ranks)[0]
    losses, weighted = wanted(initial)
    assert any(not torch.equal(initial[name], weighted[name]) for name in initial)
    assert found == pytest.approx(losses, rel=1e-12)
    assert error(after, weighted) < 1e-12


def test_evaluation_tells_each_term(tmp_path):
    def evaluate(rank):
        run = start(terms_job(eval_data=ROWS), tmp_path, precision="fp64", global_batch=8, micro_batch=2, steps=1)
        found = run.evaluate()
        run.close()
        return found, weights(run.model)

    found, initial = run_ranks(evaluate, 2)[0]
    losses, _ = wanted(initial, 1)
    assert found["loss"] == pytest.approx(losses[0], rel=1e-12)
    assert found["loss/class"] + found["loss/size"] == pytest.approx(found["loss"], rel=1e-12)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"counts": None}, "the loss returned the terms class, size; write counts"),
        (
            {"counts": lambda inputs, targets: {"class": 1}},
            "counts.. tells the terms class, loss.. returned class, size",
        ),
        ({"counts": lambda inputs, targets: 3}, "counts.. returned 3; return"),
        (
            {"loss": lambda output, targets: {"class": output, "size": output.sum()}},
            "loss term 'class' must be a scalar",
        ),
        ({"loss": lambda output, targets: Loss(output.sum(), 1)}, "loss.. returned Loss; return"),
        ({"counts": lambda inputs, targets: {"class": -1, "size": 0}}, "negative or not finite"),
    ],
)
def test_terms_that_do_not_fit_are_refused(tmp_path, change, text):
    def refused(rank):
        run = start(terms_job(**change), tmp_path, global_batch=8, steps=1)
        try:
            with pytest.raises(NumericsError, match=text):
                run.step(next(iter(run.windows())))
        finally:
            run.close(alone=True)

    run_ranks(refused, 1)
