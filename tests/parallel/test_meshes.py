"""Whole runs under layouts: losses, norms, evaluation and weights are those of one process, in float64."""

from functools import cache

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import Rows, error, job, start
from torch import nn

from shoal import Loss
from shoal.core.errors import ConfigError, ModelError
from shoal.core.toml import to_toml
from shoal.models.gpt import GPT

pytestmark = pytest.mark.ranks

STEPS = 4


def uneven_rows(number: int = 20, length: int = 16) -> Rows:
    """Tokens of a prime vocabulary, with uneven counts of targets; 20 do not divide into global batches of 8."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for place in range(number):
        tokens = torch.randint(0, 61, (length + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[3 + place % 9 :] = -100
        rows.append((tokens[:-1], targets))
    return Rows(rows)


def summed(output, targets):
    total = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return Loss(total, (targets != -100).sum())


def gpt_job(width=16, heads=4, length=16):
    return job(
        model=lambda: GPT(vocabulary=61, width=width, layers=8, heads=heads, context=length, tied=True),
        data=uneven_rows(length=length), loss=summed, eval_data=uneven_rows(7, length),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    )  # fmt: skip


def trained(made, out, ranks, steps=STEPS, global_batch=8, **settings):
    """(losses and norms, evaluation, weights) of a run, the weights from whichever ranks hold them."""

    def train(rank):
        given = {"global_batch": global_batch, "steps": steps, "epochs": 2, "clip": 0.5, **settings}
        run = start(made, out, precision="fp64", **given)
        told = [run.step(window) for window in run.windows()]
        found = run.evaluate()
        run.save()
        run.close()
        held = dict(run.whole_model().named_parameters()) if rank == 0 else {}
        held = {name: p.detach() for name, p in held.items()}
        return [(t.loss, t.grad_norm, t.count, t.tokens) for t in told], found, held

    every = run_ranks(train, ranks, 120)
    assert all(each[0] == every[0][0] and each[1] == every[0][1] for each in every)
    return every[0][0], every[0][1], {name: tensor for each in every for name, tensor in each[2].items()}


def same(found, expected):
    """Both runs' losses, norms, counts, evaluation and weights are the same."""
    for mine, other in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-10)
    assert found[1] == pytest.approx(expected[1], rel=1e-10)
    assert found[2].keys() == expected[2].keys()
    assert error(found[2], expected[2]) < 1e-10


@cache
def alone(folder):
    return trained(gpt_job(), folder / "alone", 1, micro_batch=2)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


