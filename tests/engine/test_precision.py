"""Mixed precision: wide weights and state, autocast over forward and loss alone, dynamic loss scaling."""

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import Rows, Scalar, classes_loss, job, mlp, mlp_rows, sgd, start
from torch import nn

from shoal import Loss
from shoal.engine.precision import Precision

pytestmark = pytest.mark.ranks

ONES = Rows([(torch.tensor(1.0), 0)] * 4)


def mean(output, targets):
    return Loss(output.sum(), len(output))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_skipped_step_leaves_the_scaler_able_to_go_on(tmp_path, precision):
    """A skipped step left the scaler in a state where the next unscale raised.

    https://github.com/Haian-Jin/LVSM/pull/19
    """

    def body(rank):
        made = job(model=Scalar, data=ONES, loss=mean, optimizer=sgd(0.1))
        run = start(made, tmp_path, steps=4, global_batch=4, micro_batch=2, precision=precision)
        applied, scales, values = [], [], []
        for number, window in enumerate(run.windows()):
            run.job._given["loss"] = (lambda out, y: Loss(out.sum() * float("inf"), len(out))) if number == 1 else mean
            applied.append(run.step(window).applied)
            scales.append(run.scaler.scale)
            values.append(run.model.weight.item())
        run.close()
        return applied, scales, values

    for applied, scales, values in run_ranks(body, 2):
        assert applied == [True, False, True, True]
        assert values == pytest.approx([0.9, 0.9, 0.8, 0.7])
        if precision == "fp16":
            assert scales == [scales[0], scales[0] / 2, scales[0] / 2, scales[0] / 2]
            assert scales[0] > 1


def test_scale_and_growth_counter_survive_a_checkpoint(tmp_path):
    """The loss scale was not in the checkpoint: resume began at the default and skipped good steps.

    https://github.com/PolymathicAI/the_well/issues/77
    """

    def save(rank):
        run = start(job(model=Scalar, data=ONES, loss=mean, optimizer=sgd(0.1)), tmp_path, steps=1, global_batch=4,
                    precision="fp16")  # fmt: skip
        for window in run.windows():
            run.step(window)
        run.scaler.scale, run.scaler.good_steps = 1024.0, 7
        run.save()
        run.close()

    def load(rank):
        run = start(job(model=Scalar, data=ONES, loss=mean, optimizer=sgd(0.1)), tmp_path, steps=2, global_batch=4,
                    precision="fp16", resume=True)  # fmt: skip
        found = run.scaler.scale, run.scaler.good_steps
        for window in run.windows():
            run.step(window)
        run.close()
        return found, (run.scaler.scale, run.scaler.good_steps)

    run_ranks(save, 1)
    assert run_ranks(load, 1) == [((1024.0, 7), (1024.0, 8))]


def test_small_updates_reach_weights_that_were_given_in_bfloat16(tmp_path):
    """In bfloat16 weights, updates below half a spacing vanish: norm weights stayed at 1.0 for ever.

    https://github.com/vllm-project/speculators/pull/765 https://github.com/workofart/ml-by-hand/pull/85
    https://github.com/meta-pytorch/torchtune/issues/2254
    """

    def body(rank):
        notes = []
        run = start(
            job(model=lambda: Scalar(1.0, torch.bfloat16), data=ONES, loss=mean, optimizer=sgd(1e-3)),
            tmp_path, notes.append, steps=100, global_batch=4, precision="bf16",
        )  # fmt: skip
        for window in run.windows():
            run.step(window)
        run.close()
        return run.model.weight.dtype, run.model.weight.item(), run.model.weight.bfloat16().item(), notes

    dtype, master, copy, notes = run_ranks(body, 1)[0]
    assert dtype == torch.float32
    assert master == pytest.approx(0.9, abs=1e-5)
    assert copy == 0.8984375
    assert any("weights kept as float32 masters: weight (bfloat16)" in note for note in notes)


