"""Faults that pipelines elsewhere had: varying shapes, objects among the inputs, mixed labels, one stage's overflow."""

import pytest
import torch
from tests.harness import run_ranks
from tests.parallel.test_meshes import summed, trained, uneven_rows
from tests.small_jobs import LM, Rows, error, job, sgd, start
from torch import nn

from shoal import Loss
from shoal.core.errors import ConfigError
from shoal.engine.resolve import resolve
from shoal.engine.settings import RunSettings
from shoal.plan.messages import AHEAD

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2))


def rows(number: int, longest: int = 12) -> Rows:
    """Tokens and targets of 4 to ``longest`` positions."""
    lengths = [4 + 5 * place % (longest - 3) for place in range(number)]
    whole = uneven_rows(number, longest).samples
    return Rows([(x[:length] % 37, y[:length] % 37) for (x, y), length in zip(whole, lengths, strict=True)])


def padded(samples):
    """Samples of several lengths as one batch of the longest; what is added does not count."""
    x, y = zip(*samples, strict=True)
    return (
        nn.utils.rnn.pad_sequence(x, batch_first=True),
        nn.utils.rnn.pad_sequence(y, batch_first=True, padding_value=-100),
    )


@pytest.mark.ranks
def test_every_micro_batch_may_have_another_shape_in_training_and_evaluation(tmp_path):
    """Buffers were made for the first batch: another number or length of samples failed.

    https://github.com/deepspeedai/DeepSpeed/issues/3045 https://github.com/deepspeedai/DeepSpeed/issues/5696
    """
    made = job(model=LM, data=rows(11), eval_data=rows(7), loss=summed, optimizer=sgd(0.1), collate=padded)
    expected = trained(made, tmp_path / "alone", 1, 3, micro_batch=2)
    found = trained(made, tmp_path / "staged", 2, 3, micro_batch=2, mesh="pipeline=2")
    assert found[0] == [pytest.approx(told, rel=1e-10) for told in expected[0]]
    assert found[1] == pytest.approx(expected[1], rel=1e-10) and error(found[2], expected[2]) < 1e-10


@pytest.mark.ranks
def test_outputs_meet_the_targets_of_their_own_micro_batch(tmp_path):
    """An output was compared with the labels of another micro-batch where shapes vary. Here also: what leaves a stage
    may be a view.

    https://github.com/deepspeedai/DeepSpeed/issues/5729
    """

    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(1, 1), nn.Identity()) for _ in range(4)])
            for layer in self.layers:
                nn.init.ones_(layer[0].weight)
                nn.init.zeros_(layer[0].bias)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x[..., None])[..., 0]
            return x

    samples = Rows([(torch.full((3 + n % 4,), float(n)), torch.full((3 + n % 4,), n)) for n in range(16)])

    def run(rank):
        found = {}
        for schedule, chunks in SCHEDULES:
            seen = []

            def loss(output, targets, seen=seen):
                seen.extend(zip(output.detach()[:, 0].tolist(), targets[:, 0].tolist(), strict=True))
                return Loss((output * 0).sum(), 1)

            made = job(model=Same, data=samples, loss=loss, optimizer=sgd(1.0), collate=padded)
            begun = start(
                made, tmp_path / schedule, global_batch=8, micro_batch=2, steps=2, mesh="pipeline=2",
                schedule=schedule, chunks=chunks,
            )  # fmt: skip
            for window in begun.windows():
                begun.step(window)
            begun.close()
            found[schedule] = seen
        return found

    every = run_ranks(run, 2)
    for schedule, _ in SCHEDULES:
        pairs = [pair for each in every for pair in each[schedule]]
        assert sorted(round(target) for _, target in pairs) == list(range(16))
        assert all(output == target for output, target in pairs), schedule


class Wanted:
    """An object among the inputs."""

    def __init__(self, places):
        self.places = places


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])

    def forward(self, x, wanted, nothing=None, times=1):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) * times if nothing is None else x
            x = torch.where(torch.tensor(wanted.places, device=x.device), x, 0.5 * x)
        return x