LAYOUTS = [
    (2, {"mesh": "pipeline=2", "micro_batch": 2}),
    (2, {"mesh": "pipeline=2", "micro_batch": 8}),
    (2, {"mesh": "pipeline=2", "micro_batch": 1, "schedule": "looped-bfs", "chunks": 2}),
    (2, {"mesh": "pipeline=2", "micro_batch": 1, "schedule": "interleaved-1f1b", "chunks": 2}),
    (2, {"mesh": "pipeline=2", "micro_batch": 1, "schedule": "interleaved-zero-bubble", "chunks": 2}),
    (2, {"mesh": "pipeline=2", "micro_batch": 1, "schedule": "zbv", "chunks": 2}),
    (2, {"mesh": "pipeline=2", "micro_batch": 1, "schedule": "dualpipev", "chunks": 2}),
    (4, {"mesh": "pipeline=4", "micro_batch": 1}),
    (4, {"mesh": "pipeline=2,replicate=2", "micro_batch": 1}),
    (4, {"mesh": "pipeline=2,replicate=2", "micro_batch": 1, "schedule": "zbv", "chunks": 2}),
    (2, {"mesh": "shard=2", "micro_batch": 2}),
    (2, {"mesh": "shard=2", "micro_batch": 1, "shard_level": 1}),
    (2, {"mesh": "shard=2", "micro_batch": 1, "shard_level": 2}),
    (4, {"mesh": "replicate=2,shard=2", "micro_batch": 1}),
    (4, {"mesh": "pipeline=2,shard=2", "micro_batch": 1}),
    (4, {"mesh": "pipeline=2,shard=2", "micro_batch": 1, "schedule": "zbv", "chunks": 2}),
    (4, {"mesh": "pipeline=2,shard=2", "micro_batch": 1, "schedule": "interleaved-zero-bubble", "chunks": 2}),
    (8, {"mesh": "pipeline=2,replicate=2,shard=2", "micro_batch": 1}),
    (1, {"micro_batch": 2, "recompute": "full"}),
    (2, {"mesh": "pipeline=2", "micro_batch": 2, "recompute": "selective"}),
    (2, {"mesh": "pipeline=2", "micro_batch": 1, "schedule": "zbv", "chunks": 2, "recompute": "full"}),
    (2, {"mesh": "shard=2", "micro_batch": 2, "recompute": "full"}),
    (2, {"mesh": "tensor=2", "micro_batch": 2, "recompute": "full"}),
    (8, {"mesh": "pipeline=2,shard=2,tensor=2", "micro_batch": 1, "recompute": "full"}),
    (2, {"mesh": "tensor=2", "micro_batch": 2}),
    (4, {"mesh": "tensor=4", "micro_batch": 8}),
    (4, {"mesh": "replicate=2,tensor=2", "micro_batch": 1}),
    (4, {"mesh": "pipeline=2,tensor=2", "micro_batch": 1}),
    (4, {"mesh": "shard=2,tensor=2", "micro_batch": 1}),
    (8, {"mesh": "pipeline=2,shard=2,tensor=2", "micro_batch": 1, "schedule": "zbv", "chunks": 2}),
]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=lambda value: str(value).replace("'", ""))
def test_a_layout_computes_what_one_process_does(folder, tmp_path, ranks, layout):
    """Also in the last, shorter window. Gradients of tied weights on two stages were not summed, or counted twice; a
    schedule divided what had been accumulated at every call.

    With shards, those of tied weights were added before all data ranks had given theirs.

    https://github.com/NVIDIA/Megatron-LM/issues/299 https://github.com/uw-syfi/piper/issues/13
    https://github.com/NVIDIA/Megatron-LM/issues/844
    https://github.com/pytorch/torchtitan/issues/1733 https://github.com/pytorch/torchtitan/pull/1732
    """
    same(trained(gpt_job(), tmp_path, ranks, **layout), alone(folder))


STAGED = (4, {"mesh": "pipeline=2,replicate=2", "micro_batch": 1})
UNEVEN = (3, {"mesh": "tensor=3", "micro_batch": 8})  # four heads, a vocabulary of 61


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (STAGED, (1, {})),
        (STAGED, (2, {})),
        (STAGED, (2, {"mesh": "pipeline=2", "micro_batch": 1, "schedule": "zbv", "chunks": 2})),
        (STAGED, (4, {"mesh": "pipeline=4"})),
        (STAGED, (2, {"mesh": "shard=2"})),
        (STAGED, (4, {"mesh": "replicate=2,shard=2", "shard_level": 1})),
        (STAGED, UNEVEN),
        (UNEVEN, (4, {"mesh": "shard=2,tensor=2"})),
    ],
    ids=str,
)
def test_a_run_goes_on_under_another_layout(folder, tmp_path, first, second):
    losses, _, weights = alone(folder)
    (before, begun), (ranks, layout) = first, second
    told = trained(gpt_job(), tmp_path, before, steps=2, **begun)
    found = trained(gpt_job(), tmp_path, ranks, resume=True, **layout)
    for mine, other in zip(told[0] + found[0], losses, strict=True):
        assert mine == pytest.approx(other, rel=1e-10)
    assert error(found[2], weights) < 1e-10


