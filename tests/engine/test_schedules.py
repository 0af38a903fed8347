"""Learning rates: steps are optimizer steps, whatever the workers, and what a resumed run is told."""

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import Rows, Scalar, classes_loss, job, mlp, mlp_rows, sgd, start
from torch.optim import lr_scheduler

from shoal import Loss
from shoal.core.errors import ConfigError
from shoal.engine.record import read_json
from shoal.monitor.events import read_events

pytestmark = pytest.mark.ranks


def rates(out, ranks, lr, schedule, rows=24, **settings):
    """The rates used, of each rank."""
    settings = {"global_batch": 4, "micro_batch": 1, **settings}

    def body(rank):
        made = job(model=mlp, data=mlp_rows(rows), loss=classes_loss, optimizer=sgd(lr), lr_schedule=schedule)
        run = start(made, out, **settings)
        found = [run.step(window).lr for window in run.windows()]
        run.close()
        return found, run.schedule.lr

    return run_ranks(body, ranks)


def test_one_bad_evaluation_cuts_a_plateau_schedule_once(tmp_path):
    """The schedule was stepped once per process: the rate was cut by factor^W.

    https://github.com/huggingface/accelerate/issues/3797
    """
    held_out = Rows([(torch.tensor(float(i)), 0) for i in range(4)])  # each rank's own loss differs

    def body(rank):
        made = job(
            model=Scalar, data=held_out, eval_data=held_out, loss=lambda out, y: Loss(out.sum(), len(out)),
            optimizer=sgd(0.5),
            lr_schedule=lambda optimizer, steps: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        )  # fmt: skip
        run = start(made, tmp_path, steps=1, global_batch=4)
        found = []
        for _ in range(3):
            run.evaluate()
            found.append(run.schedule.lr)
        run.close()
        return found

    assert run_ranks(body, 4) == [[0.5, 0.25, 0.125]] * 4


def test_a_fixed_length_schedule_holds_its_last_rate(tmp_path):
    """A schedule stepped past its end raised near the last step.

    https://github.com/huggingface/accelerate/issues/843 https://github.com/huggingface/accelerate/pull/484
    """

    def schedule(optimizer, steps):
        assert steps == 8
        return lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=steps)

    ((found, after),) = rates(tmp_path, 1, 0.4, schedule, rows=10, global_batch=3, epochs=2)
    assert len(found) == 8
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    plain = lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=8)
    wanted = []
    for step in range(8):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < 7:
            plain.step()
    assert found == wanted
    assert after == wanted[-1] < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_chained_schedules_step_as_in_plain_pytorch(tmp_path, ranks):
    """Warm-up then decay mis-stepped when wrapped. https://github.com/huggingface/accelerate/issues/3875"""

    def chained(optimizer, steps):
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 12)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    plain = chained(optimizer, 16)
    wanted = []
    for _ in range(16):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plain.step()
    for found, _ in rates(tmp_path, ranks, 0.4, chained, steps=16):
        assert found == wanted


@pytest.mark.parametrize("kind", ["none", "function", "scheduler"])
def test_a_new_rate_on_resume_is_used_and_said(tmp_path, kind):
    """On resume a newly given rate was silently ignored, or silently used.

    https://github.com/huggingface/transformers/issues/9099 https://github.com/alex-hh/profam/pull/483
    """
    schedules = {
        "none": None,
        "function": lambda optimizer, steps: lambda step: 0.5**step,
        "scheduler": lambda optimizer, steps: lr_scheduler.ExponentialLR(optimizer, 0.5),
    }
    wanted = [0.01, 0.01] if kind == "none" else [0.01 * 0.5**2, 0.01 * 0.5**3]

    def part(lr, steps, **settings):
        def body(rank):
            notes = []
            made = job(model=mlp, data=mlp_rows(8), loss=classes_loss, optimizer=sgd(lr), lr_schedule=schedules[kind])
            run = start(made, tmp_path, notes.append, steps=steps, global_batch=4, **settings)
            found = [run.step(window).lr for window in run.windows()]
            run.save()
            run.close()
            return found, notes

        return run_ranks(body, 1)[0]

    part(0.1, 2)
    found, notes = part(0.01, 4, resume=True)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert any("lr was 0.1 and is now 0.01; the new value is used" in note for note in notes)


