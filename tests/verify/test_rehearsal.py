"""One rank of any world, run here: what it holds, sends and computes, as foretold and as on real workers."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.harness import run_ranks
from torch import nn

import shoal
from memory_runs import CASE, MICRO_BATCH, Case, measured
from shoal.core.errors import ConfigError, LaunchError, ModelError
from shoal.job import Loss
from shoal.models.gpt import GPT
from shoal.plan.mesh import Mesh
from shoal.verify.rehearsed_report import Rehearsal
from small_jobs import Rows, job, start


def language(layers: int = 4, rows: int = 4096, vocabulary: int = 64, **more):
    """A small GPT on zeros."""
    return job(
        model=lambda: GPT(vocabulary=vocabulary, width=32, layers=layers, heads=2, context=16),
        data=Rows([(torch.zeros(16, dtype=torch.long),) * 2] * rows),
        loss=lambda output, targets: Loss(
            F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()
        ),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        **more,
    )  # fmt: skip


def traffic(found: Rehearsal, kind: str, axes: str, at: int = 0):
    """(calls, bytes) of a kind of collective along some axes, of a rehearsed rank."""
    rows = [row for row in found.ranks[at].counted.collectives if (row.kind, row.axes) == (kind, axes)]
    return sum(row.count for row in rows), sum(row.bytes for row in rows)


@pytest.mark.unit
def test_the_textbook_plan_of_64_devices_runs_here():
    found = shoal.rehearse(
        language(layers=8), mesh="pipeline=8,replicate=4,tensor=2", schedule="1f1b", micro_batch=2, global_batch=64,
        ranks="0,25,56",
    )  # fmt: skip
    assert [each.rank for each in found.ranks] == [0, 25, 56] and not dist.is_initialized()
    for each in found.ranks:
        assert abs(each.memory_error) < 0.03, each
        groups = {row.axes: row.ranks for row in each.counted.collectives}
        assert groups["pipeline"] == 8 and groups["replicate"] == 4 and groups["tensor"] == 2
        assert groups["pipeline x replicate x tensor"] == 64, "the one sum of a step"
    middle = 1
    block = 8 * 2 * 2 * 16 * 32 * 4  # accumulation x micro-batch x positions x width x 4 bytes, two passes
    assert traffic(found, "all_reduce", "tensor", middle)[1] == pytest.approx(
        found.ranks[middle].said.traffic["tensor"]
    )
    sent, received = traffic(found, "send", "pipeline", middle), traffic(found, "recv", "pipeline", middle)
    assert sent[1] == received[1] == block
    memory = found.ranks[middle].counted.memory
    assert memory["parameters"] == memory["gradients"]
    assert memory["optimizer"] == 2 * memory["gradients"] + 12 * 4, "two moments of Adam, and a counter for each weight"
    assert traffic(found, "all_reduce", "replicate", middle)[1] == found.ranks[middle].counted.memory["gradients"]


#: Mesh, accumulation, other settings, and by how much a foretold peak may differ: where every storage is foretold,
#: by little more than an optimizer's counters, so that no part of a prediction can be wrong by a tenth.
EXACT = 0.002
FORETOLD = [
    ("replicate=2", 2, {"recompute": "full"}, EXACT),
    ("shard=2", 2, {}, EXACT),
    ("shard=2", 2, {"shard_level": 2}, EXACT),
    ("shard=2", 2, {"shard_level": 1}, EXACT),
    ("shard=2", 1, {"precision": "bf16"}, 0.015),
    ("pipeline=2", 4, {"schedule": "1f1b"}, EXACT),
    ("pipeline=2", 4, {"schedule": "zbv", "chunks": 2}, 0.02),
    ("pipeline=2,replicate=2,shard=2", 4, {"schedule": "1f1b"}, EXACT),
    ("pipeline=2,shard=2", 4, {"schedule": "looped-bfs", "chunks": 2}, EXACT),
    ("tensor=2", 1, {"sequence_parallel": True, "recompute": "full"}, EXACT),
    ("replicate=128,shard=4,tensor=2", 1, {}, EXACT),
]


@pytest.mark.unit
@pytest.mark.parametrize(("mesh", "accumulation", "more", "bound"), FORETOLD)
def test_peaks_and_traffic_are_as_foretold(mesh, accumulation, more, bound):
    degrees = Mesh.parse(mesh)
    data = degrees.replicate * degrees.shard
    found = shoal.rehearse(
        language(), mesh=mesh, micro_batch=4, global_batch=4 * accumulation * data, ranks="distinct", **more
    )
    for each in found.ranks:
        assert abs(each.memory_error) < bound, found.lines()
        assert sum(each.counted.memory.values()) == each.counted.peak_bytes
        wide = {axis for axis, degree in degrees.degrees.items() if degree > 1}
        assert wide <= each.said.traffic.keys()
        for axis, nbytes in each.said.traffic.items():
            one_sum = 512 if wide == {axis} else 0  # of a step's figures, over the whole world
            losses = 4096 if axis == "tensor" else 0  # a few figures of each row, and of norms
            assert -losses <= each.traffic(axis) - nbytes <= one_sum + losses, (axis, nbytes, each.traffic(axis))


@pytest.mark.unit
@pytest.mark.parametrize("compress", ["bf16", "int8", "topk:0.01", "powersgd:2"])
def test_what_a_codec_has_at_hand_is_foretold(compress):
    """int8 kept what it had sent and summed until its last collective was unpacked: a peak of 7 % more."""
    (each,) = shoal.rehearse(language(), mesh="replicate=2", micro_batch=4, global_batch=16, compress=compress).ranks
    assert abs(each.memory_error) < 0.01, each


class Tables(nn.Module):
    """Factors of positions [T, D] and of samples [B, 1, 1], for the type of ``x`` [B, T, D]; no parameters."""

    def forward(self, x, *, places):
        angles = torch.arange(x.shape[1])[:, None] / torch.arange(1, x.shape[2] + 1)
        return angles.cos().to(x.dtype), places.float()[:, None, None].exp()


class Turned(nn.Module):
    """A layer whose result is multiplied by what no parameter is in; [B, T, D] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x, tables):
        return x + self.inner(self.norm(x)) * tables[0] * tables[1]


