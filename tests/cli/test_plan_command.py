"""``shoal plan``: what it prints, what it refuses, and that a saved blueprint needs no torch."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.blueprint.facts import Kept, Storage
from shoal.blueprint.stored import Sketch
from shoal.core.errors import ConfigError, WorkerFailure
from shoal.launch import planning
from shoal.launch.answer import Planned, answer
from shoal.launch.automatic import TOGETHER
from shoal.launch.comparing import Trial, cost_lines, scaled, trial_lines, tried
from shoal.launch.planning import Extras, checked, find_cluster, more, plan, shared
from shoal.launch.sketch import sketch_of
from shoal.plan import explain, scale
from shoal.plan.mesh import Mesh

pytestmark = pytest.mark.unit

JOB = """
from typing import ClassVar
import torch, shoal
from shoal.models.gpt import GPT

class Job(shoal.Job):
    defaults: ClassVar[dict] = {"global_batch": 16, "clip": 1.0}
    layers: int = 4
    reads: bool = False

    def model(self):
        model = GPT(256, 64, self.layers, 4, 32)
        if self.reads:
            plain = model.forward
            def forward(ids):
                if float(ids.float().sum()) < 0:
                    return plain(ids * 0)
                return plain(ids)
            model.forward = forward
        return model

    def data(self):
        ids = torch.arange(64 * 33).reshape(64, 33) % 256
        return torch.utils.data.TensorDataset(ids[:, :-1], ids[:, 1:])

    def loss(self, output, targets):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters())
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    (folder / "planned.py").write_text(JOB)
    sketch_of(str(folder / "planned.py"), {}).write(folder / "blueprint.json")
    return folder


@pytest.fixture(scope="module")
def planned(saved: Path) -> Planned:
    return plan(blueprint=str(saved / "blueprint.json"), cluster="a100-80gb", world=4)


def small(saved: Path, gib: float, world: int = 4, batch: int | None = None) -> Planned:
    """The job on devices with little memory."""
    found = find_cluster("a100-80gb", None)
    device = found.device.model_copy(update={"memory_bytes": int(gib * 2**30), "reserved_bytes": 0})
    whole = found.model_copy(update={"device": device})
    return answer(Sketch.read(saved / "blueprint.json"), whole.resized(world), batch, whole=whole)


def comparison(planned: Planned, *files: str) -> list[str]:
    """What is said of two plans' files beside each other."""
    return more(planned, Extras(compare=files), None, {}).lines[1:]  # type: ignore[arg-type]


def test_a_sketch_is_read_as_it_was_written(saved: Path) -> None:
    made = sketch_of(str(saved / "planned.py"), {})
    assert Sketch.read(saved / "blueprint.json") == made
    read = Sketch.read(saved / "blueprint.json").blueprint
    assert read.timeline is not None and isinstance(read.timeline.storages[0], Storage)
    assert isinstance(next(op for op in read.operations if op.kept).kept[0], Kept)
    assert made.optimizer_bytes == 8
    assert made.global_batch == 16 and made.clip == 1.0 and made.dataset_samples == 64


