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
from published_cells import clean, number, precision, recomputed, says, sharding, whole  # noqa: E402
from published_rows import batches, by_count, doubt, from_cells, mesh_of, read, rows, schedule_of, starts  # noqa: E402
from published_systems import Skip, cut, device_name, network, stated_bytes, system, with_notes  # noqa: E402

from shoal.cluster.presets import preset  # noqa: E402
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


def summary(path):
    outcomes, skipped = published.outcomes(path)
    return published.summary(path.name, list(outcomes.values()), skipped)


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
        ({"notes": "baseline (unpacked); cumulative"}, "length of samples not published"),
        ({"pp": "64", "vp": "1", "n_gpus": "512", "dp": "1"}, "more stages than layers"),
        ({"section": "estimator output (ANALYTIC)", "peak_memory_gib": "3"}, "an estimate, not measured"),
        ({"sharding": "by hand"}, "sharding by hand"),
        ({"precision": "tf32"}, "precision tf32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_are_skipped_with_their_reason(values, reason):
    with pytest.raises(Skip, match=reason):
        read(row(**values))


def test_a_word_that_contains_efa_names_no_network():
    assert network(row(notes="MP mode DEFAULT")) == (None, False)
    assert network(row(section="p5 nodes, EFA")) == (None, True)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("", 7),
        ("nan", 7),
        ("inf", 7),
        ("x", 7),
        ("1,024", 1024),
        ("~5.5", 5.5),
        ("40 %", 40),
        ("-3", -3),
        ("4x8", 7),
        ("64 GPUs", 64),
        ("5k", 5000),
        ("1.5 M", 1.5e6),
        ("2e3", 2000),
    ],
)
def test_cells_are_numbers_or_nothing(cell, value):
    assert number({"a": cell}, "a", 7) == value
    assert number({"seq_len": "8K"}, "seq_len") == 8192
    assert number({}, "a") is None
    assert whole({"a": cell}, "a", 7) == max(1, int(value))
    assert (clean(" N/A "), clean("none"), clean(None)) == ("", "none", "")


def test_columns_may_be_missing_spelled_otherwise_or_begin_with_a_mark(tmp_path):
    text = "\ufeffModel, GPU ,n_gpus,layers,hidden,step_time_s,extra\nLlama-3-8B,H100,8,32,4096,1.5,x\nshort\n"
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    first, second = rows(tmp_path / "t.csv")
    assert (first["model"], first["gpu"], first["notes"], "extra" in first) == ("Llama-3-8B", "H100", "", False)
    assert published.predict(first).measured_s == 1.5
    with pytest.raises(Skip, match="neither a time nor a rate"):
        published.predict(second)