class Turning(nn.Module):
    """Blocks which all take the same tables, of a module that is called with the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tables = nn.Embedding(16, 16), Tables()
        self.blocks = nn.ModuleList(Turned() for _ in range(6))
        self.head = nn.Linear(16, 16)

    def forward(self, ids):
        x = self.words(ids)
        tables = self.tables(x, places=ids[:, 0])
        for block in self.blocks:
            x = block(x, tables)
        return self.head(x)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("pipeline", "bound", "more"),
    [(3, EXACT, {"schedule": "1f1b"}), (2, 0.02, {"schedule": "dualpipev", "chunks": 2})],
)
def test_tables_that_cross_from_stage_to_stage_are_foretold(pipeline, bound, more):
    """What no parameter is in crosses too where a module was asked for it with hidden states: a buffer for each
    micro-batch on every stage, a copy that goes on, and no gradient that comes back."""
    words = job(
        model=Turning, data=Rows([(torch.zeros(24, dtype=torch.long),) * 2] * 64),
        loss=lambda output, targets: Loss(
            F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()
        ),
    )  # fmt: skip
    found = shoal.rehearse(words, mesh=f"pipeline={pipeline}", micro_batch=2, global_batch=8, ranks="distinct", **more)
    for each in found.ranks:
        assert abs(each.memory_error) < bound, found.lines()
        assert abs(each.traffic("pipeline") - each.said.traffic["pipeline"]) <= 1024, "the one sum of a step"


@pytest.mark.unit
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_that_runs_again_sends_again_up_to_the_last_tensor_that_it_keeps(sequence_parallel):
    """torch's checkpoint stops where all that was kept is there again: before the last layer's sum."""
    counted, said = {}, {}
    for recompute in ("none", "selective", "full"):
        found = shoal.rehearse(
            language(layers=2), mesh="tensor=2", micro_batch=4, global_batch=4, recompute=recompute,
            sequence_parallel=sequence_parallel,
        ).ranks[0]  # fmt: skip
        counted[recompute], said[recompute] = found.traffic("tensor"), found.said.traffic["tensor"]
    rows = 4 * 16
    figures = (7 if sequence_parallel else 5) * 4 * rows  # of each row, in the loss over parts of the classes
    assert 0 <= counted["none"] - said["none"] - figures <= 512, "the one sum of a step"
    for recompute in ("selective", "full"):
        assert counted[recompute] - counted["none"] == said[recompute] - said["none"] > 0


@pytest.mark.unit
def test_shared_positions_are_gathered_before_they_go_to_the_next_stage():
    found = shoal.rehearse(
        language(), mesh="pipeline=2,tensor=2", micro_batch=4, global_batch=16, ranks="0", schedule="1f1b",
        sequence_parallel=True,
    ).ranks[0]  # fmt: skip
    gathered = 16 * 16 * 32 * 4  # samples x positions x width x 4 bytes
    assert abs(found.traffic("tensor") - found.said.traffic["tensor"]) < gathered / 8, "norms' gradients"
    assert abs(found.memory_error) < 0.01, found


def partly_frozen() -> nn.Module:
    """A GPT of which the later half and the head are trained."""
    model = GPT(vocabulary=64, width=32, layers=8, heads=2, context=16)
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith(("blocks.4", "blocks.5", "blocks.6", "blocks.7", "norm", "head")))
    return model


@pytest.mark.unit
@pytest.mark.parametrize(
    ("mesh", "bound", "more"),
    [
        ("shard=2", 0.03, {}), ("shard=2", 0.03, {"recompute": "full"}), ("pipeline=2", 0.05, {"schedule": "1f1b"}),
        ("pipeline=2", 0.03, {"schedule": "zbv", "chunks": 2}),
    ],
)  # fmt: skip
def test_frozen_blocks_send_no_gradients_and_are_not_gathered_again(mesh, bound, more):
    """A frozen trunk was foretold to be gathered for a backward that it has none of, or to send gradients back."""
    words = job(
        model=partly_frozen, data=Rows([(torch.zeros(16, dtype=torch.long),) * 2] * 64),
        loss=lambda output, targets: Loss(
            F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()
        ),
    )  # fmt: skip
    found = shoal.rehearse(words, mesh=mesh, micro_batch=2, global_batch=8, ranks="distinct", **more)
    for each in found.ranks:
        axis = mesh.partition("=")[0]
        assert 0 <= each.traffic(axis) - each.said.traffic.get(axis, 0) <= 512, "the one sum of a step"
        assert abs(each.memory_error) < bound, found.lines()
        assert each.said.flops == pytest.approx(each.counted.flops, rel=0.1), "nothing frozen is run again"


@pytest.mark.unit
def test_frozen_blocks_share_positions_before_blocks_that_run_again():
    """What such a block reads and keeps has no gradient: its shape was told as a part's, then as the whole's, and
    checkpointing took that for another forward."""
    words = job(
        model=partly_frozen, data=Rows([(torch.zeros(16, dtype=torch.long),) * 2] * 64),
        loss=lambda output, targets: Loss(
            F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()
        ),
    )  # fmt: skip
    found = shoal.rehearse(
        words, mesh="tensor=2", micro_batch=2, global_batch=4, sequence_parallel=True, recompute="full"
    ).ranks[0]
    assert found.said.flops == pytest.approx(found.counted.flops, rel=0.1)


@pytest.mark.unit
def test_a_rank_of_frozen_weights_alone_has_nothing_for_a_codec():
    words = language()
    words._given["model"] = partly_frozen
    found = shoal.rehearse(
        words, mesh="pipeline=2,replicate=2", micro_batch=2, global_batch=8, compress="bf16", predict=False
    ).ranks[0]
    assert "gradients" not in found.counted.memory


class Convolved(nn.Module):
    """Blocks of a convolution and a joint normalisation; [B, 3, 8, 8] -> [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.unit
@pytest.mark.parametrize("mesh", ["replicate=2", "shard=2"])
def test_statistics_of_all_ranks_keep_no_more_than_those_of_one(mesh):
    pictures = job(
        model=Convolved, data=Rows([(torch.zeros(3, 8, 8), torch.tensor(0))] * 64),
        loss=lambda output, targets: Loss(F.cross_entropy(output, targets, reduction="sum"), len(targets)),
    )  # fmt: skip
    found = shoal.rehearse(pictures, mesh=mesh, micro_batch=8, global_batch=16).ranks[0]
    assert abs(found.memory_error) < 0.005, found


@pytest.mark.unit
@pytest.mark.parametrize("schedule", ["interleaved-zero-bubble", "zbv"])
def test_what_a_loss_keeps_is_given_up_with_the_first_half_of_a_backward(schedule):
    """Exponentials of many classes, which no weight's gradient waits for, must not be counted until the second half;
    nor the gradient of the logits twice."""
    found = shoal.rehearse(
        language(layers=4, vocabulary=512), mesh="pipeline=2", micro_batch=4, global_batch=16, schedule=schedule,
        chunks=2, ranks="distinct",
    )  # fmt: skip
    for each in found.ranks:
        assert abs(each.memory_error) < 0.02, found.lines()


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", ["shard=2", "pipeline=2"])
def test_a_rehearsal_counts_what_real_workers_hold(mesh, tmp_path):
    settings = {"mesh": mesh, "micro_batch": MICRO_BATCH, "global_batch": 2 * MICRO_BATCH}
    settings |= {"schedule": "gpipe"} if mesh == "pipeline=2" else {}
    real = measured(CASE, tmp_path, 2, steps=2, **settings)
    rehearsed = shoal.rehearse(_of(CASE), ranks="0,1", predict=False, **settings)
    for rank, each in enumerate(rehearsed.ranks):
        assert each.counted.peak_bytes == pytest.approx(real[rank].peak, rel=0.01)


def _of(case: Case):
    return job(
        model=case.model, data=Rows(case.rows), loss=case.loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    )  # fmt: skip


@pytest.mark.unit
def test_nothing_is_left_behind():
    before, state = torch.get_float32_matmul_precision(), torch.get_rng_state()
    resize, gather = torch.UntypedStorage.resize_, dist.all_gather_object
    with pytest.raises(ConfigError, match="first micro-batch has 2 samples"):
        shoal.rehearse(language(layers=1, rows=4), mesh="shard=2", micro_batch=4, global_batch=8, predict=False)
    shoal.rehearse(language(layers=1), mesh="shard=2", global_batch=4, predict=False)
    assert not dist.is_initialized() and torch.get_float32_matmul_precision() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.UntypedStorage.resize_ is resize and dist.all_gather_object is gather


class Reads(nn.Module):
    """Control flow that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        made = self.inner(x)
        return made if made.sum() > 0 else -made


class Numbers(nn.Module):
    """Control flow that depends on positions which it numbers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) if (torch.arange(x.shape[1]).diff() == 1).all() else self.inner(x).exp()


