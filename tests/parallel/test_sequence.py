"""Positions shared out between tensor regions (sequence parallelism): a run computes what one process computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.harness import run_ranks
from tests.parallel.test_meshes import alone, gpt_job, trained
from tests.small_jobs import Rows, error, job, start
from tests.tensor_cases import FAMILIES, OWN, cross_entropy, family, ids
from tests.tensor_training import Case, built, found_roles, hold, train
from tests.zoo import cells as zoo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shoal.blueprint.positions import shared_positions
from shoal.blueprint.split import Split
from shoal.core.errors import ConfigError
from shoal.models import GPT
from shoal.parallel.tensor.apply import Layout, apply
from shoal.parallel.tensor.moves import Group, part_of
from shoal.parallel.tensor.part import marked

pytestmark = pytest.mark.ranks

LAYOUTS = [
    (2, {"mesh": "tensor=2", "micro_batch": 2}),
    (3, {"mesh": "tensor=3", "micro_batch": 8, "recompute": "selective"}),
    pytest.param(4, {"mesh": "pipeline=2,tensor=2", "micro_batch": 1}, marks=pytest.mark.nightly),
    (4, {"mesh": "shard=2,tensor=2", "micro_batch": 1, "recompute": "full"}),
    pytest.param(
        8,
        {"mesh": "pipeline=2,shard=2,tensor=2", "micro_batch": 1, "schedule": "zbv", "chunks": 2, "recompute": "full"},
        marks=pytest.mark.nightly,
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("one-process")


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=lambda value: str(value).replace("'", ""))
def test_a_layout_computes_what_one_process_does(folder, tmp_path, ranks, layout):
    """Tied weights of a prime vocabulary, uneven counts, accumulation, 16 positions over 3 ranks."""
    losses, evaluated, weights = alone(folder)
    found = trained(gpt_job(), tmp_path, ranks, sequence_parallel=True, **layout)
    for mine, other in zip(found[0], losses, strict=True):
        assert mine == pytest.approx(other, rel=1e-10)
    assert found[1] == pytest.approx(evaluated, rel=1e-10)
    assert error(found[2], weights) < 1e-10


@pytest.mark.parametrize("layout", ["pipeline=2,tensor=2", pytest.param("shard=2,tensor=2", marks=pytest.mark.nightly)])
def test_a_llama_under_hybrid_layouts(folder, tmp_path, layout):
    """Grouped heads, norms that are products with a weight, a rotary table; whole runs with casts lifted to float64."""
    pytest.importorskip("transformers")
    expected = zoo.alone("llama", folder / "llama")
    given = {
        "mesh": layout,
        "micro_batch": zoo.MICRO_BATCH // (2 if "shard" in layout else 1),
        "sequence_parallel": True,
    }
    every = run_ranks(lambda rank: zoo.trained("llama", tmp_path, **given), 4, 120)
    assert zoo.difference(every, expected) < 1e-10


FEW = ("llama", "gpt2", "hf vit")
#: Its norms add up gradients in float32 even in a float64 model, over other positions on each rank.
NARROW = ("gemma",)
MORE = [pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES if name not in (*FEW, *NARROW)]


@pytest.mark.parametrize("name", [*FEW, *MORE])
def test_models_that_nobody_rewrote_train_as_on_one_process(name):
    """Also where rows are sequences one after the other, and where a class token is read at the end."""
    pytest.importorskip("transformers")
    _, _, gathers = hold(family(name), 2, sequence=True)
    assert set(gathers) == ({"getitem"} if name == "hf vit" else set())


def test_recomputed_blocks_of_a_llama_are_exact():
    """What a block was given in forward is a part in its recomputation too."""
    pytest.importorskip("transformers")

    def recomputing():
        model = family("llama").model()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    hold(family("llama")._replace(model=recomputing), 2, sequence=True)


@pytest.mark.parametrize("name", [*list(OWN)[1:2], *(pytest.param(n, marks=pytest.mark.nightly) for n in OWN)])
def test_our_models_train_as_on_one_process(name):
    hold(OWN[name], 4, sequence=True)


def shared_out(case: Case, degree: int) -> tuple[nn.Module, Layout]:
    blueprint, found = found_roles(case, degree)
    model, mesh = built(case), init_device_mesh("cpu", (degree,), mesh_dim_names=("tensor",))
    return model, apply(model, blueprint, found, mesh, shared_positions(blueprint, found).layers)


def test_norms_are_alike_on_all_ranks_after_training():
    """Their gradients are of a rank's positions alone until they are summed over the group.

    https://github.com/NVIDIA/Megatron-LM/issues/1446 https://github.com/EleutherAI/gpt-neox/pull/1257
    https://github.com/NVIDIA/TransformerEngine/issues/435
    """
    wanted = train(OWN["gpt"], built(OWN["gpt"]))

    def rank(rank):
        model, layout = shared_out(OWN["gpt"], 2)
        train(OWN["gpt"], model, layout)
        return {n: p.detach() for n, p in model.named_parameters() if layout.split(n) is None}

    first, second = run_ranks(rank, 2)
    assert {"blocks.0.norm_feed.weight", "blocks.0.norm_feed.bias", "blocks.1.feed.2.bias"} <= first.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert error(first, {name: wanted.weights[name] for name in first}) < 1e-10


def test_a_region_gathers_once_and_scatters_once_each_way():
    """Two blocks of two regions, a table and a head; sums of norms' gradients, and of the loss, are small."""
    pytest.importorskip("transformers")
    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")

    def rank(rank):
        case = family("llama")
        model, _ = shared_out(case, 2)
        calls, real = [], {name: getattr(dist, name) for name in names}
        for name in names:
            setattr(
                dist, name, lambda *args, name=name, **kw: (calls.append((name, args[0])), real[name](*args, **kw))[1]
            )
        try:
            loss = case.loss(model(**case.inputs()))
            forward, calls[:] = calls[:], []
            loss.backward()
        finally:
            for name in names:
                setattr(dist, name, real[name])
        return [[sum(name == other for other, _ in some) for name in names] for some in (forward, calls)], [
            int(t.numel()) for name, t in (*forward, *calls) if name == "all_reduce"
        ]

    for counts, summed in run_ranks(rank, 2):
        forward, backward = counts
        assert forward == [2 * 2 + 1, 2 * 2 + 1, 3]
        assert backward == [2 * 2 + 1, 2 * 2 + 1, 2 * 2 + 1 + 1]
        assert max(summed) <= 3 * 2 * 8  # a norm's weight, or a few figures of each token; the stream has 2 * 8 * 32


