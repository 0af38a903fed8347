"""A job under layouts against one device, on real workers: what is right is equal, what is wrong is found and named."""

import pickle
from pathlib import Path

import pytest

import shoal
from shoal.core.errors import ConfigError, ModelError, NumericsError, WorkerFailure
from shoal.engine.settings import RunSettings
from shoal.launch.jobfile import load_class
from shoal.verify import LayoutResult, Report
from shoal.verify.probe import ProbedEntry

pytestmark = pytest.mark.ranks

JOB = str(Path(__file__).with_name("tied.py"))


def verify(mesh: str | list[str] | None, steps: int = 1, fields: dict | None = None, **more) -> Report:
    settings = {"global_batch": 8, "micro_batch": 2, "steps": steps, **more}
    return shoal.verify(JOB, fields=fields, meshes=mesh, **settings)


def wrong(fault: str, mesh: str = "replicate=2", **more) -> LayoutResult:
    """The one layout's result with a fault in the engine; the run goes through and is found different."""
    report = verify(mesh, fields={"fault": fault, **more.pop("fields", {})}, **more)
    (found,) = report.layouts
    assert not report.ok and found.status == "different"
    return found


def test_right_layouts_are_equal_within_1e_10_in_float64() -> None:
    meshes = ["replicate=2", "pipeline=2", "pipeline=2,replicate=2"]
    report = shoal.verify(JOB, meshes=meshes, global_batch=8, micro_batch=2)
    assert report.ok and [one.mesh for one in report.layouts] == meshes
    for one in report.layouts:
        assert one.status == "equal" and one.first_difference is None and one.reason is None
        assert 0.0 <= one.max_rel_loss < 1e-10 and 0.0 < one.max_rel_grad < 1e-10 and 0.0 < one.max_rel_weight < 1e-10
    assert report.layouts[0].split == {}
    assert 0.8 < report.layouts[1].split["pipeline"] < 0.95, "the tied weight is on both stages"


def test_a_dropped_reduction_is_found_and_named() -> None:
    found = wrong("dropped-reduction")
    assert found.first_difference == "step 1: gradient of 'tokens.weight'"
    assert "not reduced: ranks 0, 1 hold their own shares" in found.reason and "'tokens' (Embedding)" in found.reason


def test_a_halved_gradient_is_found_and_named() -> None:
    found = wrong("halved-gradient")
    assert found.first_difference == "step 1: gradient of 'blocks.0.feed.0.weight'"
    assert "every element is 1/2 of one device's" in found.reason and "(replicate has 2 ranks)" in found.reason
    assert found.max_rel_grad == pytest.approx(0.5) and found.max_rel_loss < 1e-10


def test_a_wrong_divisor_is_found_and_named() -> None:
    assert "wrong divisor: every gradient is 0.5 x" in wrong("wrong-divisor").reason
    found = wrong("wrong-count")
    assert "wrong divisor: each micro-batch's loss is right" in found.reason and found.max_rel_loss == pytest.approx(
        0.5
    )


@pytest.mark.parametrize("mesh", ["replicate=2", "pipeline=2"])
def test_swapped_micro_batches_are_found_and_named(mesh: str) -> None:
    found = wrong("swapped-micro-batches", mesh)
    assert found.reason.startswith("swapped micro-batches: ")
    if mesh == "replicate=2":  # the sums over the window are right: the samples alone tell
        assert found.first_difference == "step 1: sample ids" and found.max_rel_grad < 1e-10


def test_an_untied_weight_is_found_and_named() -> None:
    found = wrong("untied", "pipeline=2")
    assert found.first_difference == "step 1: gradient of 'tokens.weight'"
    assert "not reduced: ranks 0, 1" in found.reason


def test_a_missing_sum_of_key_value_gradients_is_found_and_named() -> None:
    """Query heads on several ranks share a key-value head: its gradient is the sum over them."""
    assert verify("tensor=2", fields={"grouped": True}).ok
    found = wrong("missing-key-value-sum", "tensor=2", fields={"grouped": True})
    assert found.first_difference == "step 1: gradient of 'tokens.weight'" and found.max_rel_loss < 1e-10
    assert found.max_rel_grad > 0.1
    assert "nearest to where backward goes wrong, 'blocks.1.attention.kv." in found.reason
    assert "whose sum is right; a sum over tensor is missing" in found.reason


