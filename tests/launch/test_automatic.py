"""A run that names no layout: what is decided, what is refused, what a resumed run keeps, what is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.cluster import cached
from shoal.cluster.facts import Cluster, Device, Link
from shoal.core.errors import ConfigError
from shoal.engine.settings import RunSettings
from shoal.job import Job
from shoal.launch import automatic, measure
from shoal.launch.automatic import Decision, account, decide, learn, read_ratios
from shoal.models.gpt import GPT
from shoal.monitor.events import EventLog
from shoal.monitor.summary import summary
from shoal.plan.candidate import Candidate, Cost, Memory
from shoal.plan.mesh import Mesh
from shoal.plan.plan import Plan
from shoal.plan.search import Found

pytestmark = pytest.mark.unit


class Reads(nn.Module):
    """A table of words whose forward reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) * float(ids.sum() >= 0)


class Wide(Job):
    """A GPT; ``broken``: its constructor cannot be run; ``reads``: its forward reads a value, so it has no trace."""

    width: int = 64
    broken: bool = False
    reads: bool = False

    def model(self) -> nn.Module:
        if self.reads:
            return Reads()
        if self.broken:
            raise OSError("no such weights")
        return GPT(256, self.width, 4, 4, 32)

    def data(self) -> Any:
        ids = torch.arange(64 * 33).reshape(64, 33) % 256
        return TensorDataset(ids[:, :-1], ids[:, 1:])

    def loss(self, output: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters())


def machine(memory: float = 8e9, link: float = 1e11) -> Cluster:
    device = Device(
        name="cpu", kernels="cpu", memory_bytes=int(memory), flops_per_s={"fp32": 1e11}, matmul_share=0.9,
        attention_share=0.5, memory_bytes_per_s=1e13, memory_share=0.9, launch_s=0.0,
    )  # fmt: skip
    inside = Link(bytes_per_s=link, base_s=1e-6, latency_s=1e-6)
    return Cluster(name="this machine", device=device, devices_per_node=2, inside=inside, between=inside)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A measured cluster in place of this machine's; ``cluster`` None: never measured."""
    at: dict[str, Any] = {"cluster": machine(), "path": tmp_path / "cluster.toml"}

    def kept(workers: int, nodes: int = 1) -> cached.Kept | None:
        return at["cluster"] and cached.Kept(at["cluster"], at["path"])

    monkeypatch.setattr(measure, "kept", kept)
    monkeypatch.setattr(measure, "kept_quickly", lambda workers: None)
    return at


def settings(folder: Path, **given: Any) -> RunSettings:
    return RunSettings(**{"global_batch": 8, "out": str(folder / "run"), **given})


def test_a_run_without_a_layout_is_planned_from_the_measured_machine(tmp_path: Path, known: dict) -> None:
    found = decide(Wide(), settings(tmp_path), 2)
    assert len(found.lines) == 2 and found.lines[0].startswith("layout: ") and found.lines[1].startswith("why: ")
    assert found.settings.plan is not None
    plan = Plan.read(found.settings.plan)
    plan.fits(2)
    assert plan.global_batch == 8
    assert found.predicted is not None and set(found.predicted) == set(automatic.TOGETHER)


def test_plain_replicate_is_kept_where_another_layout_gains_little(tmp_path: Path, known: dict) -> None:
    found = decide(Wide(), settings(tmp_path), 2)
    assert Plan.read(str(found.settings.plan)).mesh == Mesh(replicate=2)


def test_plain_replicate_does_not_cut_a_batch_that_fits(tmp_path: Path, known: dict) -> None:
    shape = {"precision": "fp32", "k": 64, "n": 256}  # small products are said to be fast
    products = ({**shape, "m": 64, "seconds": 2e-8}, {**shape, "m": 128, "seconds": 1e-3})
    device = machine().device
    known["cluster"] = machine().model_copy(
        update={"device": Device(**{**device.model_dump(exclude={"products"}), "products": products})}
    )
    cut = Plan.read(str(decide(Wide(), settings(tmp_path, micro_batch=1), 2).settings.plan))
    assert (cut.micro_batch, cut.accumulation) == (1, 4)
    found = decide(Wide(), settings(tmp_path), 2)
    plan = Plan.read(str(found.settings.plan))
    assert (plan.mesh, plan.micro_batch, plan.accumulation) == (Mesh(replicate=2), 4, 1)
    assert found.lines[0].startswith("layout: replicate=2, 1 x 4")
    assert "(both cut finer: replicate=2, 4 x 1, " in found.lines[1]  # whose seconds these are
    assert "cut finer" not in decide(Wide(), settings(tmp_path, micro_batch=1), 2).lines[1]


