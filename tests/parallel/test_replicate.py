"""Whole weights on every rank: what models may do, and what is refused by name."""

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import (
    LM,
    Rows,
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
from torch.utils.checkpoint import checkpoint

from shoal import Loss
from shoal.core.errors import ModelError

pytestmark = pytest.mark.ranks


def adamw(model):
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)


def train(out, model, rows, loss, steps=3, optimizer=adamw, between=lambda run: None, **settings):
    """(run, samples of each step, weights before) after ``steps`` float64 steps."""
    settings = {"global_batch": 8, "micro_batch": 2, "precision": "fp64", **settings}
    run = start(job(model=model, data=rows, loss=loss, optimizer=optimizer), out, steps=steps, **settings)
    before, ids = weights(run.model), []
    for window in run.windows():
        run.step(window)
        ids.append([i for micro in window.micro_batches for i in micro.ids])
        between(run)
    run.close()
    return run, ids, before


def results(out, ranks, *args, **kw):
    """([weights of each rank], samples of each step over all ranks, weights before)."""

    def body(rank):
        run, ids, before = train(out, *args, **kw)
        return weights(run.model), ids, before

    found = run_ranks(body, ranks)
    last = [rank[0] for rank in found]
    assert all(torch.equal(other[name], last[0][name]) for other in last for name in other)
    return last[0], [sum((rank[1][k] for rank in found), []) for k in range(len(found[0][1]))], found[0][2]


def plain(model, before, rows, loss, batches, optimizer=adamw):
    """The same training in one process in plain PyTorch, whole batches."""
    net = model().double()
    net.load_state_dict(before)
    made = optimizer(net)
    for ids in batches:
        x, y = stack(rows, ids)
        made.zero_grad()
        total, count = loss(net(x.double() if x.is_floating_point() else x), y)
        (total / count).backward()
        made.step()
    return weights(net)


class Spare(nn.Module):
    """A model with a layer that takes no part."""

    def __init__(self):
        super().__init__()
        self.used = mlp()
        self.spare = nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def test_a_parameter_without_part_in_the_loss_stays_as_on_one_device(tmp_path):
    """An unused parameter ended the run with a message of indices; here it trains on, and is left alone.

    https://github.com/huggingface/peft/issues/393 https://github.com/tloen/alpaca-lora/issues/575
    https://github.com/pytorch/pytorch/issues/43259
    """
    rows = mlp_rows(24)
    last, batches, before = results(tmp_path, 2, Spare, rows, classes_loss)
    assert error(last, plain(Spare, before, rows, classes_loss, batches)) < 1e-10
    assert torch.equal(last["spare.weight"], before["spare.weight"])  # no weight decay either


class Routed(nn.Module):
    """Rows whose first number is large take another way: a parameter may be used on some ranks only."""

    def __init__(self):
        super().__init__()
        self.common, self.rare = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        chosen = x[:, 0] > 1.3
        y = self.common(x)
        return y.index_add(0, chosen.nonzero()[:, 0], self.rare(x[chosen])) if chosen.any() else y


def test_a_parameter_used_on_some_ranks_only_gets_the_global_gradient(tmp_path):
    """https://github.com/pytorch/pytorch/issues/43259"""
    rows = mlp_rows(24, seed=5)
    assert 0 < sum(float(x[0]) > 1.3 for x, _ in rows.samples) < 6
    last, batches, before = results(tmp_path, 4, Routed, rows, classes_loss, 6, micro_batch=1)
    assert error(last, plain(Routed, before, rows, classes_loss, batches)) < 1e-10


class Adapted(nn.Module):
    """A frozen LM whose feed-forward layers have rank-2 adapters."""

    def __init__(self):
        super().__init__()
        self.base = LM().requires_grad_(False)
        self.down = nn.Linear(16, 2, bias=False)
        self.up = nn.Linear(2, 16, bias=False)
        self.base.blocks[0].up.register_forward_hook(lambda module, args, y: y)
        self.base.norm.register_forward_hook(lambda module, args, y: y + self.up(self.down(args[0])))

    def forward(self, tokens):
        return self.base(tokens)


def test_frozen_parameters_stay_out_of_buckets_and_optimizer(tmp_path):
    """A frozen base with adapters: complaints about base weights, or optimizer state for them.

    https://github.com/huggingface/peft/issues/951 https://github.com/changjonathanc/minLoRA/issues/2
    """
    rows = token_rows([3, 11, 1, 9, 12, 2, 7, 5] * 2)

    def everything(model):  # as users write it: over all parameters, frozen ones too
        return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)

    def body(rank):
        run, ids, before = train(tmp_path, Adapted, rows, token_loss, 5, everything)
        states = [run.optimizer.names[id(param)] for param in run.optimizer.optimizer.state]
        held = sum(bucket.flat.numel() for bucket in run.buckets.buckets)
        return weights(run.model), ids, before, states, held

    ranks = run_ranks(body, 2)
    last, _, before, states, held = ranks[0]
    batches = [ranks[0][1][k] + ranks[1][1][k] for k in range(5)]
    assert sorted(states) == ["down.weight", "up.weight"]
    assert held == 64
    assert all(torch.equal(last[name], before[name]) for name in last if name.startswith("base."))
    assert all(torch.equal(last[name], ranks[1][0][name]) for name in last)
    assert error(last, plain(Adapted, before, rows, token_loss, batches, everything)) < 1e-10