def test_a_saved_blueprint_is_planned_without_torch(saved: Path) -> None:
    script = (
        "import sys\nfrom shoal.cli import app\n"
        "try:\n    app(['plan', '--blueprint', 'blueprint.json', '--cluster', 'h100', '--world', '8', '--json'])\n"
        "except SystemExit as done:\n    print('status', done.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=saved, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "status 0 False", done.stderr
    told = json.loads(done.stdout.splitlines()[-2])
    assert told["best"][0]["plan"]["global_batch"] == 16
    assert told["best"][0]["step_s"] == pytest.approx(sum(told["best"][0]["parts"].values()))


def test_the_page_says_what_was_chosen_and_why(planned: Planned) -> None:
    page = "\n".join(planned.lines())
    for words in (
        "planned.Job",
        "global batch of 16",
        "MFU",
        "step ",
        "memory ",
        "binds",
        "Runner-up",
        "All ranks one",
    ):
        assert words in page


def test_the_best_plan_is_one_that_a_run_takes(planned: Planned, saved: Path) -> None:
    planned.plan.write(saved / "best.toml")
    made = type(planned.plan).read(saved / "best.toml")
    made.fits(4)
    assert made.clip == 1.0


def test_the_call_beside_the_command(saved: Path) -> None:
    assert shoal.plan(blueprint=str(saved / "blueprint.json"), cluster="h100", world=2).plan.mesh.size == 2


def test_nothing_fits_and_the_smallest_change_is_said(saved: Path) -> None:
    found = small(saved, 0.0001)
    assert not found.best
    text = "\n".join(found.sentences())
    assert "No plan fits: the least that any needs is" in text and "The smallest change that fits" in text
    with pytest.raises(ConfigError, match="No plan fits"):
        _ = found.plan


def test_more_devices_are_named_where_they_would_fit(saved: Path) -> None:
    one = small(saved, 80, world=1).best[0].memory.total_bytes
    least = small(saved, 0.0001, world=1).search.least()
    assert least is not None and least[1].total_bytes < one
    found = small(saved, least[1].total_bytes / 0.95 / 2**30 * 0.99, world=1)
    assert not found.best
    assert "devices instead of 1" in "\n".join(found.sentences())


def test_the_change_that_is_named_fits_and_no_smaller_one_does(saved: Path) -> None:
    """Memory was rounded down, so that what was named did not fit; 8 devices were named where 6 would do."""
    sketch = Sketch.read(saved / "blueprint.json")
    least = small(saved, 0.0001, world=1).search.least()
    assert least is not None
    found = small(saved, least[1].total_bytes / 0.95 / 2**30 * 0.15, world=1, batch=12)
    named = re.search(r"fits: (\d+) devices instead of 1 .*or devices of ([\d.]+) GiB", "\n".join(found.sentences()))
    assert named is not None
    fitting = [world for world in range(1, 9) if answer(sketch, found.whole.resized(world), 12).best]  # type: ignore
    assert int(named[1]) == min(fitting) == 6
    assert small(saved, float(named[2]), world=1, batch=12).best


def test_more_devices_come_in_the_nodes_that_the_cluster_has(saved: Path) -> None:
    """--world 4 --scale 8,64 took the four devices for a node, and so on 64 for 16 nodes."""
    path, page = str(saved / "blueprint.json"), Extras(scale="64")
    few = plan(blueprint=path, cluster="h100", world=4, global_batch=64)
    own = plan(blueprint=path, cluster="h100", world=64, global_batch=64)
    assert more(few, page, None, {}).lines == more(own, page, None, {}).lines
    assert more(few, page, None, {}).values["scale"][0]["step_s"] == own.best[0].cost.step_s


def test_a_model_that_cannot_be_traced_gets_layouts_that_need_no_trace(saved: Path) -> None:
    sketch = sketch_of(str(saved / "planned.py"), {"reads": True})
    found = answer(sketch, find_cluster("h100", 4))
    assert {(f.candidate.mesh.pipeline, f.candidate.mesh.tensor) for f in found.best} == {(1, 1)}
    page = "\n".join(found.lines())
    assert "Not known: the model cannot be traced" in page


def test_of_a_model_that_cannot_be_traced_no_speed_price_or_scaling_is_said(saved: Path) -> None:
    """Its traffic alone was said to be the step: 2.9 million samples a second, and 99% of the step bound by sums."""
    reads = sketch_of(str(saved / "planned.py"), {"reads": True})
    cluster = find_cluster("h100", None)
    found = answer(reads, cluster.resized(4), whole=cluster)
    told = more(found, Extras(scale="4,8", price=2.0), None, {})
    page = "\n".join([*found.lines(), *told.lines])
    assert "over 0." in page and "known: step" in page and "Ranked by what is known without a trace" in page
    assert "binds" not in page and "Scaling" not in page and "per epoch" not in page
    assert "What a run costs is not known" in page and "How it scales is not known" in page
    assert [each["samples_per_s"] for each in (found.as_json()["best"][0], told.values["scale"][0])] == [None, None]
    assert told.values["price"] is None and told.values["scale"][0]["efficiency"] is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "give one of them"),
        ({"blueprint": "nowhere.json", "cluster": "h100"}, "cannot be read as a blueprint"),
        ({"blueprint": "blueprint.json", "cluster": "h1000"}, "no preset 'h1000'; did you mean"),
        ({"blueprint": "blueprint.json", "cluster": "h100", "precision": "bf16"}, "was traced in fp32"),
        (
            {"blueprint": "blueprint.json", "cluster": "h100", "precision": "fp99"},
            "none that is run; did you mean 'fp64'",
        ),
        ({"blueprint": "planned.py", "cluster": "h100"}, "is no blueprint"),
        ({"blueprint": "old.json", "cluster": "h100"}, "of format 0, and this version reads"),
        (
            {"blueprint": "batch.json", "cluster": "h100"},
            "batch.json: global_batch = -3 .*greater than or equal to 1; give",
        ),
        ({"blueprint": "samples.json", "cluster": "h100"}, "samples.json is no blueprint: ValueError: samples = 0"),
        ({"blueprint": "blueprint.json", "cluster": "h100", "world": 12}, "ask for whole nodes"),
    ],
)
def test_bad_input_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch, given: dict, words: str) -> None:
    monkeypatch.chdir(saved)
    values = json.loads((saved / "blueprint.json").read_text())
    (saved / "old.json").write_text(json.dumps({**values, "format": 0}))
    (saved / "batch.json").write_text(json.dumps({**values, "global_batch": -3}))
    (saved / "samples.json").write_text(json.dumps({**values, "blueprint": {**values["blueprint"], "samples": 0}}))
    with pytest.raises(ConfigError, match=words):
        plan(**given)