@pytest.mark.parametrize("length", [7, 1])
def test_positions_that_do_not_divide_are_exact(length):
    """Seven positions over two ranks are four and three; a single one, as of a run's short samples, stays whole."""
    case = Case(lambda: GPT(64, 32, 2, 4, 16), ids, cross_entropy)
    short = case._replace(inputs=lambda: {"ids": ids()["ids"][:, :length]})
    wanted = train(short, built(case))

    def rank(rank):
        model, layout = shared_out(case, 2)
        return error(train(short, model, layout).weights, wanted.weights)

    assert max(run_ranks(rank, 2)) < 1e-10


class Mixing(nn.Module):
    """Blocks that add up along the positions what they read: their stream is read whole in each."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 16)
        self.up, self.down = (nn.ModuleList(nn.Linear(*s) for _ in range(2)) for s in ((16, 32), (32, 16)))
        self.head = nn.Linear(16, 64)

    def forward(self, ids):
        x = self.tokens(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x.cumsum(1)).relu())
        return self.head(x)


def test_a_stream_that_is_read_whole_stays_whole_and_is_exact():
    case = Case(Mixing, ids, cross_entropy)
    blueprint, found = found_roles(case, 2)
    shared = shared_positions(blueprint, found)
    assert shared.layers.keys() == {"down.1.weight"}
    assert shared.reasons["down.0.weight"] == "its output is read whole by cumsum in the model"
    hold(case, 2, sequence=True)


def test_values_are_added_in_place_to_what_is_whole():
    """What is whole stays so: the positions are gathered first."""

    def rank(rank):
        group, split = Group(dist.group.WORLD, 2, rank), Split(1, (5,))
        whole = torch.arange(10.0).view(2, 5)
        stream = torch.ones(2, 5)
        stream += marked(part_of(whole, split, group).clone(), split, group)
        return torch.equal(stream, whole + 1), group.gathers

    assert run_ranks(rank, 2) == [(True, {"add": 1})] * 2


def rows_job(model):
    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randn(4, generator=generator), 1) for _ in range(8)]
    return job(model=model, data=Rows(rows), loss=nn.functional.cross_entropy)


def test_a_model_without_positions_is_refused(tmp_path):
    def build(rank):
        mlp = lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
        with pytest.raises(ConfigError, match=r"tensor=2 \(2.weight: no dimension of positions is known in its output"):
            start(rows_job(mlp), tmp_path, mesh="tensor=2", global_batch=4, steps=1, sequence_parallel=True)

    run_ranks(build, 2)


def test_what_stays_whole_is_told(tmp_path):
    pytest.importorskip("transformers")
    made = job(
        model=lambda: family("hf vit").model(),
        data=Rows([({"pixel_values": torch.rand(1, 8, 8)}, 1) for _ in range(4)]),
        loss=lambda output, targets: nn.functional.cross_entropy(output.logits, targets),
    )

    def notes(rank):
        told = []
        start(made, tmp_path, told.append, mesh="tensor=2", global_batch=4, steps=1, sequence_parallel=True)
        return told

    assert any("all positions are gathered for getitem in the model" in note for note in run_ranks(notes, 2)[0])