def recomputed(reentrant, shared=False):
    class Recomputed(LM):
        def forward(self, tokens):
            x = self.embed(tokens) + self.position
            for block in [self.blocks[0], *self.blocks] if shared else self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(self.norm(x))

    return Recomputed


class Shared(LM):
    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for block in [self.blocks[0], *self.blocks]:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(("model", "like"), [
    (recomputed(False), LM), (recomputed(True), LM), (recomputed(False, True), Shared),
])  # fmt: skip
def test_activation_checkpointing_changes_no_gradient(tmp_path, model, like):
    """Re-entrant checkpointing failed because a variable was ready two times.

    https://github.com/huggingface/accelerate/issues/2017 https://github.com/pytorch/pytorch/issues/24005
    https://github.com/pytorch/pytorch/pull/106985
    """
    rows = token_rows([3, 11, 1, 9, 12, 2, 7, 5])
    last, batches, before = results(tmp_path, 2, model, rows, token_loss, optimizer=sgd(0.5), bucket_mb=0.001)
    assert error(last, plain(like, before, rows, token_loss, batches, sgd(0.5))) < 1e-10


def test_reentrant_checkpointing_of_shared_blocks_is_refused_by_name(tmp_path):
    """A gradient that comes again after its bucket was sent would be lost.

    https://github.com/huggingface/accelerate/issues/2017
    """
    rows = token_rows([3, 11, 1, 9, 12, 2, 7, 5])

    def body(rank):
        try:
            train(tmp_path, recomputed(True, True), rows, token_loss, bucket_mb=0.001)
        except ModelError as error:
            return str(error)
        return ""

    for text in run_ranks(body, 2):
        assert "'blocks.0." in text
        assert "use_reentrant=False" in text


class TwoForwards(nn.Module):
    """A batch-normalised network over two halves of the input, summed: two forwards before one backward.

    Trained with SGD: the bias before a batch norm has no gradient but rounding noise, which Adam would blow up.
    """

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, x):
        return self.net(x[:, :4]) + self.net(x[:, 4:])


@pytest.mark.parametrize("ranks", [2, 4])
def test_batch_norm_in_two_forwards_before_one_backward_is_one_devices(tmp_path, ranks):
    """The buffer broadcast edited tensors that backward needed.

    https://github.com/pytorch/pytorch/issues/22095 https://github.com/pytorch/pytorch/issues/175024
    """
    rows = mlp_rows(20)  # the last window has 4 rows
    last, batches, before = results(tmp_path, ranks, TwoForwards, rows, classes_loss, steps=3, micro_batch=8 // ranks,
                                    optimizer=sgd(0.5))  # fmt: skip
    assert len(batches[2]) == 4
    assert error(last, plain(TwoForwards, before, rows, classes_loss, batches, sgd(0.5))) < 1e-10


def test_batch_norm_leaves_padding_rows_out(tmp_path):
    """A rank without rows in a short last window must not add to the statistics.

    https://github.com/pytorch/pytorch/issues/22095
    """
    rows = mlp_rows(11)
    last, batches, before = results(tmp_path, 4, TwoForwards, rows, classes_loss, steps=2, micro_batch=2,
                                    optimizer=sgd(0.5))  # fmt: skip
    assert len(batches[1]) == 3
    assert error(last, plain(TwoForwards, before, rows, classes_loss, batches, sgd(0.5))) < 1e-10


def test_a_buffer_that_is_rebound_stays_the_same_on_all_ranks(tmp_path):
    """A module that rebinds its buffer dropped out of synchronisation.

    https://github.com/pytorch/pytorch/issues/63916
    """
    rows = mlp_rows(24)

    def body(rank):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = mlp()
                self.register_buffer("rebound", torch.zeros(()))
                self.register_buffer("edited", torch.zeros(()))

            def forward(self, x):
                self.rebound = self.rebound + 1 + rank
                self.edited += 10 * (rank + 1)
                return self.inner(x)

        seen = []
        train(
            tmp_path, Counting, rows, classes_loss, between=lambda run: seen.append(
                (run.model.rebound.item(), run.model.edited.item())
            ), micro_batch=4,
        )  # fmt: skip
        return seen

    for seen in run_ranks(body, 2):
        assert seen == [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]


def longer():
    return nn.Sequential(*mlp(), nn.Linear(4, 4))