def test_a_batch_that_does_not_fit_is_cut(tmp_path: Path, known: dict) -> None:
    roomy = decide(Wide(), settings(tmp_path), 2)
    known["cluster"] = machine(memory=roomy.memory_bytes)  # of which 95 % are usable
    plan = Plan.read(str(decide(Wide(), settings(tmp_path), 2).settings.plan))
    assert plan.mesh == Mesh(replicate=2) and plan.accumulation > 1


def test_a_micro_batch_that_was_asked_for_is_kept(tmp_path: Path, known: dict) -> None:
    """Plain data parallel was taken with the micro-batch that seemed fastest, and the run then refused both."""
    for micro_batch in (1, 2, 4):
        decided = decide(Wide(), settings(tmp_path, micro_batch=micro_batch), 2).settings
        assert Plan.read(str(decided.plan)).micro_batch == micro_batch == decided.micro_batch


def test_a_slow_link_takes_another_layout_than_replicate(tmp_path: Path, known: dict) -> None:
    known["cluster"] = machine(link=2e6)
    found = decide(Wide(width=256), settings(tmp_path), 2)
    assert Plan.read(str(found.settings.plan)).mesh != Mesh(replicate=2)
    assert "plain data parallel would take" in found.lines[1]


@pytest.mark.parametrize("given", [{"mesh": "replicate=2"}, {"plan": "x.toml"}, {"recompute": "full"}])
def test_settings_that_name_a_layout_are_left_alone(tmp_path: Path, known: dict, given: dict) -> None:
    asked = settings(tmp_path, **given)
    assert decide(Wide(), asked, 2) == Decision(asked)
    assert decide(Wide(), settings(tmp_path), 1).lines == ()


@pytest.mark.parametrize(("given", "flag"), [({"compile": True}, "--compile"), ({"compress": "bf16"}, "--compress")])
def test_a_run_that_compiles_or_compresses_is_replicated(tmp_path: Path, known: dict, given: dict, flag: str) -> None:
    known["cluster"] = machine(link=2e6)  # where another layout would be taken
    found = decide(Wide(width=256), settings(tmp_path, **given), 2)
    assert found.settings.plan is None
    assert found.lines == ("layout: replicate=2, plain data parallel", f"why: {flag} goes with no other")


def test_a_job_that_does_not_fit_is_refused_with_the_nearest_change(tmp_path: Path, known: dict) -> None:
    known["cluster"] = machine(memory=1e5)
    with pytest.raises(
        ConfigError, match=r"(?s)No plan fits: the least.*smallest change that fits.*--mesh replicate=2"
    ):
        decide(Wide(), settings(tmp_path), 2)


