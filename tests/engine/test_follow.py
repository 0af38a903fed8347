"""A plan's file goes before the job's own defaults, not before what was typed; which won is said."""

import json
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import ConfigError
from shoal.core.fields import Text
from shoal.engine.resolve import gave_way, resolve
from shoal.launch.jobfile import make_settings, origins
from shoal.plan.mesh import Mesh
from shoal.plan.plan import Plan
from small_jobs import Given, Rows, sgd

pytestmark = pytest.mark.unit


class Own(shoal.Job):
    """A job with defaults of its own."""

    defaults: ClassVar[dict] = {
        "global_batch": 32, "micro_batch": 16, "precision": "bf16", "clip": 1.0, "mesh": "tensor=2", "steps": 9,
        "lr_scaling": "linear", "base_batch": 8,
    }  # fmt: skip


@pytest.fixture
def plan(tmp_path: Any) -> Any:
    made = Plan(mesh=Mesh(replicate=2), global_batch=64, micro_batch=8, accumulation=4)
    made.write(tmp_path / "plan.toml")
    return tmp_path / "plan.toml"


def test_the_jobs_defaults_give_way_to_a_plan(plan: Any) -> None:
    settings = make_settings(Own, {"plan": str(plan)})
    assert resolve(settings, 2) == Plan.read(plan)
    assert (settings.global_batch, settings.precision, settings.mesh, settings.steps) == (64, "fp32", None, 9)
    assert settings.lr_factor == 8, "learning rates go by the batch that is trained"


def test_what_was_typed_must_agree_with_the_plan(plan: Any) -> None:
    agreed = make_settings(Own, {"plan": str(plan), "global_batch": Text("64"), "clip": Text("none")})
    assert resolve(agreed, 2) == Plan.read(plan)
    typed = make_settings(Own, {"plan": str(plan), "global_batch": Text("32"), "precision": Text("bf16")})
    with pytest.raises(
        ConfigError, match=r"decides precision bf16 \(the plan: fp32\), global_batch 32 \(the plan: 64\);"
    ):
        resolve(typed, 2)
    with pytest.raises(ConfigError, match="--mesh tensor=2 and --plan .* were given; give one of them"):
        resolve(make_settings(Own, {"plan": str(plan), "mesh": "tensor=2"}), 2)


def test_a_mesh_that_was_typed_goes_before_the_jobs_own_plan(plan: Any) -> None:
    class Planned(Own):
        defaults: ClassVar[dict] = {"plan": str(plan), "global_batch": 8}

    assert make_settings(Planned, {}).global_batch == 64
    settings = make_settings(Planned, {"mesh": Text("shard=2")})
    assert (settings.plan, settings.mesh, settings.global_batch) == (None, "shard=2", 8)


def test_which_won_is_said(plan: Any) -> None:
    assert gave_way(Plan.read(plan), "p.toml", Own.defaults) == [
        "p.toml decides global_batch 64 (the job's own: 32), micro_batch 8 (the job's own: 16), precision fp32 (the "
        "job's own: bf16), clip off (the job's own: 1.0), mesh replicate=2 (the job's own: tensor=2)"
    ]
    assert gave_way(Plan.read(plan), "p.toml", {"global_batch": 64, "steps": 3}) == []
    found = origins(Own(), (), {"plan", "clip"}, make_settings(Own, {"plan": str(plan)}))["settings"]
    assert [found[name] for name in ("plan", "clip", "global_batch", "mesh", "steps")] == [
        "given", "given", "plan", "plan", "job",
    ]  # fmt: skip


def test_a_resumed_run_keeps_what_its_plan_decided(plan: Any, tmp_path: Any) -> None:
    """It was refused for the job's own batch, which nobody had asked for again."""
    begun = make_settings(Own, {"plan": str(plan)})
    origin = origins(Own(), (), {"plan"}, begun)
    record = {"settings": begun.model_dump(mode="json"), "origins": origin}
    (tmp_path / "run.json").write_text(json.dumps(record))
    again = make_settings(Own, {"out": str(tmp_path), "resume": True})
    assert (again.global_batch, again.precision, again.clip) == (64, "fp32", None)
    assert origins(Own(), (), {"out", "resume"}, again)["settings"]["global_batch"] == "plan", "for the next time"
    typed = make_settings(Own, {"out": str(tmp_path), "resume": True, "precision": Text("bf16")})
    assert (typed.global_batch, typed.precision) == (64, "bf16")


class Small(Given):
    """A linear layer with a default of its own."""

    defaults: ClassVar[dict] = {"global_batch": 32}


def test_a_rehearsal_says_it_and_takes_the_plans_batch(plan: Any) -> None:
    made = Small()
    made._given = {
        "model": lambda: nn.Linear(2, 1), "data": Rows([(torch.zeros(2), torch.zeros(1))] * 64),
        "loss": nn.functional.mse_loss, "optimizer": sgd(1.0),
    }  # fmt: skip
    found = shoal.rehearse(made, plan=str(plan))
    assert found.plan.global_batch == 64
    told = f"{plan} decides global_batch 64 (the job's own: 32)"
    assert f"note: {told}" in found.lines() and told in found.as_json()["ranks"][0]["notes"]