def test_a_cell_that_makes_no_sense_costs_its_row_and_says_so(tmp_path):
    with open(tmp_path / "t.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, HEAD)
        writer.writeheader()
        writer.writerows([row(hidden="-1"), row()])
    found = summary(tmp_path / "t.csv")
    assert found["predicted"] == 1
    assert found["skipped"] == {"not understood: ZeroDivisionError: float division by zero": 1}


def test_notes_of_cumulative_rows_add_up(tmp_path):
    lines = "s,m,g,+8-bit AdamW; cumulative\ns,m,g,+chunked cross entropy; cumulative\nt,m,g,+compile; cumulative\n"
    (tmp_path / "t.csv").write_text("section,model,gpu,notes\n" + lines)
    first, second, other = (one["notes"] for one in rows(tmp_path / "t.csv"))
    assert "8-bit" in first and "8-bit" in second and "chunked" in second and "8-bit" not in other


def test_kernels_and_states_are_read_from_notes():
    plain = system(row(source="a blog", tp="1", pp="1"))
    said = with_notes(plain, "8-bit adamw, optimizer-in-backward, chunked cross entropy")
    assert (said.states.gradient, said.states.sent) == (0, plain.states.sent)
    assert 2 < said.states.optimizer < 2.1 and with_notes(plain, "paged 8-bit adamw").states.optimizer == 0
    assert (plain.software.loss_kept, said.software.loss_kept) == (14, 2 + 4 + 14 / 8)
    made = system(row(source="torchtune", tp="1", pp="1", compile="yes"))
    assert made.software.loss_kept == 2 + 10 / 8  # its configurations cut the loss
    ablation = system(row(source="torchtune", tp="1", pp="1", compile="yes", notes="+compile; cumulative"))
    assert ablation.software.loss_kept == 10
    plans = [read(row(notes=notes)).candidates[0] for notes in ("+activation offloading", "optimizer offload")]
    assert [(plan.offload_activations, plan.cpu_offload) for plan in plans] == [(True, False), (False, True)]
    assert [read(row(source="torchtune", recompute=said)).candidates[0].keep for said in ("", "none")] == [0, 1]
    local = system(row(source="Megatron-LM", notes="transformer-impl=local"))
    assert not local.software.flash and system(row(source="Megatron-LM")).software.flash
    assert system(row(source="NVIDIA NeMo")).overlap_tensor and not system(row(source="Megatron-LM")).overlap_tensor


def test_a_shape_is_made_up_from_the_number_of_parameters():
    bare = {"layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn": "", "vocab": ""}
    for name, count in (("Unheard-of 9B", 9e9), ("GPT 530B", 530e9), ("OPT-350M", 0.35e9), ("X 1.5T", 1.5e12)):
        shape = (
            read(row(**bare, model=name)).shape
            if "350" not in name
            else by_count(row(**bare, model=name), name.lower())
        )
        assert shape.parameters == pytest.approx(count, rel=0.1)
        assert shape.gated == ("GPT" not in name and "OPT" not in name)
    assert by_count(row(**bare, model="?", params_b="13"), "?").hidden == 5120
    for name in ("Foo-8x7B", "Foo MoE 30B", "Foo"):
        with pytest.raises(Skip, match="shape not published"):
            by_count(row(**bare, model=name), name.lower())
    half = read(row(heads="", vocab="", kv_heads="", model="made up")).shape
    assert (half.heads, half.vocab) == (32, 32000)


def test_devices_by_their_kinds():
    kinds = {"H100-PCIe 80GB": "h100-pcie", "V100-SXM2-16GB": "v100-16gb", "GH200": "gh200", "A800-80GB": "a100-80gb",
             "H200 SXM": "h200", "H20 96GB": "h20", "RTX 3090": "rtx3090", "MI355X": "mi355x"}  # fmt: skip
    for name, known in kinds.items():
        assert device_name(row(gpu=name)) == known
    assert [cut(row(gpu=name)) for name in ("A800", "H800", "H100")] == pytest.approx([2 / 3, 4 / 9, 1])
    slow, whole_ = read(row(gpu="H800")).cluster, read(row()).cluster
    assert slow.inside.bytes_per_s == pytest.approx(whole_.inside.bytes_per_s * 4 / 9)
    old = read(row(gpu="V100-SXM2-32GB", precision="fp16 mixed", tokens_per_s_per_gpu="", mfu="40"))
    assert old.candidates[0].precision == "fp16"
    assert published.measured(old, old.candidates[0]) > 0


def test_attention_on_hopper_is_as_fast_as_the_systems_kernels():
    runs = (("NVIDIA NeMo", "H100"), ("Megatron-LM", "H200"), ("FSDP", "H100"), ("NeMo", "A100"))
    shares = [read(row(source=source, gpu=gpu)).cluster.device.attention_share for source, gpu in runs]
    assert shares == [0.452, 0.452, 0.35, 0.645]
    shares = [read(row(source=source, gpu=gpu)).cluster.device.matmul_share for source, gpu in runs]
    assert shares == [0.803, 0.74, 0.67, 0.84]
    assert read(row(notes="1f1b A2A overlap")).candidates[0].overlap_expert
    assert not read(row(notes="A2A dispatcher")).candidates[0].overlap_expert


def test_allocated_memory_is_without_what_the_allocator_reserves():
    reserved = published.predict(row(source="Megatron-LM", peak_memory_gib="50"))
    allocated = published.predict(row(source="Megatron-LM", peak_memory_gib="50", notes="mem-max-allocated"))
    assert 1.02 < reserved.memory_gib / allocated.memory_gib < 1.05


def test_what_a_step_makes_and_leaves_is_reserved_beside_what_the_backward_needs():
    def shown(**values):
        bare = dict.fromkeys(("layers", "hidden", "heads", "ffn", "vocab", "vp"), "")
        cells = bare | {"model": "InternLM-7B", "source": "InternEvo", "seq_len": "2048", "n_gpus": "4", "dp": "1"}
        outcome = published.predict(row(**cells | {"recompute": "full", "tp": "4", "pp": "1"} | values))
        return outcome.memory_gib * 2**30, outcome.fits

    numel = 7.32e9 / 4
    flat, piece, by_unit = shown(), shown(notes="allocated"), shown(sharding="zero3")
    assert flat[0] - by_unit[0] == pytest.approx(6 * numel, rel=0.01)  # 10 and 8 left over; FSDP's units 12 in all
    assert flat[0] - piece[0] > (10 + 8) * numel - 10 * numel and flat[1] and by_unit[1]
    full, fits = shown(n_gpus="3", tp="1", pp="3", dp="1")
    assert full < 80 * 2**30 and fits  # what is left over is given back before anything fails


def test_workspaces_are_those_of_the_devices_libraries():
    found = system(row(source="Megatron-LM"))
    old, new = (found.workspaces(read(row(gpu=gpu)).cluster.device) for gpu in ("A100-80GB", "H100-80GB"))
    assert new - old == (32 + 32 - 8 - 4) * 2**20


def test_messages_block_in_nanotrons_large_runs():
    held = [read(row(source="nanotron", n_gpus=n, dp=dp, tp=tp)).candidates[0].blocking_s
            for n, dp, tp in (("64", "4", "8"), ("512", "32", "8"), ("64", "1", "32"))]  # fmt: skip
    assert held == [0, 0.25, 0.25]
    assert read(row(n_gpus="512", dp="32")).candidates[0].blocking_s == 0


def test_hardware_over_model_flops_say_how_much_was_recomputed():
    assert recomputed(row(recompute="full")) == 1.0
    assert recomputed(row(recompute="selective")) == 0.5
    assert recomputed(row(recompute="selective", mfu="60", notes="HFU 70% (flop counter)")) == pytest.approx(0.5)
    assert recomputed(row(recompute="")) is None


def test_what_a_row_leaves_open_is_the_least_that_fits():
    small = read(row(recompute="", tp="1", pp="1", vp="", n_gpus="8", dp="8", sharding="zero3", micro_batch=""))
    candidate, needed, fits = published.choose(small)
    device = small.cluster.device
    assert fits and max(needed) < device.memory_bytes - device.reserved_bytes
    assert candidate.keep == 0.75
    less = [one for one in small.candidates if one.micro_batch > candidate.micro_batch and one.keep == 0.75]
    assert less and min(max(published.memory(small, one)) for one in less) > device.memory_bytes - device.reserved_bytes
    large = read(row(recompute="", tp="1", pp="1", vp="", n_gpus="8", dp="8", sharding="zero3", seq_len="65536"))
    assert published.choose(large)[0].keep < 0.5


def test_what_rounding_hides_may_have_been_recomputed_too():
    cells = {"recompute": "selective", "mfu": "38", "notes": "HFU 47%", "source": "FSDP", "vp": ""}
    plans = read(row(**cells)).candidates
    assert [1 - plan.keep for plan in plans] == pytest.approx([0.71, 0.80], abs=0.005)
    assert doubt(row(**cells | {"notes": "HFU 47.00%", "mfu": "38.00"})) < 0.001 and not doubt(row())


def test_what_does_not_fit_when_recomputed_is_offloaded_where_the_system_can():
    plans = [read(row(source=source, recompute="")).candidates for source in ("NVIDIA NeMo", "Megatron-LM")]
    assert [plan[-1].offload_activations for plan in plans] == [True, False]
    assert not any(plan.offload_activations for plan in plans[0][:-1])
    assert [plan[0].states.gradient for plan in plans] == [2, 4]
    assert plans[0][0].shard_all and not read(row(sharding="none")).candidates[0].shard_all


def test_selective_checkpointing_in_torch_is_of_single_operations_or_of_layers():
    """https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/activation_checkpoint.py"""
    cells = {"source": "torchtitan FSDP", "vp": "", "pp": "1", "n_gpus": "32", "tp": "1"}

    def made(recompute, **more):
        case = read(row(**cells | {"recompute": recompute} | more))
        return case.system.name, case.system.software.again, 1 - case.candidates[0].keep

    assert made("selective") == made("selective op") == ("torchtitan", ("operations",), 0)
    assert made("selective layer") == ("torchtitan", (), 0.5)
    assert made("selective", notes="every second block")[2] == 0.5
    assert made("none") == ("torchtitan", (), 0)


def test_the_loss_of_torch_is_compiled_with_the_model_since_2025():
    """https://github.com/pytorch/torchtitan/pull/1033"""

    def kept(source, **more):
        return read(row(source=source, vp="", pp="1", n_gpus="32", **{"tp": "1"} | more)).system.software.loss_kept

    assert [kept("torchtitan llama3_h100_2024-12"), kept("torchtitan 202412", compile="yes")] == [14, 14]
    assert [kept("torchtitan 202506", compile="yes"), kept("torchtitan", compile="yes")] == [4, 4]
    assert kept("FSDP", compile="yes") == 14 and kept("torchtitan", tp="8", dp="4") == 18  # parts of the classes


def test_the_loss_moves_what_its_kernels_read_and_write():
    """Passes over logits in megatron/core/tensor_parallel/cross_entropy.py, nanotron's functional.py, torch's own."""

    def moved(source, **more):
        return read(row(source=source, vp="", pp="1", n_gpus="32", **{"tp": "1"} | more)).system.software.loss_bytes

    assert [moved(source) for source in ("Megatron-LM", "NeMo", "Megatron-DeepSpeed", "nanotron")] == [52] * 4
    assert [moved(source) for source in ("FSDP", "DeepSpeed", "InternEvo", "torchtitan")] == [36] * 4
    assert [moved(source, compile="yes") for source in ("FSDP", "torchtitan", "torchtitan 202412")] == [16, 16, 36]


def test_torch_sums_gradients_in_float32_and_keeps_what_its_layers_gathered():
    case = read(row(source="torchtitan", vp="", pp="1", n_gpus="32", dp="4"))
    assert case.candidates[0].states.sent == 4 and read(row(source="FSDP")).candidates[0].states.sent == 2
    assert not case.system.software.regathers and case.system.software.ring_gradient == 4


def test_torchs_pipelines_have_as_many_micro_batches_as_ranks_where_a_row_does_not_say():
    """https://github.com/pytorch/torchtitan, torchtitan/parallelisms/pipelining_utils.py"""
    cells = {"source": "torchtitan", "micro_batch": "", "pp": "4", "vp": "1", "n_gpus": "128", "dp": "4"}
    found = {(one.micro_batch, one.accumulation) for one in read(row(**cells)).candidates}
    assert found == {(4, 4)}


def test_communicators_lie_beside_what_the_allocator_holds():
    """https://github.com/NVIDIA/nccl/issues/964: 544 MB of two ranks, 688 MB of more."""

    def outside(**values):
        case = read(row(**values))
        return case.cluster.device.memory_bytes - published.room_bytes(case, case.candidates[0])

    context = preset("h100").device.reserved_bytes
    assert outside() == context + 544e6 + 3 * 688e6  # pipeline of 2, 4 replicas, 8 tensor ranks, all 64
    assert outside(tp="1", pp="1", vp="", dp="64") == context + 688e6
    case = read(row(source="Megatron-LM", notes="nvidia-smi", peak_memory_gib="50"))
    shown = published.predict(case.row).memory_gib - published.predict(case.row | {"notes": ""}).memory_gib
    assert shown * 2**30 == pytest.approx(outside())


def test_weights_have_copies_in_fp8_but_where_they_are_held_so():
    made = [system(row(source="Megatron-LM", precision=precision)) for precision in ("bf16", "bf16+fp8", "fp4")]
    assert [one.states.weight for one in made] == [2, 4, 4]
    assert system(row(source="Megatron-LM", precision="fp8", notes="test=native_fp8")).states.weight == 2
    assert system(row(source="torchtitan", precision="fp8")).states.weight == 4  # float32


def test_eager_layer_norms_are_one_kernel_and_gelu_eight_in_transformers():
    """https://github.com/huggingface/transformers/blob/main/src/transformers/activations.py (NewGELUActivation)"""
    cells = {"source": "DeepSpeed", "model": "GPT-2 Large", "hidden": "", "layers": "", "tp": "1", "pp": "1", "vp": ""}
    plain, face = (read(row(**cells, notes=notes)).system.software for notes in ("", "HF transformers"))
    assert (plain.norm, plain.norm_kept, plain.gelu, plain.scores) == (2, 1, 2, 5)
    assert (face.norm, face.gelu, face.scores) == (2, 18, 10)
    assert read(row(source="DeepSpeed", tp="1", pp="1", vp="")).system.software.norm == 24  # RMSNorm


def test_dropout_of_gpt_and_attention_before_it_was_fused():
    """Masks are a byte each, https://arxiv.org/abs/2205.05198; fused attention: https://arxiv.org/abs/2205.14135."""
    gpt = {
        "source": "Megatron-LM",
        "model": "GPT 175B",
        "layers": "96",
        "hidden": "12288",
        "heads": "96",
        "ffn": "49152",
    }
    drops = [read(row(**gpt | more)).system.software.dropout for more in ({}, {"notes": "rope"})]
    assert drops == [True, False] and not read(row(source="Megatron-LM")).system.software.dropout
    sources = (
        "arXiv 2104.04473",
        "https://arxiv.org/abs/2205.01068",
        "https://arxiv.org/abs/2310.19341",
        "Megatron-LM",
    )
    fused = [system(row(source=source)).software.flash for source in sources]
    assert fused == [False, False, True, True]
    assert system(row(source="arXiv 2205.14135", notes="flash attention")).software.flash


def test_memory_and_power_that_a_row_states():
    usual = preset("h100").device
    said = read(row(notes="HBM2e with 2.4 TB/sec; 500 W power limit")).cluster.device
    assert said.memory_bytes_per_s == 2.4e12
    assert said.flops_per_s["bf16"] == pytest.approx(usual.flops_per_s["bf16"] * (5 / 7) ** (1 / 3))
    for notes in ("700 W", "3.2 Tb/s per node", "NVLink at 1.8 TB/s", "350W"):
        more = read(row(notes=notes)).cluster.device
        assert more.memory_bytes_per_s == usual.memory_bytes_per_s
        assert (more.flops_per_s == usual.flops_per_s) == (notes != "350W")


def test_deepspeed_alone_holds_two_bytes_per_weight_and_shares_out_sixteen():
    found = system(row(source="DeepSpeed", tp="1", pp="1"))
    assert (found.name, *found.states[:5], found.states.step) == ("deepspeed", 2, 0, 2, 12, 0, 4)
    names = [system(row(source=source)).name for source in ("Megatron-DeepSpeed", "InternEvo beside DeepSpeed")]
    assert names == ["megatron-deepspeed", "internevo"]


def test_of_several_clusters_the_largest_counts():
    assert mesh_of(row(n_gpus="", dp="", tp="4", pp="1", notes="three clusters of 128/256/512 H100"))[2] == 512


def test_parts_that_a_row_says_are_recomputed():
    parts = {
        "recompute norm,act; ETP1": ("act", "layernorm"), "recompute layernorm+moe; x": ("layernorm", "moe"),
        "recompute norm, act, shared_expert; y": ("act", "layernorm", "shared"), "recompute column empty": (),
    }  # fmt: skip
    assert {notes: system(row(notes=notes)).software.again for notes in parts} == parts


def test_of_what_a_row_leaves_open_the_fastest_that_fits_is_taken():
    open_ = row(source="Megatron-LM", micro_batch="", vp="", tp="1", pp="4", n_gpus="32", dp="8", recompute="full",
                global_batch_sequences="128", seq_len="2048")  # fmt: skip
    assert {
        chunks for _, _, chunks in batches(open_, Shape("s", 32, 64, 1, 1, 64, 64), system(open_), mesh_of(open_)[0])
    } == {1, 2, 4, 8}
    case = read(open_)
    chosen = published.choose(case)[0]
    assert chosen.chunks > 1 and published.per_sample(case, chosen) == min(
        published.per_sample(case, one) for one in case.candidates
    )
    assert published.choose(case._replace(rate=None))[0] == case.candidates[0]
    assert {one.chunks for one in read(open_ | {"micro_batch": "2"}).candidates} == {1}
    alone = read(open_ | {"global_batch_sequences": "", "micro_batch": "1"}).candidates[0]
    assert alone.accumulation == 16


WORDS = {"": "none", "DDP": "none", "No": "none", "FSDP2": "zero3", "full_shard": "zero3", "yes": "zero3",
         "HSDP": "hsdp", "hybrid_shard": "hsdp", "ZeRO stage 2": "zero2", "SHARD_GRAD_OP": "zero2",
         "distributed optimizer": "zero1", "DeepSpeed ZeRO-1": "zero1", "zero-0": "none"}  # fmt: skip


@pytest.mark.parametrize("cell", WORDS)
def test_sharding_however_it_is_spelled(cell):
    assert sharding(row(sharding=cell)) == WORDS[cell]
    assert sharding(row(sharding="", section="FSDP1, no compile")) == "zero3"
    assert sharding(row(sharding="", section="DDP")) == "none"


def test_levels_of_sharding():
    levels = [mesh_of(row(sharding=cell, pp=pp))[1] for cell, pp in (("none", "1"), ("zero3", "1"), ("zero3", "2"))]
    assert levels == [1, 3, 2]


def test_recomputation_however_it_is_spelled():
    words = {
        "no": 0.0,
        "full AC": 1.0,
        "yes": 1.0,
        "block": 1.0,
        "25%": 0.25,
        "selective op": 0.5,
        "attn": 0.5,
        "?": None,
    }
    assert {cell: recomputed(row(recompute=cell)) for cell in words} == words
    assert recomputed(row(recompute="selective"), attention_alone=True) == 0.0
    assert system(row(source="Megatron-LM", recompute="selective")).software.again == ("attention",)
    assert not system(row(source="Megatron-LM", recompute="full")).software.again
    named = row(source="Megatron-LM", recompute="selective", notes="recompute norm,act; attention incl.")
    assert system(named).software.again == ("act", "layernorm")


def test_precision_however_it_is_spelled():
    h100, v100 = preset("h100").device, preset("v100-32gb").device
    words = {"bf16 + float8": "fp8", "E4M3": "fp8", "nvfp4": "fp4", "float32": "fp32", "32-true": "fp32", "amp": "bf16",
             "fp16 mixed": "fp16", "bfloat16": "bf16", "": "bf16"}  # fmt: skip
    assert {cell: precision(row(precision=cell), h100) for cell in words} == words
    assert precision(row(precision="bf16"), v100) == "fp16"


def test_yes_no_and_what_systems_do_by_themselves():
    assert [says({"a": cell}, "a") for cell in ("TRUE", "1", "no (DDP)", "", "maybe")] == [
        True,
        True,
        False,
        None,
        None,
    ]
    said = [
        read(row(source=source, seq_parallel=cell)).candidates[0].sequence_parallel
        for source, cell in (("NeMo", ""), ("NeMo", "no"), ("Megatron-LM", ""), ("torchtitan", ""), ("x", "Yes"))
    ]
    assert said == [True, False, False, True, True]


def test_experts_that_are_divided_over_tensor_ranks():
    cells = {"source": "NeMo", "tp": "4", "pp": "1", "vp": "", "ep": "8", "dp": "16"}
    notes = ("ETP 4", "experts=8 topk=2 moe_ffn=1024 etp=4", "ETP1", "etp=None", "")
    assert [read(row(**cells, notes=each)).candidates[0].expert for each in notes] == [32, 32, 8, 8, 8]


def test_compiled_kernels_of_other_systems():
    sources = ("MaxText on GPU", "a blog on JAX", "Unsloth", "a blog")
    found = [system(row(source=source, tp="1", pp="1", vp="")).software.norm for source in sources]
    assert found == [2, 2, 2, 24]
    assert system(row(source="EleutherAI/gpt-neox")).name == "megatron-deepspeed"


def test_memory_that_a_devices_name_states():
    assert [stated_bytes(row(gpu=name)) for name in ("GH200 480GB", "GH200 96GB")] == [None, 96e9]
    stated = {"H100 96GB HBM2e": 96, "RTX 4090 48GB": 48, "A100-40GB": 40, "H100": None, "V100-SXM2": None}
    assert {name: stated_bytes(row(gpu=name)) for name in stated} == {k: v and v * 10**9 for k, v in stated.items()}
    assert read(row(gpu="RTX 4090 48GB")).cluster.device.memory_bytes == 48 * 10**9
    assert read(row(gpu="H100 80GB")).cluster.device.memory_bytes == preset("h100").device.memory_bytes


def test_rates_of_all_devices_and_networks_per_device():
    one, whole_ = (
        published.predict(row(**said))
        for said in ({}, {"tokens_per_s_per_gpu": "320000", "notes": "tokens/s in total"})
    )
    assert one.measured_s == pytest.approx(whole_.measured_s)
    assert network(row(notes="400 Gb/s RoCE per GPU"))[0] == pytest.approx(400e9)


def test_kernels_by_device_and_gradients_by_precision():
    assert not system(row(source="Megatron-LM", gpu="V100-32GB")).software.flash
    assert system(row(source="Megatron-LM", gpu="V100-32GB", notes="flash attention")).software.flash
    fused = system(row(source="lit-gpt", tp="1", pp="1", notes="fused layernorm and swiglu")).software
    assert fused.norm < system(row(source="lit-gpt", tp="1", pp="1")).software.norm
    kept = [system(row(source="Megatron-DeepSpeed", precision=cell)).states.gradient for cell in ("fp16", "bf16")]
    assert kept == [2, 6]


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
    plain, made = (system(row(source="a blog", tp="1", pp="1", compile=compile_)) for compile_ in ("no", "yes"))
    assert (plain.name, made.name) == ("fsdp", "fsdp") and plain.software.norm > made.software.norm
    assert system(row(source="a blog")).name == "megatron"
    alone = system(row(source="a blog", tp="1", pp="1", precision="bf16 (pure bf16 params and Adam states)"))
    assert (alone.name, sum(alone.states[:4])) == ("fsdp", 8)
    assert network(row(notes="400 Gb/s inter-node")) == (50e9, False)
    assert network(row(notes="3.2 Tb/s RoCE per node")) == (400e9, False)
    assert network(row(notes="IB 8x50 GB/s per node; EFA")) == (400e9, True)
    assert network(row(notes="without EFA")) == (None, False)


def test_cuts_schedules_and_groups():
    shape = Shape("s", 30, 1024, 16, 16, 4096, 65536)
    assert starts(shape, 4) == (0, 8, 16, 24)  # embedding and head counted in
    assert starts(shape, 3) == (0, 11, 21)
    by_cost = starts(shape, 4, "cost")
    assert starts(shape, 4, "last") == (0, 8, 15, 23)
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


@pytest.mark.parametrize(
    ("cells", "bound"),
    [
        ({"peak_memory_gib": "60.0"}, 0.02),
        ({"peak_memory_gib": "42.9"}, 0.03),
        ({"peak_memory_gib": "24.9"}, 0.02),
        ({"peak_memory_gib": "23.1"}, 0.02),
        ({"peak_memory_gib": "21.8"}, 0.03),
        ({"gpu": "RTX4090"}, 0.05),
        ({"model": "Llama3.1-70B"}, 0.06),
    ],
    ids=[
        "packed",
        "chunked loss",
        "recomputed",
        "optimizer in backward",
        "offloaded",
        "paged",
        "parameters on the host",
    ],
)
def test_each_switch_of_a_fine_tune_takes_what_it_took(cells, bound):
    outcome = published.predict(found("memory_only.csv", source="github:meta-pytorch/torchtune README.md", **cells))
    assert outcome.memory_gib == pytest.approx(outcome.case.memory_gib, rel=bound) and outcome.fits


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
    "file",
    [
        "hf_ultrascale_playbook.csv",
        "internevo_train_performance.csv",
        "megatron_lm_ci_golden_values.csv",
        "memory_only.csv",
    ],
)
def test_median_errors_of_memory_keep_their_bounds(file):
    one = summary(DATA / file)
    assert one["memory_median"] <= 0.06
    assert one["false_alarms"] < 0.02


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
    one = summary(DATA / file)
    assert one["step_median"] <= bound
    assert one["predicted"] >= 0.8 * (one["rows"] - sum(one["skipped"].get(flag, 0) for flag in ("SUSPECT", "LoRA")))