def test_workers_change_neither_rate_nor_global_batch_and_the_record_says_both(tmp_path):
    """Adding processes multiplied the batch, and steps per epoch shrank without a word.

    https://github.com/huggingface/accelerate/pull/1013
    """
    for ranks in (1, 2, 4):
        for global_batch, micro in ((8, 2), (4 * ranks, 4)):
            out = tmp_path / f"{ranks}-{micro}"
            asked = {"rows": 64, "global_batch": global_batch, "micro_batch": micro, "epochs": 1}
            for found, _ in rates(out, ranks, 0.1, None, **asked):
                assert found == [0.1] * (64 // global_batch)
            record = read_json(out / "run.json")
            assert record["batch"] == {
                "global_batch": global_batch, "micro_batch": micro, "ranks": ranks,
                "accumulation": global_batch // micro // ranks,
            }  # fmt: skip
            assert record["windows_per_epoch"] == 64 // global_batch
            assert record["workers"] == ranks


def test_rates_are_scaled_by_the_batch_where_asked_and_that_is_said(tmp_path):
    """The rate was scaled with the workers, or not, depending on the layer, without a word.

    https://github.com/huggingface/accelerate/pull/1013
    """
    schedules = {
        "none": None,
        "function": lambda optimizer, steps: lambda step: 0.5**step,
        "scheduler": lambda optimizer, steps: lr_scheduler.ExponentialLR(optimizer, 0.5),
    }
    for ranks in (1, 2, 4):
        for kind, schedule in schedules.items():
            out = tmp_path / f"{ranks}-{kind}"
            asked = {"rows": 64, "global_batch": 4 * ranks, "micro_batch": 4, "steps": 2}
            for found, _ in rates(out, ranks, 0.1, schedule, lr_scaling="linear", base_batch=4, **asked):
                assert found == pytest.approx([0.1 * ranks, 0.1 * ranks * (1 if kind == "none" else 0.5)], rel=1e-12)
            record = read_json(out / "run.json")
            assert record["lr_factor"] == ranks
            assert (record["settings"]["lr_scaling"], record["settings"]["base_batch"]) == ("linear", 4)
            said = [row["text"] for row in read_events(out, 0, "note") if "learning rate" in row["text"]]
            assert said == ([f"learning rate x {ranks} (linear, global batch / base batch): 0.1 -> {0.1 * ranks:g}"]
                            if ranks > 1 else [])  # fmt: skip


def test_scaled_rates_are_taken_up_on_resume_as_they_were(tmp_path):
    """https://github.com/huggingface/accelerate/pull/1013"""

    def part(steps, **settings):
        def body(rank):
            made = job(model=mlp, data=mlp_rows(16), loss=classes_loss, optimizer=sgd(0.1))
            run = start(made, tmp_path, steps=steps, global_batch=8, lr_scaling="linear", base_batch=4, **settings)
            found = [run.step(window).lr for window in run.windows()]
            run.save()
            run.close()
            return found

        return run_ranks(body, 1)[0]

    assert part(2) + part(4, resume=True) == [0.2] * 4


@pytest.mark.parametrize(
    ("schedule", "settings", "said"),
    [
        (None, {"lr_scaling": "linear"}, "lr_scaling linear was asked for without base_batch"),
        (None, {"base_batch": 4}, "base_batch 4 without lr_scaling does nothing; add --lr-scaling linear"),
        (
            lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=steps),
            {"lr_scaling": "linear", "base_batch": 4}, "OneCycleLR sets the rates it was given whatever",
        ),
        ("before", {"lr_scaling": "linear", "base_batch": 4}, "a scheduler over this optimizer exists already"),
    ],
)  # fmt: skip
def test_a_scaling_that_would_not_hold_is_refused(tmp_path, schedule, settings, said):
    """https://github.com/huggingface/accelerate/pull/1013"""

    def optimizer(model):
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        if schedule == "before":
            lr_scheduler.ExponentialLR(made, 0.5)
        return made

    def body(rank):
        made = job(model=mlp, data=mlp_rows(8), loss=classes_loss, optimizer=optimizer)
        if callable(schedule):
            made._given["lr_schedule"] = schedule
        with pytest.raises(ConfigError, match=said):
            start(made, tmp_path, steps=1, global_batch=8, **settings)

    run_ranks(body, 1)
