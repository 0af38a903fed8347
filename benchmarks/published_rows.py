"""A published row -> what was run (shape, software, plan, hardware) and what was measured."""

import csv
import math
import re
from typing import NamedTuple

from published_models import MODELS

from shoal.plan.candidate import Candidate, States
from shoal.plan.mesh import Mesh
from shoal.plan.transformer import Shape, Software


class Framework(NamedTuple):
    """What a training system does apart from its plan."""

    name: str
    software: Software
    states: States
    overlap_gradients: bool = True
    overlap_weights: bool = True
    bucket_bytes: float = 25 * 2**20
    piped: float = 0.0  # kernels' worth of host time more per tensor rank and block, in a pipeline


FRAMEWORKS = {
    "nanotron": Framework(
        "nanotron",
        Software(activation=5, activation_kept=3, residual=4, kernels=310),
        States(2, 0, 4, 12),
        False,
        False,
        bucket_bytes=0.75e9,
        piped=147,
    ),
    "megatron": Framework("megatron", Software(), States(2, 0, 4, 12), bucket_bytes=160e6),
    "megatron-deepspeed": Framework(
        "megatron-deepspeed", Software(flash=False, dropout=True, kernels=162), States(2, 0, 2, 12), False
    ),
    "mosaic": Framework("mosaic", Software(skips=False), States(4, 2, 4, 8)),
    "fsdp": Framework("fsdp", Software(activation=5, activation_kept=3, norm=16, norm_kept=4), States(4, 2, 4, 8, 2)),
    "fsdp-compiled": Framework("fsdp-compiled", Software(), States(4, 2, 4, 8, 2)),
    "internevo": Framework(
        "internevo", Software(activation=5, activation_kept=3, norm=16, norm_kept=2), States(2, 0, 2, 12)
    ),
}


class Skip(Exception):
    """Why a row is not predicted."""


class Case(NamedTuple):
    """One row. ``step_s``, ``memory_gib``: as measured, or None. ``oom``: it did not run."""

    row: dict
    index: int
    shape: Shape
    framework: Framework
    tokens: int
    gpu: str
    per_node: int
    world: int
    candidate: Candidate
    recompute: str | None
    step_s: float | None
    memory_gib: float | None
    oom: bool
    precision: str


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def number(row, name, default=None):
    text = row[name].strip()
    try:
        return float(text) if text else default
    except ValueError:
        return default


def framework(row):
    text = " ".join((row["source"], row["section"], row["notes"])).lower()
    if "nanotron" in text:
        return FRAMEWORKS["nanotron"]
    if "megatron-deepspeed" in text:
        return FRAMEWORKS["megatron-deepspeed"]
    if "megatron" in text or "nemo" in text:
        return FRAMEWORKS["megatron"]
    if "mosaic" in text or "llm-foundry" in text:
        return FRAMEWORKS["mosaic"]
    if "internevo" in text or "internlm" in text:
        return FRAMEWORKS["internevo"]
    if "fsdp" in text or row["sharding"] in ("zero3", "zero2", "hsdp"):
        return FRAMEWORKS["fsdp-compiled" if row["compile"] == "yes" else "fsdp"]
    return FRAMEWORKS["megatron" if number(row, "tp", 1) * number(row, "pp", 1) > 1 else "fsdp"]


