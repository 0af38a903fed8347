"""Published rows: what is read of them, why some are skipped, and how near some are predicted."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(HERE))

import published  # noqa: E402
from published_rows import from_cells, mesh_of, read, recomputed, rows, schedule_of, starts  # noqa: E402
from published_systems import Skip, network, system  # noqa: E402

from shoal.plan.shapes import Shape  # noqa: E402

pytestmark = pytest.mark.unit
DATA = HERE / "published"
HEAD = (DATA / "fms_fsdp_ibm.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
ROW = dict.fromkeys(HEAD, "") | {
    "source": "made up", "model": "Llama-3-8B", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
    "ffn": "14336", "vocab": "128256", "seq_len": "8192", "gpu": "H100-80GB", "n_gpus": "64", "gpus_per_node": "8",
    "tp": "8", "pp": "2", "vp": "4", "dp": "4", "sharding": "zero1", "micro_batch": "1", "recompute": "none",
    "global_batch_sequences": "64", "precision": "bf16", "seq_parallel": "yes", "tokens_per_s_per_gpu": "5000",
}  # fmt: skip


def row(**values):
    return ROW | values


def found(file, **values):
    """The first row of a file with these cells."""
    return next(one for one in rows(DATA / file) if all(one[key] == value for key, value in values.items()))


def test_a_row_becomes_a_plan_on_its_hardware():
    case = read(row(notes="4x100 Gb RoCE per node"))
    plan = case.candidates[0]
    assert str(plan.mesh) == "pipeline=2,shard=4,tensor=8"
    assert (plan.schedule, plan.chunks, plan.accumulation, plan.shard_level) == ("interleaved-1f1b", 4, 16, 1)
    assert plan.starts == (0, 5, 9, 13, 17, 21, 25, 29)
    assert plan.sequence_parallel and plan.precision == "bf16"
    assert not read(row(notes="CPU offload False")).candidates[0].cpu_offload
    assert read(row(notes="parameter CPU offload")).candidates[0].cpu_offload
    assert (case.cluster.devices_per_node, case.cluster.nodes) == (8, 8)
    assert case.cluster.between.bytes_per_s == pytest.approx(50e9 / 8)
    assert case.shape.parameters / 1e9 == pytest.approx(8.03, rel=0.01)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"notes": "SUSPECT: copied"}, "SUSPECT"),
        ({"notes": "a PROXY"}, "PROXY"),
        ({"section": "MULTIMODAL"}, "MULTIMODAL"),
        ({"section": "Finetuning (LoRA)"}, "LoRA"),
        ({"tokens_per_s_per_gpu": ""}, "neither a time nor a rate"),
        ({"gpu": "TPU v4"}, "device TPU v4"),
        ({"gpu": ""}, "device not published"),
        ({"hidden": "", "layers": "", "model": "Unheard-of"}, "shape not published"),
        ({"hidden": "", "layers": "", "model": "Unheard-of MoE 9B"}, "shape not published"),
        ({"n_gpus": "", "dp": ""}, "number of devices not published"),
        ({"pp": "64", "vp": "1", "n_gpus": "512", "dp": "1"}, "more stages than layers"),
        ({"section": "estimator output (ANALYTIC)", "peak_memory_gib": "3"}, "an estimate, not measured"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_are_skipped_with_their_reason(values, reason):
    with pytest.raises(Skip, match=reason):
        read(row(**values))


def test_hardware_over_model_flops_say_how_much_was_recomputed():
    assert recomputed(row(recompute="full")) == 1.0
    assert recomputed(row(recompute="selective")) == 0.5
    assert recomputed(row(recompute="selective", mfu="60", notes="HFU 70% (flop counter)")) == pytest.approx(0.5)
    assert recomputed(row(recompute="")) is None


def test_what_a_row_leaves_open_is_the_least_that_fits():
    small = read(row(recompute="", tp="1", pp="1", vp="", n_gpus="8", dp="8", sharding="zero3", micro_batch=""))
    candidate, needed, fits = published.choose(small)
    assert fits and max(needed) < 0.9 * 80e9
    assert (candidate.keep, candidate.micro_batch) == (0.75, 1)
    large = read(row(recompute="", tp="1", pp="1", vp="", n_gpus="8", dp="8", sharding="zero3", seq_len="65536"))
    assert published.choose(large)[0].keep < 0.5


def test_rates_are_converted_by_the_convention_that_the_row_states():
    def step(**values):
        case = read(row(tokens_per_s_per_gpu="", **values))
        return published.measured(case, case.candidates[0])

    tokens = 64 * 8192 / 64
    half = 6 * (8.03e9 - 128256 * 4096) + 6 * 32 * 4096 * 8192
    assert step(tflops_per_gpu="400", notes="causal (half) attention") == pytest.approx(
        tokens * half / 400e12, rel=0.002
    )
    palm = 6 * 8.03e9 + 12 * 32 * 4096 * 8192
    assert step(mfu="40", params_b="8.03", notes="MFU = PaLM (6N+12Lhs)") == pytest.approx(
        tokens * palm / (0.4 * 989e12)
    )
    assert step(step_time_s="3.5") == 3.5
    hardware = step(tflops_per_gpu="400", recompute="full", notes="HARDWARE flops")
    model = step(tflops_per_gpu="400", recompute="full", notes="")
    assert hardware > 1.2 * model


def test_systems_and_networks_are_read_from_the_words_of_a_row():
    names = {
        "x/nanotron": "nanotron",
        "NVIDIA NeMo": "megatron",
        "llm-foundry": "mosaic",
        "vTrain": "megatron-deepspeed",
    }
    for source, name in names.items():
        assert system(row(source=source)).name == name
    assert system(row(source="a blog", tp="1", pp="1", compile="yes")).name == "compiled"
    assert system(row(source="a blog")).name == "megatron"
    alone = system(row(source="a blog", tp="1", pp="1", precision="bf16 (pure bf16 params and Adam states)"))
    assert (alone.name, sum(alone.states[:4])) == ("fsdp", 8)
    assert network(row(notes="400 Gb/s inter-node")) == (50e9, False)
    assert network(row(notes="3.2 Tb/s RoCE per node")) == (400e9, False)
    assert network(row(notes="IB 8x50 GB/s per node; EFA")) == (400e9, True)
    assert network(row(notes="without EFA")) == (None, False)


def test_cuts_schedules_and_groups():
    shape = Shape("s", 30, 1024, 16, 16, 4096, 65536)
    assert starts(shape, 4, False) == (0, 8, 16, 24)  # embedding and head counted in
    assert starts(shape, 3, False) == (0, 11, 21)
    by_cost = starts(shape, 4, True)
    assert by_cost[0] == 0 and len(by_cost) == 4 and 30 - by_cost[-1] < 9
    assert schedule_of(4, 2, 9) == ("1f1b", 1)
    assert schedule_of(4, 1, 2) == ("gpipe", 1)
    mesh, level, world = mesh_of(row(pp="1", tp="1", dp="64", notes="zero1 group=8"))
    assert (mesh.shard, mesh.replicate, level, world) == (8, 8, 1, 64)
    gpt = from_cells(row(model="GPT-2", hidden="1024", heads="16", kv_heads="16", ffn="4096", params_b="0.355",
                         layers="24", vocab="50257"), "gpt2")  # fmt: skip
    assert not gpt.gated and gpt.tied


GOLDEN = [
    ("mosaicml_llm_foundry.csv", {"model": "MPT-7b", "gpu": "A100-80GB", "seq_len": "2048", "n_gpus": "8"}),
    ("mosaicml_llm_foundry.csv", {"model": "MPT-3b", "gpu": "H100-80GB", "n_gpus": "64"}),
    ("mosaicml_llm_foundry.csv", {"model": "MPT-125m", "gpu": "A100-40GB", "seq_len": "512"}),
    ("fms_fsdp_ibm.csv", {"model": "Llama2-7B", "gpu": "A100-80GB", "compile": "yes"}),
    ("internevo_train_performance.csv", {"n_gpus": "64", "tp": "2"}),
    ("megatron_bridge_performance.csv", {"model": "LLAMA3_70B", "gpu": "GB200", "precision": "fp8", "pp": "1"}),
    (
        "hf_ultrascale_playbook.csv",
        {"model": "Llama-like-3B", "n_gpus": "16", "tp": "4", "pp": "1", "micro_batch": "4"},
    ),
    ("vtrain_single_node.csv", {"hidden": "2048", "layers": "24", "tp": "2", "pp": "2", "micro_batch": "1"}),
]


@pytest.mark.parametrize(("file", "cells"), GOLDEN, ids=lambda v: v if isinstance(v, str) else "")
def test_known_rows_are_predicted_within_a_tenth(file, cells):
    outcome = published.predict(found(file, **cells))
    assert outcome.step_s == pytest.approx(outcome.measured_s, rel=0.1)


def test_memory_of_known_rows():
    cells = {"model": "Llama-like-1B", "n_gpus": "8", "tp": "1", "pp": "1", "micro_batch": "2"}
    outcome = published.predict(found("hf_ultrascale_playbook.csv", **cells))
    assert outcome.memory_gib == pytest.approx(50.2, rel=0.06)
    failed = published.predict(
        found("hf_ultrascale_playbook_failed.csv", model="Llama-like-8B", tp="1", pp="1", micro_batch="4")
    )
    assert failed.case.oom and not failed.fits


def test_the_command_prints_one_json_line_last(tmp_path):
    with open(tmp_path / "few.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, HEAD)
        writer.writeheader()
        writer.writerows(
            [row(), row(notes="SUSPECT"), row(gpu="TPU"), row(tokens_per_s_per_gpu="", notes="OUT OF MEMORY")]
        )
    (tmp_path / "other.csv").write_text("item,value\nx,1\n")
    command = [sys.executable, str(HERE / "published.py"), "--data", str(tmp_path), "--json", "--rows"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (few,) = json.loads(done.stdout.splitlines()[-1])["files"]
    wanted = {"file": "few.csv", "rows": 4, "predicted": 1, "oom_rows": 1, "oom_recognised": 0.0, "memory_rows": 0}
    assert wanted.items() <= few.items()
    assert few["skipped"] == {"SUSPECT": 1, "device TPU": 1}
    assert 0 <= few["step_median"] == few["step_mean"] < 5
    (tmp_path / "few.csv").unlink()
    (tmp_path / "other.csv").unlink()
    empty = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert empty.returncode and "no CSV in" in empty.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("file", "bound"),
    [
        ("fms_fsdp_ibm.csv", 0.08),
        ("pytorch_fsdp_blogs.csv", 0.08),
        ("mosaicml_llm_foundry.csv", 0.08),
        ("internevo_train_performance.csv", 0.08),
        ("hf_ultrascale_playbook.csv", 0.08),
        ("vtrain_single_node.csv", 0.12),
        ("megatron_bridge_performance.csv", 0.15),
    ],
)
def test_median_errors_keep_their_bounds(file, bound):
    one = published.summary(DATA / file, False)
    assert one["step_median"] <= bound
    assert one["predicted"] >= 0.8 * (one["rows"] - sum(one["skipped"].get(flag, 0) for flag in ("SUSPECT", "LoRA")))