def test_a_bias_added_twice_is_found_and_named() -> None:
    found = wrong("bias-added-twice", "tensor=2")
    assert found.first_difference == "step 1: gradient of 'blocks.0.attention.out.bias'"
    assert "2 x one device's: summed 2 times (tensor has 2 ranks)" in found.reason


def test_other_faults_are_told_apart() -> None:
    assert "every gradient is 2 x one device's: summed 2 times (replicate has 2 ranks)" in wrong("summed-twice").reason
    part = wrong("part-of-a-gradient")
    assert part.first_difference == "step 1: gradient of 'blocks.1.attention.qkv.weight'"
    assert "only part of the elements differ: 256 of 768, within [16:32, 0:16], which are 2 x" in part.reason
    assert "a sign is wrong" in wrong("wrong-sign").reason
    rate = wrong("other-rate")
    assert rate.first_difference == "step 1: weight of 'tokens.weight'" and "the gradients agree" in rate.reason


def test_the_halved_gradient_is_found_in_low_precision_too_and_rounding_is_not() -> None:
    found = wrong("halved-gradient", precision="bf16")
    assert found.first_difference == "step 1: gradient of 'blocks.0.feed.0.weight'"
    assert "wrong divisor: every gradient is 0.5 x" in wrong("wrong-divisor", precision="fp32").reason
    report = verify("replicate=2", steps=2, precision="fp32")
    assert report.ok and 1e-9 < report.layouts[0].max_rel_grad < 1e-3
    assert any("by moving each weight of the one-device run by 1.2e-07" in note for note in report.notes)
    assert any("6 times what that changed is allowed" in note for note in report.notes)


def test_what_a_model_keeps_between_forwards_is_named_where_data_ranks_make_it_of_other_samples() -> None:
    report = verify(["replicate=2", "pipeline=2"], fields={"running": True})
    found, other = report.layouts
    assert (found.status, other.status) == ("different", "equal")
    assert (
        "the model keeps 'blocks.0.norm_feed.mean' from one forward to the next, which each data rank" in found.reason
    )


def test_a_forward_that_takes_another_path_in_a_stage_is_refused_with_the_engines_own_words() -> None:
    """torch's schedule said instead that a stage had failed, and printed all that it was given."""
    (found,) = verify("pipeline=2", fields={"alternating": True}).layouts
    assert found.status == "refused" and found.reason.startswith("the model's forward came to")


def test_rounding_that_adam_makes_large_is_told_from_a_tiny_mistake() -> None:
    report = verify("replicate=2", steps=2, fields={"shifted": True})
    assert report.ok and report.layouts[0].max_rel_weight > 1e-4, "a weight without a gradient moves by its noise"
    assert any("fp64: what counts as rounding was measured" in note for note in report.notes)
    found = wrong("tiny-error")
    assert found.first_difference == "step 1: gradient of 'blocks.0.feed.0.weight'"
    assert found.max_rel_grad == pytest.approx(1e-7, rel=1e-3)


def test_dropout_has_the_same_masks_in_every_layout_and_that_is_said() -> None:
    """Between blocks too, where a stage skips what others run, and in blocks that are recomputed."""
    report = verify(["replicate=2", "shard=2", "tensor=2", "pipeline=2"], fields={"dropout": 0.1}, recompute="full")
    assert report.ok and len(report.layouts) == 4
    assert all(one.status == "equal" and one.max_rel_grad < 1e-10 for one in report.layouts)
    assert any("dropout has the same masks on both sides" in note for note in report.notes)
    assert "dropout of alpha_dropout is off on both sides: its masks depend on the layout" in report.notes


def test_casts_to_float32_are_lifted_on_both_sides_and_that_is_said() -> None:
    report = verify("pipeline=2", fields={"narrow": True}, recompute="full")
    assert report.ok and report.layouts[0].max_rel_grad < 1e-10
    assert "casts to float32 inside the model are to float64 on both sides" in report.notes
    assert verify("pipeline=2").notes == []