def test_no_plan_divides_a_batch_that_is_too_small(saved: Path) -> None:
    sketch = Sketch.read(saved / "blueprint.json").model_copy(update={"global_batch": 1})
    found = answer(sketch, find_cluster("h100", 128))
    assert not found.best and "No plan divides: 128 ranks cannot share out" in "\n".join(found.sentences())


def test_two_plans_are_held_against_each_other(planned: Planned, saved: Path) -> None:
    names = []
    for found in planned.best[:2]:
        names.append(str(saved / f"{len(names)}.toml"))
        planned.as_plan(found.candidate).write(names[-1])
    text = "\n".join(comparison(planned, *names))
    assert f"{names[0]} is faster" in text and "mesh: " in text
    wrong = planned.plan.model_copy(update={"cuts": ("nowhere",), "schedule": "1f1b"})
    wrong = wrong.model_copy(update={"mesh": wrong.mesh.model_copy(update={"pipeline": 2, "replicate": 2, "shard": 1,
                                                                        "tensor": 1}), "accumulation": 8,
                                     "micro_batch": 1, "chunks": 1})  # fmt: skip
    wrong.write(saved / "wrong.toml")
    with pytest.raises(ConfigError, match="cut before 'nowhere', where the model has no place to cut"):
        comparison(planned, names[0], str(saved / "wrong.toml"))


def test_plans_that_are_compared_say_for_which_batch_and_precision(planned: Planned) -> None:
    one = planned.plan
    other = one.model_copy(update={"global_batch": 2 * one.global_batch})
    assert shared((one, one), "global_batch", None) == one.global_batch
    assert shared((one, other), "global_batch", None) is None and shared((), "precision", None) is None
    assert shared((one, one), "global_batch", 7) == 7


def test_a_job_that_imports_what_is_not_here_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text("import nowhere_to_be_found.really\n")
    with pytest.raises(ConfigError, match=r"needs.py imports nowhere_to_be_found, which is not here; install it"):
        sketch_of(str(tmp_path / "needs.py"), {})
    (tmp_path / "part.py").write_text("import json.nowhere\n")  # no package that could be installed
    with pytest.raises(ModuleNotFoundError):
        sketch_of(str(tmp_path / "part.py"), {})