def test_a_small_model_on_an_unmeasured_machine_is_not_planned(
    tmp_path: Path, known: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    known["cluster"] = None
    monkeypatch.setattr(measure, "quickly", lambda workers: pytest.fail("was measured"))
    found = decide(Wide(width=8), settings(tmp_path), 2)
    assert found.settings.plan is None and found.predicted is None
    assert found.lines[0] == "layout: replicate=2, plain data parallel" and "never measured" in found.lines[1]


def test_a_large_model_on_an_unmeasured_machine_is_measured_once(
    tmp_path: Path, known: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    known["cluster"] = None
    monkeypatch.setattr(automatic, "SMALL", 0.0)
    monkeypatch.setattr(measure, "quickly", lambda workers: cached.Kept(machine(), tmp_path / "quick.toml"))
    assert decide(Wide(), settings(tmp_path), 2).predicted is not None


def test_a_measurement_that_cannot_be_kept_is_used_and_said(
    tmp_path: Path, known: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    known["cluster"] = None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(automatic, "SMALL", 0.0)
    monkeypatch.setattr(measure, "_alone", lambda *_: machine())
    found = decide(Wide(), settings(tmp_path), 2)
    assert found.predicted is not None
    assert found.lines[2].startswith("note: every run measures anew: the measurement cannot be kept in ")
    assert "set XDG_CACHE_HOME" in found.lines[2]
    rows(tmp_path / "run", 2.0)
    assert account(found, tmp_path / "run") is not None


def test_a_folder_that_takes_no_ratios_does_not_end_a_run_that_ended_well(tmp_path: Path) -> None:
    rows(tmp_path, 2.0)
    (tmp_path / "file").write_text("")
    decision = Decision(
        RunSettings(), predicted={"forward_backward_s": 1.0}, learned=str(tmp_path / "file" / "ratios.json")
    )
    assert account(decision, tmp_path) is not None


def test_a_model_that_cannot_be_built_here_keeps_replicate_and_says_why(tmp_path: Path, known: dict) -> None:
    found = decide(Wide(broken=True), settings(tmp_path), 2)
    assert found.settings.plan is None
    assert found.lines[1] == "why: no plan could be made: OSError: no such weights"


@pytest.mark.parametrize("memory, mesh", [(8e9, Mesh(replicate=2)), (1e6, Mesh(shard=2))])
def test_of_a_model_that_cannot_be_traced_no_step_is_foretold_or_learned(
    tmp_path: Path, known: dict, memory: float, mesh: Mesh
) -> None:
    """Its sums alone were foretold as its step, and what the run took besides was learned for every other job."""
    known["cluster"] = machine(memory=memory)
    found = decide(Wide(reads=True), settings(tmp_path), 2)
    plan = Plan.read(str(found.settings.plan))
    assert plan.mesh == mesh and (plan.micro_batch, plan.accumulation) == (4, 1)
    assert found.predicted is None and not found.learned
    assert "its state alone needs" in found.lines[0] and "why: no step can be foretold: the model" in found.lines[1]
    own = decide(Wide(reads=True), settings(tmp_path, micro_batch=2), 2)
    assert Plan.read(str(own.settings.plan)).accumulation == 2


def test_a_resumed_run_keeps_its_own_layout_unless_told(tmp_path: Path, known: dict) -> None:
    own = Plan(
        mesh=Mesh(pipeline=2), schedule="1f1b", global_batch=8, micro_batch=2, accumulation=4, recompute="full"
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"plan": own.model_dump(mode="json")}))
    found = decide(Wide(), settings(tmp_path, resume=True), 2)
    assert Plan.read(str(found.settings.plan)) == own
    assert found.lines[1] == "why: a resumed run keeps its own"
    told = decide(Wide(), settings(tmp_path, resume=True, mesh="replicate=2"), 2)
    assert told.settings.plan is None and told.settings.mesh == "replicate=2"


def test_a_run_resumed_by_another_number_of_workers_is_planned_anew_and_says_so(tmp_path: Path, known: dict) -> None:
    own = Plan(mesh=Mesh(pipeline=4), schedule="1f1b", global_batch=8, micro_batch=1, accumulation=8)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"plan": own.model_dump(mode="json")}))
    found = decide(Wide(), settings(tmp_path, resume=True), 2)
    assert Plan.read(str(found.settings.plan)).mesh == Mesh(replicate=2)
    assert found.lines[1].startswith("why: the run had pipeline=4, and there are 2 workers now; the fastest mesh of ")