class Pair(nn.Module):
    """Two layers of one shape, registered in either order."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(8, 4))

    def forward(self, x):
        return self.a(x) + self.b(x)


def frozen(which):
    model = mlp()
    model[which].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("models", "name"),
    [
        ((mlp, longer), "3.weight"),
        ((lambda: Pair("ab"), lambda: Pair("ba")), "a.weight"),
        ((lambda: frozen(0), lambda: frozen(2)), "0.weight"),
    ],
)
def test_different_models_on_ranks_are_refused_before_the_first_step(tmp_path, models, name):
    """Ranks built different models: a hang or a baffling message.

    https://github.com/pytorch/pytorch/pull/52887 https://github.com/huggingface/accelerate/issues/1481
    https://github.com/pytorch/pytorch/issues/68803
    """

    def body(rank):
        try:
            start(job(model=models[rank], data=mlp_rows(8), loss=classes_loss), tmp_path, steps=1, global_batch=8)
        except ModelError as error:
            return str(error)
        return ""

    for text in run_ranks(body, 2, timeout_s=30):
        assert "ranks 0 and 1 built different models" in text
        assert name in text


def test_unseeded_weights_are_rank_0s_on_all_ranks(tmp_path):
    """Randomness of the model's own, beside the seed, must not leave ranks with different weights."""

    def body(rank):
        def model():
            torch.manual_seed(100 + rank)
            return mlp()

        run = start(job(model=model, data=mlp_rows(8), loss=classes_loss), tmp_path, steps=1, global_batch=8)
        first = weights(run.model)
        run.close()
        return first

    first, other = run_ranks(body, 2)
    assert all(torch.equal(first[name], other[name]) for name in first)


def replaced(model):
    """An optimizer before which user code puts clones in place of the gradients."""
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def clone(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = param.grad.detach().clone()

    made.register_step_pre_hook(clone)
    return made


def hooked():
    """A model whose own hooks replace each gradient while it accumulates."""
    model = mlp()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.detach().clone()))
    return model


def halving(replace):
    """A model whose own hooks halve what is accumulated so far, in place or by another tensor."""

    def halve(param):
        if replace:
            param.grad = param.grad * 0.5
        else:
            param.grad.mul_(0.5)

    def build():
        model = mlp()
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(halve)
        return model

    return build


def test_a_gradient_replaced_while_it_accumulates_counts_as_one_edited_in_place(tmp_path):
    """https://github.com/pytorch/pytorch/pull/44344"""
    rows = mlp_rows(24)
    edited, _, _ = results(tmp_path / "edited", 2, halving(False), rows, classes_loss, micro_batch=1)
    replaced, _, _ = results(tmp_path / "replaced", 2, halving(True), rows, classes_loss, micro_batch=1)
    assert all(torch.equal(replaced[name], edited[name]) for name in edited)


def test_user_code_may_detach_replace_or_drop_gradients(tmp_path):
    """Gradients that are views of communication buckets broke when user code touched them.

    https://github.com/pytorch/pytorch/pull/44344 https://github.com/facebookresearch/fairscale/issues/354
    """
    rows = mlp_rows(24)
    momentum = sgd(0.1, momentum=0.9)
    ways = {
        "plain": (mlp, momentum, lambda run: None),
        "none": (mlp, momentum, lambda run: run.model.zero_grad(set_to_none=True)),
        "zeros": (mlp, momentum, lambda run: [setattr(p, "grad", torch.zeros_like(p)) for p in run.model.parameters()]),
        "kept": (mlp, momentum, lambda run: run.model.zero_grad(set_to_none=False)),
        "clones": (mlp, replaced, lambda run: None),
        "hooks": (hooked, momentum, lambda run: None),
    }

    def body(rank):
        return {
            name: weights(train(tmp_path / name, model, rows, classes_loss, 3, optimizer, between)[0].model)
            for name, (model, optimizer, between) in ways.items()
        }

    for found in run_ranks(body, 2):
        for name in ways:
            assert all(torch.equal(found[name][key], found["plain"][key]) for key in found[name]), name
    last, batches, before = results(tmp_path / "again", 2, mlp, rows, classes_loss, optimizer=momentum)
    assert all(torch.equal(last[key], found["plain"][key]) for key in last)
    assert error(last, plain(mlp, before, rows, classes_loss, batches, momentum)) < 1e-10


def test_bucket_sizes_change_no_bit_of_the_result(tmp_path):
    """https://github.com/pytorch/pytorch/pull/44344"""
    rows = token_rows([3, 11, 1, 9, 12, 2, 7, 5])
    whole, _, _ = results(tmp_path / "whole", 2, LM, rows, token_loss, precision="fp32")
    small, _, _ = results(tmp_path / "small", 2, LM, rows, token_loss, precision="fp32", bucket_mb=0.001)
    assert all(torch.equal(small[name], whole[name]) for name in whole)


def test_a_rank_without_rows_adds_nothing(tmp_path):
    """A short last window leaves ranks without samples, and its padding counts for nothing."""
    rows = mlp_rows(11)

    def loss(output, targets):
        return Loss(classes_loss(output, targets).sum, len(targets))

    last, batches, before = results(tmp_path, 4, mlp, Rows(rows.samples), loss, steps=2, micro_batch=2)
    assert len(batches[1]) == 3
    assert error(last, plain(mlp, before, rows, loss, batches)) < 1e-10