def test_a_mesh_that_is_asked_for_is_planned_alone(saved: Path) -> None:
    asked = {"blueprint": str(saved / "blueprint.json"), "cluster": "a100-80gb", "world": 8}
    text = "\n".join(plan(mesh="shard=2,tensor=4", **asked).lines())
    assert "1  shard=2,tensor=4" in text and "2  shard=2,tensor=4" in text
    assert "Plain data parallel" not in text
    assert "The fastest of all meshes is " in text and "shard=2,tensor=4, " in text.split("fastest of")[1]
    best = plan(**asked).best[0].candidate.mesh
    assert "No other mesh is faster." in plan(mesh=str(best), **asked).sentences()


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("pipeline=3", "pipeline=3 makes 3 ranks, and there are 8 workers"),
        ("context=2", "sequences cannot be split over ranks yet; leave context out"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(saved: Path, mesh: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(blueprint=str(saved / "blueprint.json"), cluster="a100-80gb", world=8, mesh=mesh)


def test_a_tensor_mesh_of_a_model_that_cannot_be_traced_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be traced, and tensor ranks need its trace; choose another degree"):
        plan(str(saved / "planned.py"), fields=["reads=True"], cluster="a100-80gb", world=8, mesh="tensor=2")


def test_a_mesh_that_divides_or_fits_nothing_is_told_with_what_would(planned: Planned, saved: Path) -> None:
    odd = answer(planned.sketch, planned.cluster, 7, mesh=Mesh(replicate=4))
    assert "No plan divides with mesh replicate=4: 4 ranks cannot share out a global batch of 7" in odd.sentences()[0]
    tight = small(saved, 0.003)
    tight = answer(planned.sketch, tight.cluster, mesh=Mesh(replicate=4))
    assert tight.sentences()[0].startswith("No plan with mesh replicate=4 fits: the least that any needs is ")
    assert "The smallest change that fits: another mesh, " in tight.sentences()[1]


def test_the_curve_over_devices_and_its_picture(planned: Planned, saved: Path) -> None:
    points = scaled(planned.sketch, find_cluster("a100-80gb", None), [2, 8, 16, 32], None)
    text = "\n".join(scale.lines(points, planned.work, planned.cluster))
    assert "Scaling" in text and "100%" in text
    more(planned, Extras(scale="2,8", scale_plot=str(saved / "s.html"), timeline=str(saved / "t.html")), None, {})
    assert "<svg" in (saved / "s.html").read_text() and "<svg" in (saved / "t.html").read_text()


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        (Extras(scale="8,x"), "give numbers of devices between commas"),
        (Extras(mesh="tensor=2", scale="8"), "--mesh tensor=2 with --scale, which has meshes of its own"),
        (Extras(scale_plot="a.html"), "without --scale"),
        (Extras(scale="8", scale_plot="a.txt"), "is no kind of picture"),
        (Extras(timeline="a.txt"), "end the name in .html or .svg for a picture, or in .json for a trace"),
        (Extras(trials=2), "a saved blueprint is none"),
        (Extras(compare=("gone.toml", "gone.toml")), "gone.toml cannot be read as a plan"),
        (Extras(price=-1.0), "--price -1 is no price of a device-hour; give a number above 0"),
        (Extras(price=math.nan), "--price nan is no price"),
    ],
)
def test_bad_extras_are_refused(planned: Planned, extras: Extras, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked(extras, None)  # before minutes of planning
    with pytest.raises(ConfigError, match=words):
        more(planned, extras, None, {})


@pytest.mark.parametrize("name", ["global_batch", "top", "world"])
@pytest.mark.parametrize("value", [0, -3])
def test_numbers_below_one_are_refused(saved: Path, name: str, value: int) -> None:
    """A global batch of 0 was taken for the job's own; no plans to show ended in a traceback."""
    with pytest.raises(ConfigError, match=f"{name} = {value}; give 1 or more"):
        plan(blueprint=str(saved / "blueprint.json"), cluster="h100", **{name: value})  # pyright: ignore


def test_files_that_cannot_be_written_are_refused(planned: Planned, tmp_path: Path) -> None:
    """A traceback."""
    (tmp_path / "file").write_text("")
    for write in (planned.plan.write, planned.sketch.write):
        with pytest.raises(ConfigError, match="file/x cannot be written: .*; name a file in a folder that is there"):
            write(tmp_path / "file" / "x")


def test_plain_values_say_all_that_the_page_does(planned: Planned, saved: Path) -> None:
    """--json left out what --scale, --price and --compare had been asked for."""
    planned.plan.write(saved / "same.toml")
    asked = Extras(compare=(str(saved / "same.toml"), str(saved / "same.toml")), scale="4,104", price=2.5)
    values = json.loads(json.dumps(more(planned, asked, None, {}).values, allow_nan=False))
    best = planned.found_json(planned.best[0])
    point, missing = values["scale"]
    assert (missing["world"], missing["efficiency"]) == (104, None) and "nothing fits" in missing["why"]
    assert (point["world"], point["efficiency"]) == (4, 1) and {**point, **best} == point
    assert values["compare"] == [best, best]
    assert values["price"]["per_billion_tokens"] == pytest.approx(1e9 / best["tokens_per_s"] / 3600 * 4 * 2.5)
    assert values["price"]["per_epoch"] == pytest.approx(64 / best["samples_per_s"] / 3600 * 4 * 2.5)


def test_compared_plans_are_read_and_priced_once(
    planned: Planned, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for the lines and once for --json; each file was read three times."""
    names = []
    for found in planned.best[:2]:
        names.append(str(saved / f"once{len(names)}.toml"))
        planned.as_plan(found.candidate).write(names[-1])
    counts = Counter[str]()

    def counting(kind: str, call: Any) -> Any:
        def counted(*args: Any) -> Any:
            counts[kind] += 1
            return call(*args)

        return counted

    monkeypatch.setattr(planning.Plan, "read", counting("read", planning.Plan.read))
    monkeypatch.setattr(planning, "priced", counting("priced", planning.priced))
    more(planned, checked(Extras(compare=(names[0], names[1])), None), None, {})
    assert counts == {"read": 2, "priced": 2}


@pytest.mark.parametrize(
    ("extras", "named"),
    [
        (Extras(scale="8", scale_plot="gone/s.html"), "gone/s.html cannot be written: No such file or directory"),
        (Extras(timeline="gone/t.html"), "gone/t.html cannot be written: No such file or directory"),
        (Extras(out="file/p.toml"), "file/p.toml cannot be written: Not a directory"),
        (Extras(save_blueprint="folder"), "folder cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extras: Extras, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=f"{named}; name a file in a folder that is there"):
        checked(extras, None)
    good = Extras(scale="8", scale_plot="s.html", timeline="t.json", out="new/p.toml", save_blueprint="new/b.json")
    assert checked(good, None) == good and {each.name for each in tmp_path.iterdir()} == {"file", "folder"}


def test_a_plan_that_was_made_for_something_else_is_not_compared(planned: Planned, saved: Path) -> None:
    """A plan in bf16 was said to take as long as in fp32, one for another model was priced on this one."""
    planned.plan.write(saved / "one.toml")
    for change, words in (
        ({"precision": "bf16"}, "computes in bf16, and this was planned in fp32; plan the job with --precision bf16"),
        ({"model": ("x 4x4",)}, "is for another model: it has 'x 4x4' where this model has 'tokens.weight 256x64'"),
    ):
        planned.plan.model_copy(update=change).write(saved / "two.toml")
        with pytest.raises(ConfigError, match=words):
            comparison(planned, str(saved / "one.toml"), str(saved / "two.toml"))


def test_plans_of_different_batches_are_compared_by_samples(planned: Planned, saved: Path) -> None:
    """The plan of the smaller batch was said to be faster, as its step is."""
    plain = next(found for found in planned.best if found.candidate.mesh.pipeline == 1)
    plan = planned.as_plan(plain.candidate)
    plan.write(saved / "one.toml")
    larger = {"micro_batch": 4 * plan.micro_batch, "global_batch": 4 * plan.global_batch}
    plan.model_copy(update=larger).write(saved / "two.toml")
    one, two = str(saved / "one.toml"), str(saved / "two.toml")
    *_, verdict, first, second = comparison(planned, one, two)
    assert re.fullmatch(
        rf"{two} is faster; [\d,]+ samples/s, and {one} [\d,]+\. Their steps are of other batches\.", verdict
    )
    assert first.startswith("global_batch") and second.startswith("micro_batch")


def test_numbers_of_devices_that_the_cluster_cannot_have_are_a_row_of_the_curve(planned: Planned) -> None:
    """They ended the command after all else had been worked out."""
    points = scaled(planned.sketch, find_cluster("h100", None), [4, 12], None)
    assert points[0].found is not None and points[1].found is None
    assert "asked for 12 devices, and a node has 8; ask for whole nodes: 8 or 16" in points[1].why


def test_a_plan_compared_with_itself_is_said_to_be_the_same(planned: Planned, saved: Path) -> None:
    planned.plan.write(saved / "one.toml")
    planned.plan.write(saved / "two.toml")
    told = comparison(planned, str(saved / "one.toml"), str(saved / "two.toml"))
    assert told[-1] == f"{saved / 'one.toml'} and {saved / 'two.toml'} hold the same plan."
    assert len(told) == 8 and told[1].startswith("1 ")
    other = planned.plan.model_copy(update={"clip": 2.0})  # costs the same
    other.write(saved / "two.toml")
    *_, verdict, difference = comparison(planned, str(saved / "one.toml"), str(saved / "two.toml"))
    assert "is as good as equal" in verdict and verdict.endswith(").") and difference == "clip: 1.0 -> 2.0"


def test_the_cost_of_a_billion_tokens_is_devices_times_time(planned: Planned) -> None:
    rate = explain.rates(planned.best[0].candidate, planned.best[0].cost.step_s, planned.work).tokens_per_s
    expected = 1e9 / rate / 3600 * 4 * 2.5
    first, epoch = cost_lines(planned, 2.5)
    assert f"{expected:,.2f} per billion tokens" in first
    assert "epoch of 64 samples" in epoch


def test_trials_correct_the_plans_that_were_not_run(planned: Planned) -> None:
    """The first turns out three times as slow as predicted in its compute: all others are corrected by that."""
    ran = []

    def run(made):
        ran.append(made)
        cost = planned.best[len(ran) - 1].cost
        factor = 3.0 if len(ran) == 1 else 1.0
        parts = {name: factor * sum(getattr(cost, part) for part in of) for name, of in TOGETHER.items()}
        return {**parts, "step_s": sum(parts.values())}

    trials, ranked = tried(planned, 1, run, TOGETHER)
    assert len(trials) == len(ran) == 1 and isinstance(trials[0], Trial)
    believed = {id(found): step for found, step in ranked}
    for found in planned.best:
        assert believed[id(found)] == pytest.approx(3 * found.cost.step_s, rel=0.05)
    assert "ranked anew" in "\n".join(trial_lines(trials, ranked))


def test_as_many_trials_run_as_were_asked_for_and_what_does_not_run_is_left_out(planned: Planned) -> None:
    """A plan that failed ended the command, and what had been measured before it was lost."""
    ran = []

    def run(made):
        ran.append(made)
        if len(ran) == 2:
            raise WorkerFailure("training ended with status 1")
        return {**dict.fromkeys(TOGETHER, 1e-9), "step_s": 1e-9 * len(ran)}

    trials, ranked = tried(planned, 3, run, TOGETHER)
    assert len(ran) == 3 and [bool(trial.why) for trial in trials] == [False, True, False]
    assert len(ranked) == len(planned.best) - 1
    first, second, third, ranking = trial_lines(trials, ranked)
    assert first.startswith("ran ") and third.startswith("ran ")
    assert second.startswith("did not run: ") and second.endswith(": training ended with status 1")
    assert explain.layout(trials[1].found.candidate) + " " not in ranking