class Branches(nn.Module):
    """Batch normalisation, keyword inputs, an early value read late, a dict as the result."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(16, 3)

    def forward(self, x, weight=None):
        base = self.first(x)
        early = self.norm(base.clone())
        side = base * 2
        late = early
        for block in self.blocks:
            late = block(late)
        base.mul_(0.5)
        joined = torch.cat([early, late], 1)
        scores = self.last(joined if weight is None else joined * weight[:, None])
        return {"scores": scores + base[:, :3], "side": side}  # nobody asks for the gradient of ``side``


def branches_job():
    generator = torch.Generator().manual_seed(2)
    rows = [
        ({"x": torch.randn(4, generator=generator), "weight": torch.rand((), generator=generator)}, place % 3)
        for place in range(16)
    ]

    def loss(output, targets):
        return nn.functional.cross_entropy(output["scores"], targets)

    return job(
        model=Branches, data=Rows(rows), loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )  # fmt: skip


@pytest.mark.parametrize("layout", [{"mesh": "pipeline=2,replicate=2"}, {"mesh": "pipeline=4"}], ids=str)
def test_models_of_any_structure_run_in_stages(tmp_path, layout):
    """Statistics are those of one micro-batch of all data ranks; names, keywords, dicts and skips survive."""
    micro = 4 // (2 if "replicate" in layout["mesh"] else 1)
    expected = trained(branches_job(), tmp_path / "alone", 1, micro_batch=4)
    found = trained(branches_job(), tmp_path / "staged", 4, micro_batch=micro, schedule="gpipe", **layout)
    for mine, other in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-10)
    assert error(found[2], expected[2]) < 1e-10


def test_layouts_that_cannot_be_are_refused_before_anything_is_built(tmp_path):
    for settings, text in (
        ({"mesh": "pipeline=3"}, "--mesh: pipeline=3"),
        ({"mesh": "pipelin=2"}, "did you mean 'pipeline'"),
        ({"mesh": "pipeline=2", "schedule": "zbv"}, "zbv takes exactly 2 chunks per rank, not 1"),
        ({"mesh": "pipeline=2", "micro_batch": 8, "schedule": "1f1b"}, "1f1b .* takes at least 2 micro-batches"),
    ):

        def build(rank, settings=settings, text=text):
            with pytest.raises(ConfigError, match=text):
                start(gpt_job(), tmp_path, global_batch=8, steps=1, **settings)

        run_ranks(build, 2)


def test_more_stages_than_places_to_cut_are_refused(tmp_path):
    def build(rank):
        with pytest.raises(ConfigError, match=r"the model has 6 places to cut, 8 stages were asked for; use at most 6"):
            start(branches_job(), tmp_path, global_batch=8, steps=1, mesh="pipeline=2", schedule="looped-bfs", chunks=4)

    run_ranks(build, 2)


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, weight):
        hidden = self.first(x)
        return {"scores": self.second(hidden if hidden.sum() > 0 else -hidden)}


def test_a_model_whose_path_depends_on_values_is_refused_with_the_reason(tmp_path):
    made = branches_job()
    made._given["model"] = Decides

    def build(rank):
        with pytest.raises(ModelError, match="the model cannot be traced: .*keep values of tensors out of the control"):
            start(made, tmp_path, global_batch=8, steps=1, mesh="pipeline=2")

    run_ranks(build, 2)


def test_what_nothing_would_read_is_refused_and_not_left_out_in_silence(tmp_path):
    plan = {"mesh": "tensor=2", "global_batch": 8, "micro_batch": 8, "accumulation": 1}
    for change, text in (
        (
            {"model": ["blocks.{0-11}.norm_feed.bias 16"]},
            r"is for another model: it has 'blocks.\{0-11\}.norm_feed.bias",
        ),
        (
            {"mesh": "replicate=2", "micro_batch": 4, "cpu_offload": True},
            "cpu_offload goes with a shard axis, and the mesh",
        ),
    ):
        path = tmp_path / "plan.toml"
        path.write_text(to_toml({**plan, **change}))

        def build(rank, path=path, text=text):
            with pytest.raises(ConfigError, match=text):
                start(gpt_job(), tmp_path / "run", plan=str(path), steps=1)

        run_ranks(build, 2)


def test_a_resolved_plan_names_its_model_and_starts_that_model_again(tmp_path):
    def build(rank):
        run = start(gpt_job(), tmp_path / "first", mesh="tensor=2", global_batch=8, steps=1, precision="fp64")
        plan = run.layout.plan
        run.close()
        assert plan.model[0] == "tokens.weight 61x16" and "blocks.{0-7}.norm_feed.bias 16" in plan.model
        plan.model_copy(update={"precision": "fp32"}).write(tmp_path / f"plan-{rank}.toml")
        again = start(gpt_job(), tmp_path / "second", plan=str(tmp_path / f"plan-{rank}.toml"), steps=1)
        again.close()
        return again.layout.plan.model == plan.model

    assert run_ranks(build, 2) == [True, True]