def test_what_the_engine_refuses_is_refused_with_the_reason_and_breaks_nothing() -> None:
    report = shoal.verify(JOB, meshes=["replicate=3", "pipeline=9"], global_batch=8, micro_batch=2, steps=1)
    assert [one.status for one in report.layouts] == ["refused", "refused"] and report.ok
    assert "global batch 8 cannot be cut over 3 workers" in report.layouts[0].reason
    assert "the model has 5 places to cut, 9 stages were asked for" in report.layouts[1].reason
    assert report.layouts[0].max_rel_grad is None
    assert report.verdict == "nothing was compared: 2 of 2 layouts were refused"


@pytest.mark.parametrize(
    ("fault", "text"),
    [("crash", "ValueError: this layout goes wrong"), ("killed", "rank 1 of 2 was killed by signal 9 (SIGKILL)")],
)
def test_a_layout_that_breaks_is_an_error_with_its_end(fault: str, text: str, capfd: pytest.CaptureFixture) -> None:
    report = verify("replicate=2", fields={"fault": fault})
    assert not report.ok and report.layouts[0].status == "error" and text in report.layouts[0].reason
    assert capfd.readouterr().err == ""


def test_a_job_that_does_not_run_on_one_device_says_so() -> None:
    with pytest.raises(WorkerFailure, match="(?s)does not run on one device.*nothing to compare with.*too narrow"):
        verify("replicate=2", fields={"broken": True})


def test_a_model_that_draws_random_numbers_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'?blocks.1.feed.2.? \(Noisy\) draws random numbers in forward.*switches it"):
        verify("replicate=2", fields={"noisy": True})


def test_every_way_to_lay_out_a_world_is_run() -> None:
    report = shoal.verify(JOB, world=2, global_batch=8, micro_batch=2, steps=1)
    assert {one.mesh for one in report.layouts} == {"pipeline=2", "replicate=2", "shard=2", "tensor=2"}
    by_mesh = {one.mesh: one for one in report.layouts}
    assert by_mesh["pipeline=2"].status == by_mesh["replicate=2"].status == "equal"


def test_a_plan_is_verified_in_the_precision_asked_for(tmp_path: Path) -> None:
    from shoal.plan.plan import Mesh, Plan

    file = tmp_path / "plan.toml"
    Plan(
        mesh=Mesh(pipeline=2),
        schedule="gpipe",
        precision="bf16",
        global_batch=8,
        micro_batch=2,
        accumulation=4,
        clip=0.1,
    ).write(file)
    report = shoal.verify(JOB, plan=str(file), steps=1)
    assert report.ok and report.layouts[0].mesh == "pipeline=2" and report.layouts[0].max_rel_grad < 1e-10


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "one of --mesh, --plan and --world, found none of them"),
        ({"meshes": "replicate=2", "world": 2}, "found --mesh and --world"),
        ({"meshes": "replicate=2", "out": "x"}, "verify takes no setting 'out'"),
        ({"meshes": "tensr=2"}, "did you mean 'tensor'"),
        ({"world": 0}, "a world has at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(asked: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        shoal.verify(JOB, **asked)


def test_a_world_that_others_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="in a world that torchrun or SLURM set up; run it without"):
        shoal.verify(JOB, world=2)


def test_a_job_object_is_verified_and_fresh_workers_can_be_sent_what_a_probe_needs(tmp_path: Path) -> None:
    made = load_class(JOB)(tied=False)
    report = shoal.verify(made, meshes="pipeline=2", global_batch=8, micro_batch=2, steps=1)
    assert report.ok and report.layouts[0].split == {"pipeline": 1.0}
    entry = ProbedEntry(made, RunSettings(), True, True, None, str(tmp_path), 0.5, "cpu")
    sent = pickle.loads(pickle.dumps(entry))
    assert (sent.folder, sent.unit, sent.device) == (str(tmp_path), 0.5, "cpu") and sent.job.tied is False


def test_steps_that_cannot_be_applied_leave_nothing_to_compare() -> None:
    with pytest.raises(NumericsError, match="on one device no step could be applied .*nothing to compare"):
        verify("replicate=2", fields={"infinite": True})


def test_fields_go_with_a_file_only() -> None:
    class Mine(shoal.Job):
        pass

    with pytest.raises(ConfigError, match="was given a job and fields"):
        shoal.verify(Mine(), fields={"a": 1}, world=2)