@pytest.mark.ranks
def test_inputs_that_are_no_tensors_pass_through_every_schedule(tmp_path):
    """Objects, None and numbers among the inputs broke schedules that split the backward.

    https://github.com/pytorch/torchtitan/issues/3584
    """

    def inputs(batch):
        x, y = batch
        return {"x": x, "wanted": Wanted([True, False] * 4), "nothing": None, "times": 3}, y

    generator = torch.Generator().manual_seed(3)
    data = Rows([(torch.randn(8, generator=generator), torch.tensor(n % 8)) for n in range(16)])
    made = job(model=Takes, data=data, loss=cross, optimizer=sgd(0.1), inputs=inputs, eval_data=data)
    expected = trained(made, tmp_path / "alone", 1, 2, micro_batch=2)
    for schedule, chunks in SCHEDULES:
        found = trained(
            made, tmp_path / schedule, 2, 2, micro_batch=2, mesh="pipeline=2", schedule=schedule, chunks=chunks
        )
        assert found[0] == [pytest.approx(told, rel=1e-10) for told in expected[0]], schedule
        assert error(found[2], expected[2]) < 1e-10, schedule


def cross(output, targets):
    return Loss(nn.functional.cross_entropy(output, targets, reduction="sum"), len(targets))


@pytest.mark.ranks
def test_an_overflow_on_one_stage_is_skipped_and_halves_the_scale_on_all(tmp_path):
    """The scale of fp16 did not reach the backward inside of the schedule, and stages disagreed on an overflow.

    https://github.com/pytorch/torchtitan/issues/803
    """
    made = job(model=LM, data=rows(16), loss=summed, optimizer=sgd(0.1), collate=padded)

    def run(rank):
        begun = start(made, tmp_path, global_batch=8, micro_batch=2, steps=2, precision="fp16", mesh="pipeline=2")
        seen = []
        held = [param for param in begun.model.parameters() if not param.is_meta]
        held[0].register_hook(lambda grad: seen.append(float(grad.abs().max())))
        windows = begun.windows()
        begun.step(next(windows))
        scale = begun.scaler.scale
        if rank == 0:
            held[0].register_hook(lambda grad: grad * float("inf"))
        before = [param.detach().clone() for param in held]
        told = begun.step(next(windows))
        kept = all(torch.equal(a, b) for a, b in zip(before, held, strict=True))
        begun.close()
        return told.applied, scale, begun.scaler.scale, kept, max(seen)

    every = run_ranks(run, 2)
    scale = every[0][1]
    assert scale > 1 and [each[:4] for each in every] == [(False, scale, scale / 2, True)] * 2
    assert every[0][4] > scale / 10, "the gradients in the schedule are of the scaled loss"


@pytest.mark.unit
def test_a_batch_that_micro_batches_do_not_divide_is_refused_with_both_numbers():
    """Stages disagreed on shapes, or the samples of a short micro-batch weighed more.

    https://github.com/pytorch/pytorch/issues/126600
    """
    with pytest.raises(ConfigError, match="global batch 8 cannot be cut over .* micro-batch 3: .*; use a global batch"):
        resolve(RunSettings(global_batch=8, micro_batch=3, mesh="pipeline=2"), 2)


@pytest.mark.ranks
@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved-zero-bubble", 1), ("zbv", 2)])
def test_a_stage_behind_frozen_ones_learns_where_backwards_come_in_halves(tmp_path, schedule, chunks):
    """No input needs a gradient there: torch's halves found no weight's gradient, and nothing said so."""

    def half_frozen():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(4)))
        model[:2].requires_grad_(False)
        return model

    def losses(workers, **layout):
        def rank(_):
            torch.manual_seed(0)
            run = start(made, tmp_path / f"{workers}", steps=4, epochs=4, micro_batch=2, global_batch=8, **layout)
            found = [run.step(window).loss for window in run.windows()]
            run.close()
            return found

        return run_ranks(rank, workers)[0]

    samples = Rows([(torch.tensor([float(place)]), torch.tensor([float(place % 3)])) for place in range(8)])
    made = job(
        model=half_frozen, data=samples, loss=lambda o, t: Loss(((o - t) ** 2).sum(), len(o)), optimizer=sgd(0.1)
    )
    alone = losses(1)
    assert losses(2, mesh="pipeline=2", schedule=schedule, chunks=chunks) == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0]


