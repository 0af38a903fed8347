"""Training on any number of workers and micro-batches is training on one, to rounding error of float64."""

import copy

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import LM, error, job, stack, start, token_loss, token_rows, weights

pytestmark = pytest.mark.ranks

STEPS, GLOBAL, CLIP = 20, 8, 0.5
COUNTS = [(7 * i) % 12 + 1 for i in range(28)]  # 1 to 12 tokens a row; the 4th window of an epoch has 4 rows
LAYOUTS = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, foreach=False, fused=False)


def rate(step):
    return min(1.0, (step + 1) / 5)


def made():
    return job(
        model=lambda: LM(tied=True),
        data=token_rows(COUNTS),
        loss=token_loss,
        optimizer=adamw,
        lr_schedule=lambda optimizer, steps: rate,
    )


def train(out, micro_batch):
    """Losses, gradient norms, samples of each step, weights before and after."""
    run = start(
        made(), out, steps=STEPS, global_batch=GLOBAL, micro_batch=micro_batch, precision="fp64", clip=CLIP, seed=3
    )
    first = copy.deepcopy(run.model)
    losses, norms, ids = [], [], []
    for window in run.windows():
        report = run.step(window)
        losses.append(report.loss)
        norms.append(report.grad_norm)
        ids.append([i for micro in window.micro_batches for i in micro.ids])
    run.close()
    return losses, norms, ids, first, weights(run.model)


def plain(model, batches):
    """The same in plain PyTorch: the whole global batch in one forward, one process."""
    rows = token_rows(COUNTS)
    optimizer = adamw(model)
    losses, norms = [], []
    for step, ids in enumerate(batches):
        tokens, targets = stack(rows, ids)
        total, count = token_loss(model(tokens), targets)
        optimizer.zero_grad()
        (total / count).backward()
        grads = [param.grad for param in model.parameters()]
        norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))
        for grad in grads:
            grad.mul_(min(1.0, CLIP / norms[-1]))  # torch's clip_grad_norm_ adds 1e-6 to the norm
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * rate(step)
        optimizer.step()
        losses.append((total / count).item())
    return losses, norms, weights(model)


@pytest.mark.parametrize(("workers", "micro_batch"), LAYOUTS)
def test_losses_and_weights_equal_one_process_in_float64(tmp_path, workers, micro_batch):
    ranks = run_ranks(lambda rank: train(tmp_path, micro_batch), workers)
    losses, norms, _, first, last = ranks[0]
    batches = [sum((rank[2][step] for rank in ranks), []) for step in range(STEPS)]
    assert [len(ids) for ids in batches] == [8, 8, 8, 4] * 5
    assert sorted(sum(batches[:4], [])) == list(range(len(COUNTS)))
    wanted, wanted_norms, wanted_last = plain(first, batches)
    assert losses == pytest.approx(wanted, rel=1e-10, abs=0)
    assert norms == pytest.approx(wanted_norms, rel=1e-10, abs=0)
    assert min(wanted_norms) > CLIP
    assert error(last, wanted_last) < 1e-10
    for _, _, _, _, other in ranks[1:]:
        assert all(torch.equal(last[name], other[name]) for name in last)