def shape(row):
    name = re.sub(r"[^a-z0-9]", "", row["model"].lower())
    if "18b" in name and "llama3" in name and number(row, "params_b", 0) < 2 and not row["hidden"]:
        return MODELS["llama318bx"]
    known = max((key for key in MODELS if key in name), key=len, default=None)
    cells = [number(row, key) for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")]
    if None in cells:
        if known is None:
            raise Skip("shape not published")
        return MODELS[known]
    if known and MODELS[known].experts:
        return MODELS[known]
    layers, hidden, heads, kv, ffn, vocab = map(int, cells)
    params = (number(row, "params_b", 0) or 0) * 1e9
    made = Shape(row["model"], layers, hidden, heads, kv, ffn, vocab)
    return nearest_count(made, params, name, int(number(row, "seq_len", 2048)))


def nearest_count(made, params, name, tokens):
    """Gated or not, tied or not: as the count of parameters says, else by the family."""
    gpt = any(word in name for word in ("mpt", "gpt", "opt", "bloom"))
    if not params:
        return made._replace(gated=not gpt, norm="layer" if gpt else "rms")

    def count(gated, tied):
        h, d = made.hidden, made.head
        layer = h * (made.heads + 2 * made.kv_heads) * d + made.heads * d * h + (3 if gated else 2) * h * made.ffn
        return made.layers * layer + made.vocab * h * (1 if tied else 2)

    gated, tied = min(
        ((g, t) for g in ((False,) if gpt else (True, False)) for t in (True, False)),
        key=lambda c: abs(count(*c) - params),
    )
    return made._replace(
        gated=gated,
        tied=tied,
        norm="layer" if gpt else "rms",
        learned_positions=tokens if gpt else 0,
        biases=gpt and "mpt" not in name,
    )


def flagged(row):
    for flag in ("SUSPECT", "PROXY", "MULTIMODAL", "LoRA"):
        if flag.lower() in " ".join((row["notes"], row["section"], row["model"])).lower():
            raise Skip(flag)


def gpu(row):
    text = row["gpu"].upper()
    for name in ("GB300", "GB200", "B300", "B200", "H200", "H100", "H800", "V100", "L40S", "4090", "MI300X"):
        if name in text:
            return {"H800": "H100"}.get(name, name)
    if "A100" in text or "A800" in text:
        return "A100-40GB" if "40" in text else "A100-80GB"
    raise Skip(f"no such device: {row['gpu'] or 'not published'}")


def precision(row):
    text = row["precision"].lower()
    for found in ("fp4", "fp8"):
        if found in text:
            return found
    return "fp32" if text == "fp32" else "bf16"


def starts(shape_, stages, by_cost):
    """First block of each stage; blocks: embedding, layers, head."""
    if stages == 1:
        return (0,)
    if by_cost:
        h = shape_.hidden
        layer = 4 * shape_.heads * shape_.head * h + 3 * h * shape_.ffn
        costs = [0] + [layer] * shape_.layers + [shape_.vocab * h]
        total, found, run = sum(costs), [0], 0.0
        for index, cost in enumerate(costs):
            run += cost
            if run > total * len(found) / stages and index + 1 < len(costs):
                found.append(index + 1)
        found += [found[-1]] * (stages - len(found))
        return tuple(found)
    layers = shape_.layers
    if layers % stages and (layers + 2) % stages == 0:
        return tuple(range(0, layers + 2, (layers + 2) // stages))
    if stages > layers:
        raise Skip("more stages than layers")
    return (0, *(1 + round(layers * stage / stages) for stage in range(1, stages)))


def recomputed(row):
    """Share of blocks that are computed twice, None where it is not published. Hardware over model FLOPs say it."""
    found = re.search(r"HFU ([\d.]+)", row["notes"])
    if row["recompute"] == "none":
        return 0.0
    if found and number(row, "mfu") and row["recompute"]:
        return min(1.0, max(0.0, 3 * (float(found[1]) / number(row, "mfu") - 1)))
    return {"full": 1.0, "selective": 0.5}.get(row["recompute"])


def rate_to_step(row, case_tokens, gbs, world, model_flops):
    """Seconds of a step from what was published."""
    if number(row, "step_time_s"):
        return number(row, "step_time_s")
    per_gpu = number(row, "tokens_per_s_per_gpu")
    if not per_gpu:
        return None
    return gbs * case_tokens / (per_gpu * world)


def read(row, index):
    flagged(row)
    if (
        number(row, "step_time_s") is None
        and number(row, "tokens_per_s_per_gpu") is None
        and number(row, "tflops_per_gpu") is None
        and number(row, "mfu") is None
        and number(row, "peak_memory_gib") is None
        and "OOM" not in row["notes"]
        and "OUT OF MEMORY" not in row["notes"]
    ):
        raise Skip("neither time nor rate")
    frame = framework(row)
    made = shape(row)
    tokens = int(number(row, "seq_len", 2048))
    tp, pp, cp, ep, vp = (int(number(row, key, 1)) for key in ("tp", "pp", "cp", "ep", "vp"))
    world, dp = number(row, "n_gpus"), number(row, "dp")
    if world is None and dp is None:
        raise Skip("number of devices not published")
    world = int(world or dp * tp * pp * cp)
    dp = max(1, world // (tp * pp * cp))
    micro = int(number(row, "micro_batch", 0)) or 1
    gbs = number(row, "global_batch_sequences") or micro * dp
    accumulation = max(1, round(gbs / (micro * dp)))
    sharding = row["sharding"] or ("zero3" if frame.name.startswith("fsdp") else "none")
    group = re.search(r"zero1 group=(\d+)", row["notes"])
    shard = {"none": 1, "hsdp": min(8, dp)}.get(sharding, int(group[1]) if group else dp)
    shard = math.gcd(shard, dp)
    level = {"zero1": 1, "zero2": 2}.get(sharding, 3)
    mesh = Mesh(pipeline=pp, replicate=dp // shard, shard=shard, context=cp, tensor=tp)
    schedule, chunks = None, 1
    if pp > 1:
        schedule = "1f1b" if accumulation >= pp else "gpipe"
        if vp > 1 and accumulation % max(1, accumulation // pp) == 0:
            schedule, chunks = "interleaved-1f1b", vp
    width = {"fp8": "fp8", "fp4": "fp4"}.get(precision(row), "bf16")
    states = frame.states
    if "PURE" in row["notes"] or (frame.name == "mosaic" and row["precision"] == "bf16"):
        states = states._replace(reduce=2)
    share = recomputed(row) or 0.0
    candidate = Candidate(
        mesh=mesh,
        micro_batch=micro,
        accumulation=accumulation,
        starts=starts(made, pp * chunks, frame.name == "nanotron"),
        schedule=schedule,
        chunks=chunks,
        shard_level=level,
        recompute="none" if share == 0 else "full",
        keep=1 - share,
        bucket_bytes=frame.bucket_bytes,
        sequence_parallel=row["seq_parallel"] == "yes" and tp > 1,
        precision=width,
        states=states,
        expert=ep,
        overlap_gradients=frame.overlap_gradients,
        overlap_weights=frame.overlap_weights,
    )
    step = rate_to_step(row, tokens, candidate.global_batch, world, None)
    oom = "OOM" in row["notes"] or "OUT OF MEMORY" in row["notes"]
    if tp > 1 and pp > 1:
        frame = frame._replace(
            software=frame.software._replace(kernels=frame.software.kernels + frame.piped * tp * (1.3 if tp > 8 else 1))
        )
    return Case(
        row,
        index,
        made,
        frame,
        tokens,
        gpu(row),
        int(number(row, "gpus_per_node", 8)),
        world,
        candidate,
        row["recompute"] or None,
        step,
        number(row, "peak_memory_gib"),
        oom,
        width,
    )
