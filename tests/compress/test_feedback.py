"""What a codec does not send in a step it sends in a later one: nothing is lost, doubled, or kept of a bad step."""

from __future__ import annotations

import math

import pytest
import torch
from tests.compress.coded_runs import CODECS, KEEPING, coded, errors, kept, same, stepped, summed, tiny
from tests.harness import run_ranks
from tests.small_jobs import LM, Rows, job, mlp_rows, sgd, start
from torch import nn

from shoal import Loss

pytestmark = pytest.mark.ranks


class Pair(nn.Module):
    """Two weights, times the input, downhill."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 2))

    def forward(self, x):
        return -(x * self.weight).sum()


@pytest.mark.parametrize("ranks", [1, 2])
def test_small_gradients_arrive_and_accumulation_changes_nothing(tmp_path, ranks):
    """The largest value alone of the constant gradient [1.0, 0.6] is sent: without its error, or with the error added
    in every micro-batch, the second weight stays behind.

    https://github.com/pytorch/pytorch/pull/48670 https://github.com/pytorch/pytorch/pull/49418
    """
    rows = Rows([(torch.tensor([1.0, 0.6]), torch.tensor(0))] * 4 * ranks)

    notes = []

    def trained(micro_batch):
        made = job(model=Pair, data=rows, loss=lambda out, y: Loss(out, len(y)), optimizer=sgd(1.0))
        run = start(
            made, tmp_path / f"micro-{micro_batch}", notes.append, steps=20, epochs=10, global_batch=2 * ranks,
            micro_batch=micro_batch, compress="topk:0.5",
        )  # fmt: skip
        list(stepped(run))
        run.close()
        return run.model.weight.detach().clone()[0]

    def body(rank):
        tiny()
        return trained(2), trained(1), notes

    for whole, halves, told in run_ranks(body, ranks):
        assert (whole - torch.tensor([20.0, 12.0])).abs().max() <= 1.0
        assert torch.equal(whole, halves)
        said = "compress topk:0.5: one worker sends nothing, and its gradients are coded all the same"
        assert (said in told) is (ranks == 1)


@pytest.mark.parametrize("name", KEEPING)
def test_what_was_not_applied_is_what_is_kept(tmp_path, name):
    """Memory by bucket was reset, or added to other parameters, when the buckets were rebuilt after the first step.
    Over 20 steps what the applied gradients lack of the true ones is each parameter's error, of all ranks together.

    https://github.com/pytorch/pytorch/pull/51427 https://github.com/pytorch/pytorch/pull/49418
    """

    def body(rank):
        run = coded(tmp_path, name, 20, precision="fp64", epochs=4, clip=0.5, model=lambda: LM(tied=True))
        lacking = {part: torch.zeros_like(tensor) for part, tensor in errors(run).items()}
        codec, plain, norms = run.buckets.codec, run.buckets.assign, []

        def reduce(parts, flat, group, real=codec.reduce):
            for part in parts:
                lacking[part.name] += part.gradient
            return real(parts, flat, group)

        def assign(used):
            plain(used)
            found = dict(run.buckets.parameters)
            for part in lacking:
                lacking[part] -= found[part].grad / 2  # half on each of two ranks
            norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in found.values())))

        codec.reduce, run.buckets.assign = reduce, assign
        reports = [run.step(window) for window in run.windows()]
        run.close()
        clipped = [
            report.grad_norm * report.count == pytest.approx(norm) for report, norm in zip(reports, norms, strict=True)
        ]
        return summed(lacking), summed(errors(run)), len(run.buckets.buckets), clipped

    for lacking, found, buckets, clipped in run_ranks(body, 2):
        assert buckets > 6 and len(found) > 10 and len(clipped) == 20
        assert max(float(tensor.abs().max()) for tensor in found.values()) > 1e-3
        for part, tensor in found.items():
            assert (lacking[part] - tensor).abs().max() < 1e-6, part
        assert all(clipped)  # the norm that clips is that of what was decoded


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_skipped_leaves_the_memory_as_it_was(tmp_path, bad):
    """An infinite gradient on one rank would stay in its memory for good: https://arxiv.org/abs/1905.13727 has no step
    that is not applied, loss scaling and bad samples do."""

    def body(rank):
        found = {}
        for name in CODECS:
            run = coded(tmp_path / name, name, 5)
            taken, codec = [], run.buckets.codec
            for number, window in enumerate(run.windows()):
                spoil = number == 2 and rank == 1

                def reduce(parts, flat, group, spoil=spoil, real=codec.reduce):
                    if spoil:
                        flat[flat.numel() // 2] = bad
                    return real(parts, flat, group)

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(codec, "reduce", reduce)
                    before = {key: tensor.clone() for key, tensor in kept(run).items()}
                    report = run.step(window)
                taken.append((report.applied, same(before, kept(run)), not codec.memory.left))
            run.close()
            found[name] = taken
        return found

    for found in run_ranks(body, 2):
        for name in CODECS:
            keeps = name == "bf16"
            assert found[name] == [(True, keeps, True)] * 2 + [(False, True, True)] + [(True, keeps, True)] * 2, name


class Turns(nn.Module):
    """Two layers, of which each forward uses the other one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layers[self.calls % 2](x)


@pytest.mark.parametrize("name", KEEPING)
def test_a_parameter_that_a_step_does_not_use_keeps_its_error(tmp_path, name):
    """It gets no gradient then, as on one device, so that what would be sent of its error would be lost."""

    def body(rank):
        made = {"model": Turns, "data": mlp_rows(32), "loss": lambda out, y: Loss(out.square().sum(), len(y))}
        run = coded(tmp_path, name, 4, **made, optimizer=sgd(0.01), micro_batch=4)
        changed = []
        for window in run.windows():
            before = errors(run)
            run.step(window)
            changed.append([part for part, tensor in errors(run).items() if not torch.equal(tensor, before[part])])
        run.close()
        return changed

    for changed in run_ranks(body, 2):
        assert changed == [["layers.1.weight"], ["layers.0.weight"]] * 2


def test_losses_stay_near_those_without_a_codec(tmp_path):
    def body(rank):
        return {name: list(stepped(coded(tmp_path / str(name), name, 12, epochs=3))) for name in (None, *CODECS)}

    found = run_ranks(body, 2)[0]
    assert found[None][-1] < found[None][0]
    for name, bound in zip(CODECS, (1e-4, 1e-3, 0.02, 0.02), strict=True):
        assert 0 < abs(found[name][-1] - found[None][-1]) < bound * found[None][-1], name