@pytest.mark.ranks
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_over_gloo_receives_are_posted_before_they_are_needed(tmp_path, schedule, chunks):
    """A gradient only began to come back when the forward's values before it were through a slow link."""

    def rank(_):
        made = job(model=LM, data=rows(16), loss=summed, optimizer=sgd(0.1), collate=padded)
        settings = {"mesh": "pipeline=2", "schedule": schedule, "chunks": chunks, "micro_batch": 2, "global_batch": 8}
        run = start(made, tmp_path, steps=1, **settings)
        for window in run.windows():
            run.step(window)
        runtimes = list(run.forwards.pipeline._runtimes.values())
        run.close()
        return [
            [action.computation_type.name for action in actions]
            for runtime in runtimes
            for actions in runtime.pipeline_order_with_comms.values()
        ]

    for kinds in run_ranks(rank, 2)[0]:
        first = [kind.startswith("RECV") for kind in kinds[: min(AHEAD, sum("RECV" in kind for kind in kinds))]]
        assert first and all(first), kinds


class Aside(nn.Module):
    """What its third layer takes without a gradient is made before the first."""

    def __init__(self):
        super().__init__()
        self.first, self.aside = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])

    def forward(self, x):
        x = self.first(x)
        aside = self.aside(x)
        for number, layer in enumerate(self.layers):
            x = layer(x) + aside.detach() if number == 2 else layer(x)
        return x


@pytest.mark.ranks
def test_a_gradient_that_does_not_come_about_on_the_same_rank_counts_as_zeros(tmp_path):
    """Stages next to each other on one rank hand gradients over without a buffer that could be zeroed."""
    generator = torch.Generator().manual_seed(3)
    data = Rows([(torch.randn(8, generator=generator), torch.tensor(n % 8)) for n in range(16)])
    made = job(model=Aside, data=data, loss=cross, optimizer=sgd(0.1))
    expected = trained(made, tmp_path / "alone", 1, 2, micro_batch=2)
    found = trained(made, tmp_path / "zbv", 2, 2, micro_batch=2, mesh="pipeline=2", schedule="zbv", chunks=2)
    assert found[0] == [pytest.approx(told, rel=1e-10) for told in expected[0]]
    assert error(found[2], expected[2]) < 1e-10


class Skips(nn.Module):
    """A U-net in little: what leaves a stage its own backward needs too, be it a residual or a Tanh's result."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.up = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])

    def forward(self, x):
        kept = []
        for layer in self.down:
            kept.append(x := layer(x))
        for layer in self.up:
            x = layer(x + kept.pop())
        return x


@pytest.mark.ranks
@pytest.mark.parametrize(("schedule", "chunks"), [("zbv", 2), ("dualpipev", 2), ("interleaved-zero-bubble", 2)])
def test_what_leaves_a_stage_may_be_needed_by_its_own_backward(tmp_path, schedule, chunks):
    """Backwards in halves detach in place what left, which the weights' half could then not use."""
    generator = torch.Generator().manual_seed(3)
    data = Rows([(torch.randn(8, generator=generator), torch.tensor(n % 8)) for n in range(16)])
    made = job(model=Skips, data=data, loss=cross, optimizer=sgd(0.1))
    expected = trained(made, tmp_path / "alone", 1, 2, micro_batch=2)
    found = trained(made, tmp_path / schedule, 2, 2, micro_batch=2, mesh="pipeline=2", schedule=schedule, chunks=chunks)
    assert found[0] == [pytest.approx(told, rel=1e-10) for told in expected[0]]
    assert error(found[2], expected[2]) < 1e-10
