"""What travels: the codec's bytes as foretold, once a step, while backward runs; and what is decoded of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from tests.compress.coded_runs import CODECS, coded, stepped
from tests.harness import run_ranks
from tests.small_jobs import classes_loss, job, mlp, mlp_rows, sgd, start

from shoal.compress import Part, codec, make
from shoal.core.errors import ConfigError
from shoal.engine.compression import account
from shoal.plan.codec import Codec as Spec

pytestmark = pytest.mark.ranks
#: Times (n - 1) / n of the whole buffer that a ring sends, and which argument is that buffer.
SENT = {"all_reduce": (2, 0), "all_to_all_single": (1, 0), "gather": (1, 0)}


def watch(patch, run):
    """Bytes sent and calls in flight before ``finish``, of gradients' collectives."""
    found, calls = Counter(), []
    for name, (rounds, place) in SENT.items():
        owner = codec if name == "gather" else dist
        modules = [owner] + ([__import__(f"shoal.compress.{m}", fromlist=["x"]) for m in ("bf16", "int8", "topk")])
        real = getattr(owner, name)

        def counted(*args, real=real, rounds=rounds, place=place, name=name, **kwargs):
            if kwargs.get("async_op"):
                ranks = dist.get_world_size()
                found["bytes"] += rounds * (ranks - 1) / ranks * args[place].numel() * args[place].element_size()
                calls.append(name)
            return real(*args, **kwargs)

        for module in modules if name == "gather" else modules[:1]:
            patch.setattr(module, name, counted)
    finish = run.buckets.finish

    def finished():
        found["before finish"] = len(calls)
        finish()

    patch.setattr(run.buckets, "finish", finished)
    return found, calls


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_are_as_told_once_a_step_while_backward_runs(tmp_path, ranks):
    """Not in every micro-batch: https://github.com/pytorch/pytorch/pull/49418"""

    def body(rank):
        told = {}
        for name in CODECS:
            run = coded(tmp_path / name, name, 2, micro_batch=2, global_batch=4 * ranks)
            with pytest.MonkeyPatch.context() as patch:
                found, calls = watch(patch, run)
                run.step(next(run.windows()))
            carried = sum(bool(bucket.coded) for bucket in run.buckets.buckets)
            told[name] = found, len(calls), carried, len(run.buckets.buckets), account(run)
            run.close()
        return told

    for name, (found, calls, carried, buckets, said) in run_ranks(body, ranks)[0].items():
        stages = 1 if name.startswith("topk") else 2
        assert calls == stages * carried + (buckets - carried)
        assert found["before finish"] >= stages * carried - 2 * stages  # all but the last, which finish completes
        slack = {"bf16": 2 * 2 * ranks * carried, "int8": 2 * (256 + 4) * ranks * carried}.get(name, 0)  # padding
        assert -0.5 <= found["bytes"] - said["sent_bytes"] <= slack + 0.5
        assert said["codec"] == name and said["sent_bytes"] < said["plain_bytes"] / 1.5


def test_what_is_decoded_is_the_sum(tmp_path):
    """bfloat16 and int8 within their rounding, top-k of all values and a matrix of PowerSGD's rank to the last bit or
    two; on every rank the same."""

    def body(rank):
        found = {}
        left, right = torch.randn(64, 2, dtype=torch.float64), torch.randn(48, 2, dtype=torch.float64)
        exact = left @ right.T
        generator = torch.Generator().manual_seed(rank)
        noise = torch.randn(64, 48, generator=generator, dtype=torch.float64)
        for name, given in (("bf16", noise), ("int8", noise), ("topk:1", noise), ("powersgd:2", exact)):
            param = torch.nn.Parameter(given.clone())
            made, flat = make(Spec.parse(name)), given.clone().view(-1)
            made.begin("w", param)
            for work in made.reduce([Part("w", flat.view(64, 48))], flat, None):
                assert work is not None
                work.wait()
            total = given.clone()
            dist.all_reduce(total)
            found[name] = (float((flat.view(64, 48) - total).abs().max() / total.abs().max()), flat)
        return found

    torch.manual_seed(0)
    found = run_ranks(body, 3)
    for name, bound in (("bf16", 2**-7), ("int8", 2 / 127), ("topk:1", 1e-15), ("powersgd:2", 1e-13)):
        assert found[0][name][0] < bound
        assert all(torch.equal(other[name][1], found[0][name][1]) for other in found)
    assert found[0]["bf16"][0] > 1e-4 and found[0]["int8"][0] > 1e-4


def test_powersgd_goes_on_from_gradients_of_any_size(tmp_path):
    """Its factor of a step is where the next begins: of very small gradients it would vanish in a product with others,
    of none at all it would stay nothing."""

    def body(rank):
        left, right = torch.randn(64, 2, dtype=torch.float64), torch.randn(48, 2, dtype=torch.float64)
        exact, made = left @ right.T, make(Spec.parse("powersgd:2"))
        made.begin("w", torch.nn.Parameter(exact.clone()))
        errors = []
        for scale in (0.0, 1e-170, 1e-170, 1.0):
            flat = (scale * exact).view(-1)
            for work in made.reduce([Part("w", flat.view(64, 48))], flat, None):
                assert work is not None
                work.wait()
            made.memory.take_over(["w"])
            errors.append(float((flat.view(64, 48) - 2 * scale * exact).abs().max() / (scale or 1)))
        return errors

    torch.manual_seed(0)
    assert all(error < 1e-12 for error in run_ranks(body, 2)[0])


def test_bf16_goes_with_a_pipeline(tmp_path):
    """Gradients of stages that have copies are sent when the schedule has ended."""

    def body(rank):
        mesh = {"mesh": "pipeline=2,replicate=2", "schedule": "gpipe"}
        runs = [coded(tmp_path / str(name), name, 3, micro_batch=1, **mesh) for name in (None, "bf16")]
        losses = [list(stepped(run)) for run in runs]
        return losses, [sum(bool(bucket.coded) for bucket in run.buckets.buckets) for run in runs]

    (plain, narrow), buckets = run_ranks(body, 4)[3]
    assert buckets[0] == 0 < buckets[1]
    assert 0 < max(abs(a - b) for a, b in zip(plain[1:], narrow[1:], strict=True)) < 1e-3


def test_a_codec_of_other_layouts_and_names_is_refused(tmp_path):
    def body(rank):
        said = []
        for name, mesh in (("topk:0.1", "tensor=2"), ("bf16", "shard=2"), ("powersdg:2", "replicate=2")):
            with pytest.raises(ConfigError) as error:
                coded(tmp_path, name, 1, mesh=mesh)
            said.append(str(error.value))
        return said

    tensor, shard, name = run_ranks(body, 2)[0]
    assert "layout: compress = 'topk:0.1' keeps what each rank has not sent of whole weights" in tensor
    assert "layout: compress = 'bf16', but the mesh is shard=2" in shard
    assert "there is no codec 'powersdg'; did you mean 'powersgd'?" in name


def test_a_model_of_small_weights_alone_travels_as_it_is(tmp_path):
    def body(rank):
        runs = []
        for name in (None, "topk:0.1"):
            made = job(model=mlp, data=mlp_rows(16), loss=classes_loss, optimizer=sgd(0.1))
            runs.append(start(made, tmp_path / str(name), steps=2, global_batch=4, compress=name))
            list(stepped(runs[-1]))
        return [run.model[0].weight.detach().clone() for run in runs], account(runs[1])

    (plain, narrow), said = run_ranks(body, 2)[0]
    assert torch.equal(plain, narrow) and said["sent_bytes"] == said["plain_bytes"]