@pytest.mark.unit
def test_what_a_model_makes_itself_is_known_in_a_rehearsal():
    found = shoal.rehearse(
        job(
            model=Numbers, data=Rows([(torch.zeros(4), torch.zeros(4))] * 8),
            loss=lambda output, targets: Loss((output - targets).sum(), len(output)),
        ),
        mesh="replicate=2", global_batch=4,
    )  # fmt: skip
    assert found.ranks[0].counted.flops == found.ranks[0].said.flops


@pytest.mark.unit
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda: shoal.rehearse(language(layers=1), mesh="pipeline=16", schedule="gpipe", global_batch=16),
            ConfigError, "16 stages",
        ),
        (
            lambda: shoal.rehearse(language(rows=8), mesh="replicate=4", micro_batch=4, global_batch=16, predict=False),
            ConfigError, "the data's first micro-batch has 2 samples, and the plan's have 4; rehearse with data of",
        ),
        (lambda: shoal.rehearse(language(), mesh="shard=2", rank=2), ConfigError, "rank 2 is not on the mesh"),
        (lambda: shoal.rehearse(language(), rank=0, ranks="0"), ConfigError, "--rank 0 and --ranks 0 were given"),
        (lambda: shoal.rehearse(language(), ranks="all"), ConfigError, "--ranks 'all': it takes the word distinct"),
        (lambda: shoal.rehearse(language(), workers=2), ConfigError, "takes no setting 'workers'; it takes mesh, plan"),
        (
            lambda: shoal.rehearse(
                job(
                    model=Reads, data=Rows([(torch.zeros(4), torch.zeros(4))] * 8),
                    loss=lambda output, targets: Loss((output - targets).sum(), len(output)),
                ),
                mesh="replicate=2", global_batch=4, predict=False,
            ),
            ModelError, "the model, loss or optimizer reads a value .*keep values out of its control flow",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_rehearsed_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()
    assert not dist.is_initialized()


@pytest.mark.unit
def test_a_process_with_a_group_of_its_own_is_refused():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(LaunchError, match="this process has one already; call rehearse.. before"):
            shoal.rehearse(language())
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks
def test_a_run_after_a_rehearsal_in_one_process_is_not_mistaken_for_its_rank(tmp_path):
    """DTensor remembered the rehearsed rank's shapes: the forked workers of a later run both took rank 0's shards."""

    def losses(settings):
        def rank(_):
            run = start(made, tmp_path / str(settings), steps=2, micro_batch=2, **settings)
            found = [run.step(window).loss for window in run.windows()]
            run.close()
            return found

        return run_ranks(rank, 2)[0]

    made = language(rows=8)
    shoal.rehearse(made, mesh="shard=2", micro_batch=2, global_batch=4, predict=False)
    assert losses({"mesh": "shard=2", "global_batch": 4}) == pytest.approx(losses({"global_batch": 4}), rel=1e-5)