def test_adam_moments_are_float32(tmp_path):
    """Adam's moments took bfloat16 from the weights, and small squares were lost.

    https://github.com/NVIDIA-NeMo/Automodel/pull/2248
    """

    def body(rank):
        run = start(
            job(
                model=lambda: Scalar(1.0, torch.bfloat16), data=ONES, loss=mean,
                optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.999)),
            ),
            tmp_path, steps=400, global_batch=4, precision="bf16",
        )  # fmt: skip
        for window in run.windows():
            run.step(window)
        run.close()
        state = run.optimizer.optimizer.state[run.model.weight]
        return state["exp_avg"].dtype, state["exp_avg_sq"].dtype, state["exp_avg_sq"].item()

    first, second, value = run_ranks(body, 1)[0]
    assert first == second == torch.float32
    assert value == pytest.approx(1 - 0.999**400, rel=1e-4)


def test_autocast_covers_forward_and_loss_alone(tmp_path):
    """Backward and optimizer ran inside autocast.

    https://github.com/pytorch/pytorch/issues/120376
    """

    def body(rank):
        seen = {}

        def note(where):
            seen[where] = torch.is_autocast_enabled("cpu")

        class Probe(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = mlp()

            def forward(self, x):
                note("forward")
                y = self.inner(x)
                seen["dtype"] = y.dtype
                y.register_hook(lambda grad: note("backward"))
                return y

        def loss(output, targets):
            note("loss")
            return classes_loss(output.float(), targets)

        def optimizer(model):
            made = torch.optim.SGD(model.parameters(), lr=0.1)
            made.register_step_pre_hook(lambda *_: note("optimizer"))
            return made

        run = start(job(model=Probe, data=mlp_rows(4), loss=loss, optimizer=optimizer), tmp_path, steps=1,
                    global_batch=4, precision="bf16")  # fmt: skip
        for window in run.windows():
            run.step(window)
        run.close()
        return seen

    assert run_ranks(body, 1)[0] == {
        "forward": True, "loss": True, "backward": False, "optimizer": False, "dtype": torch.bfloat16
    }  # fmt: skip


def test_float16_finds_its_scale_and_then_trains(tmp_path):
    """A loss scale that overflows is halved until steps are applied; skipping so does not end the run."""

    def body(rank):
        run = start(job(model=mlp, data=mlp_rows(64), loss=classes_loss, optimizer=sgd(0.05)), tmp_path, steps=40,
                    global_batch=8, precision="fp16", max_skips=2)  # fmt: skip
        run.scaler.scale, run.scaler.fitted = 2.0**40, True
        done = [run.step(window) for window in run.windows()]
        run.close()
        return [report.applied for report in done], run.scaler.scale, done[-1].loss

    for applied, scale, loss in run_ranks(body, 2):
        first = applied.index(True)
        assert first >= 8
        assert all(applied[first:])
        assert scale == 2.0 ** (40 - first)
        assert loss < 1.5


class Turns(nn.Module):
    """A complex weight, made in single precision, as Fourier layers have them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 2j], dtype=torch.complex64))

    def forward(self, x):
        return (x * self.weight).abs()


def test_fp64_keeps_the_imaginary_parts_of_weights_and_inputs(tmp_path):
    def body(rank):
        rows = Rows([(torch.tensor([3 + 4j], dtype=torch.complex64), 0)] * 4)
        run = start(job(model=Turns, data=rows, loss=mean), tmp_path, steps=1, global_batch=4, precision="fp64")
        (told,) = [run.step(window) for window in run.windows()]
        run.close()
        return told.loss, run.model.weight.dtype

    loss, dtype = run_ranks(body, 1)[0]
    assert dtype is torch.complex128
    assert loss == pytest.approx(5 * 5**0.5, rel=1e-14)


@pytest.mark.unit
@pytest.mark.parametrize("recomputes", [False, True])
def test_cast_weights_are_not_kept_where_blocks_are_recomputed(recomputes):
    """Autocast's cache would hold a copy of every weight until the forward's end: as much as recomputing saves."""
    weight = nn.Parameter(torch.ones(4, 4))
    with Precision("bf16", "cpu", recomputes).forward():
        first, second = (torch.mm(torch.ones(1, 4), weight).grad_fn for _ in range(2))
        assert torch.is_autocast_cache_enabled() is not recomputes
    casts = [one.next_functions[1][0] for one in (first, second)]
    assert (casts[0] is casts[1]) is not recomputes


@pytest.mark.unit
def test_evaluation_keeps_no_cast_weights():
    """Sharded weights are gathered unit by unit, and copies of all of them would lie here at its end."""
    with torch.no_grad(), Precision("bf16", "cpu").forward():
        assert not torch.is_autocast_cache_enabled()