@pytest.mark.parametrize(
    ("plain_s", "words"),
    [(1.001, "plain data parallel is as good as equal to shard=2, 1 x 4, shard level 3, and kept"),
     (1.1, "shard=2, 1 x 4, shard level 3 would gain 10%, less than predictions err; plain data parallel is kept"),
     (1.5, "plain data parallel would take 1.5 s a step (50% more)")],
)  # fmt: skip
def test_a_gain_that_no_prediction_tells_is_called_equal(plain_s: float, words: str) -> None:
    """The reason was a layout that "would gain 0%"."""
    found = []
    for mesh, step_s in ((Mesh(shard=2), 1.0), (Mesh(replicate=2), plain_s)):
        cost = Cost(step_s, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        found.append(Found(Candidate(mesh, 4, 1), cost, Memory(0, "loss", 0, 0, 0, 0, 0, 0, 0)))
    assert automatic._why(None, *found, {}) == words  # pyright: ignore[reportArgumentType]


def test_machines_of_a_world_are_looked_up_as_so_many(tmp_path: Path, known: dict, monkeypatch: Any) -> None:
    """Of a world of 2 machines, what was measured on one was looked for, and with GPUs that was refused."""
    asked = []
    monkeypatch.setattr(measure, "kept", lambda workers, nodes=1: asked.append((workers, nodes)))
    found = decide(Wide(), settings(tmp_path), 16, nodes=2)
    assert asked == [(16, 2)] and "this world was never measured" in found.lines[1]


def rows(folder: Path, step_s: float) -> None:
    log = EventLog(folder, 0)
    for step in range(1, 4):
        slow = 10.0 if step <= 2 else 1.0
        log.row(
            "step", step=step, step_s=slow * step_s, data_wait_s=0.0, forward_backward_s=slow * step_s * 0.8,
            sync_exposed_s=slow * step_s * 0.1, optimizer_s=slow * step_s * 0.1, checkpoint_stall_s=0.0, other_s=0.0,
        )  # fmt: skip
    log.close()


def test_the_prediction_is_held_against_the_warm_steps_and_learned_from(tmp_path: Path) -> None:
    rows(tmp_path, 2.0)
    predicted = {"forward_backward_s": 0.8, "sync_exposed_s": 0.1, "optimizer_s": 0.1}
    decision = Decision(RunSettings(), predicted=predicted, learned=str(tmp_path / "ratios.json"))
    found = account(decision, tmp_path)
    assert found is not None and found["measured"]["step_s"] == 2.0 and found["predicted"]["step_s"] == pytest.approx(1)
    text = summary({"steps": 6, "prediction": found})
    assert "step predicted / measured: 1 s / 2 s (+100%)" in text
    assert "forward and backward 800 ms / 1.6 s" in text
    found["measured"]["step_s"] = 5.3
    assert "step predicted / measured: 1 s / 5.3 s (5.3 times as long)" in summary({"steps": 6, "prediction": found})
    assert read_ratios(tmp_path / "ratios.json")["forward_backward_s"] == pytest.approx(2.0)
    assert account(None, tmp_path) is None
    assert account(decision, tmp_path / "nowhere") is None


def test_what_was_learned_corrects_the_next_prediction(tmp_path: Path, known: dict) -> None:
    before = decide(Wide(), settings(tmp_path / "a"), 2).predicted
    learn(known["path"].with_suffix(".ratios.json"), {"forward_backward_s": 1.0}, {"forward_backward_s": 1.5})
    after = decide(Wide(), settings(tmp_path / "b"), 2).predicted
    assert before is not None and after is not None
    assert after["forward_backward_s"] == pytest.approx(1.5 * before["forward_backward_s"])


def test_a_run_after_a_corrected_one_moves_the_ratio_on(tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    learn(path, {"optimizer_s": 1.0}, {"optimizer_s": 2.0})
    learn(path, {"optimizer_s": 2.0}, {"optimizer_s": 2.0})  # predicted with the ratio, and right
    assert read_ratios(path)["optimizer_s"] == pytest.approx(2.0)
    path.write_text("{}")
    assert read_ratios(path) == {}


@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"ratios": {"optimizer_s": 1.5}}', '{"runs": "x", "ratios": {"optimizer_s": 1.5}}',
     '{"runs": 1, "ratios": {"optimizer_s": NaN}}', '{"runs": 1e999, "ratios": {}}', '{"runs": -1, "ratios": {}}'],
)  # fmt: skip
def test_a_damaged_file_of_ratios_taught_nothing_and_ends_no_run(tmp_path: Path, text: str) -> None:
    """A run that had ended well ended in a traceback, its plan corrected by half of what the file held."""
    path = tmp_path / "ratios.json"
    path.write_text(text)
    assert read_ratios(path) == {}
    learn(path, {"optimizer_s": 1.0}, {"optimizer_s": 1.5})
    assert read_ratios(path) == {"optimizer_s": pytest.approx(1.5)}


def test_a_ratio_beyond_the_bound_is_taken_as_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    path.write_text(json.dumps({"runs": 4, "ratios": {"forward_backward_s": 14.3, "optimizer_s": 0.01}}))
    assert read_ratios(path) == {"forward_backward_s": 2.0, "optimizer_s": 0.5}


def test_the_jobs_code_leaves_nothing_in_the_process_that_plans(tmp_path: Path, known: dict) -> None:
    state = torch.get_rng_state()
    decide(Wide(), settings(tmp_path), 2)
    assert torch.equal(state, torch.get_rng_state())


def test_a_disturbed_run_teaches_no_more_than_a_factor_of_two(tmp_path: Path) -> None:
    """A part of next to nothing, or a machine busy with other work, must not decide the next layout."""
    learn(
        tmp_path / "r.json", {"optimizer_s": 1.0, "sync_exposed_s": 1e-3}, {"optimizer_s": 9.0, "sync_exposed_s": 1.0}
    )
    assert read_ratios(tmp_path / "r.json") == {"optimizer_s": pytest.approx(2.0)}
