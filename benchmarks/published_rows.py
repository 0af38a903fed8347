"""A published row -> what was run (shape, software, plan, hardware) and what was measured."""

import csv
import math
import re
from typing import NamedTuple

from published_cells import clean, number, precision, recomputed, says, sharding, whole
from published_models import MODELS
from published_systems import PYTORCH, Skip, System, cut, device_name, hardware, limited, network, stated_bytes, system

from shoal.cluster.facts import Cluster
from shoal.plan.candidate import Candidate
from shoal.plan.mesh import Mesh
from shoal.plan.shapes import Experts, Shape, Software

COLUMNS = (
    "source", "section", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gpu",
    "n_gpus", "gpus_per_node", "tp", "pp", "vp", "cp", "ep", "dp", "sharding", "micro_batch", "global_batch_sequences",
    "precision", "recompute", "seq_parallel", "compile", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "step_time_s",
    "peak_memory_gib", "notes",
)  # fmt: skip
FLAGS = ("SUSPECT", "PROXY", "MULTIMODAL", "LoRA")
#: GPT-2's vocabulary, which Megatron-LM's tests use where their configuration names none.
GPT2_VOCAB = 50257
#: Llama 2's vocabulary, where a younger model's is not published.
LLAMA_VOCAB = 32000
FUSED = Software()
#: Tried where a table does not say: micro-batches, and most chunks of a pipeline's rank.
MICRO_BATCHES, CHUNKS = (16, 8, 4, 2, 1), 8
HEAD = 128  # width of a head in models of 1 billion parameters and more
#: Layers and hidden width of published sizes: GPT-3's, https://arxiv.org/abs/2005.14165 table 2.1, Llama's,
#: https://arxiv.org/abs/2302.13971 table 2, and Megatron-LM's, https://arxiv.org/abs/2104.04473 table 1.
LADDER = (
    (12, 768), (24, 1024), (24, 1536), (24, 2048), (32, 2560), (32, 4096), (40, 5120), (60, 6656), (80, 8192),
    (60, 10240), (96, 12288), (126, 16384), (105, 20480), (128, 25600),
)  # fmt: skip


class Case(NamedTuple):
    """One row. ``candidates``: those that the row leaves open, from the least recomputation on. ``rate``: the kind of
    figure published, its value; ``memory_gib``; ``oom``: it did not run."""

    row: dict
    shape: Shape
    system: System
    tokens: int
    cluster: Cluster
    candidates: tuple[Candidate, ...]
    rate: tuple[str, float] | None
    memory_gib: float | None
    oom: bool


def rows(path) -> list[dict]:
    """All rows of a CSV. Cells and columns that a file lacks are empty, as are those that say so. Where rows are said
    to be cumulative, the notes of a section's earlier rows count too."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        found = csv.DictReader(file)
        found.fieldnames = [name.strip().lower() for name in found.fieldnames or ()]
        made = [
            dict.fromkeys(COLUMNS, "") | {key: clean(value) for key, value in row.items() if key and key in COLUMNS}
            for row in found
        ]
    before: dict[str, str] = {}
    for row in made:
        if "cumulative" in row["notes"]:
            row["notes"] = f"{row['notes']}; {before.get(row['section'], '')}"
            before[row["section"]] = row["notes"]
    return made


def read(row) -> Case:
    """What a row says. Raises Skip."""
    text = " ".join((row["notes"], row["section"], row["model"]))
    for flag in FLAGS:
        if flag.lower() in text.lower():
            raise Skip(flag)
    oom = "OUT OF MEMORY" in text or "crashed or OOM" in text
    rate, memory = published_rate(row), number(row, "peak_memory_gib")
    if "ANALYTIC" in text or "estimat" in row["source"].lower():
        raise Skip("an estimate, not measured")
    if rate is None and memory is None and not oom:
        raise Skip("neither a time nor a rate")
    if "unpacked" in row["notes"].split(";")[0]:
        raise Skip("length of samples not published")
    shape, found = shape_of(row), system(row)
    mesh, level, world = mesh_of(row)
    found = in_place(with_layer_norms(found, shape, row), mesh, world)
    name, (speed, efa) = device_name(row), network(row)
    cluster = hardware(name, whole(row, "gpus_per_node", 8), speed, efa, world, cut(row), stated_bytes(row))
    cluster = found.on(cluster.model_copy(update={"device": limited(cluster.device, name, row)}))
    return Case(
        row=row,
        shape=shape,
        system=found,
        tokens=whole(row, "seq_len", 2048),
        cluster=cluster,
        candidates=candidates_of(row, shape, found, mesh, level, cluster),
        rate=rate,
        memory_gib=memory,
        oom=oom,
    )


def published_rate(row) -> tuple[str, float] | None:
    """The figure that says most about the step's time."""
    if "overhead dominated" in row["section"]:
        return None
    for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"):
        value = number(row, name)
        if value and value > 0:
            return name, value
    return None


#: Tensors that eager models of Hugging Face's transformers read and write where others start one kernel: eight of
#: "gelu_new" (activations.py), and per attention score a product, its scaling, mask, softmax and dropout.
GELU_NEW, SCORES = 18, 10


def with_layer_norms(found: System, shape: Shape, row) -> System:
    """Models with two feed-forward products have LayerNorm and GELU, each one kernel in eager PyTorch too. The GPT
    of Megatron-LM, with learned positions, drops out a tenth of each residual by default (its arguments.py)."""
    software, text = found.software, " ".join((row["source"], row["section"], row["notes"])).lower()
    if found.name == "megatron" and not shape.gated and shape.learned:
        return found._replace(software=software._replace(dropout=True))
    if shape.gated or software.norm <= FUSED.norm:
        return found
    software = software._replace(norm=FUSED.norm, norm_kept=FUSED.norm_kept)
    if re.search(r"\bhf\b|hugging ?face|transformers", text):
        software = software._replace(gelu=GELU_NEW, scores=SCORES)
    return found._replace(software=software)


def in_place(found: System, mesh: Mesh, world: int) -> System:
    """nanotron keeps gathered inputs where it has no pipeline, and waits for tensor collectives where it has one; there
    messages between stages block their ranks with tensor groups over more than two nodes, or more than 256 devices.
    torch's loss over parts of the classes holds log-probability, gradient, exponential and their sum in float32, and
    what its column-wise layers gathered is kept."""
    software = found.software
    if found.name in PYTORCH and mesh.tensor > 1:  # torch/distributed/tensor/parallel/loss.py
        return found._replace(software=software._replace(loss_kept=18, regathers=False))
    if not found.piped_kernels:
        return found
    if mesh.tensor <= 16 and world <= 256:
        found = found._replace(blocking_s=0.0)
    if mesh.pipeline == 1:
        return found._replace(software=software._replace(regathers=False))
    extra = found.piped_kernels * mesh.tensor * (mesh.tensor > 1) * (1.3 if mesh.tensor > 8 else 1.0)
    return found._replace(software=software._replace(kernels=software.kernels + extra))


def mesh_of(row) -> tuple[Mesh, int, int]:
    """The mesh, what is sharded (level), and the number of devices. Raises Skip."""
    tensor, pipeline, context = (whole(row, key) for key in ("tp", "pp", "cp"))
    layout = sharding(row)
    data, world = number(row, "dp"), number(row, "n_gpus")
    if world is None and data is None:
        stated = re.findall(r"(\d+)(?:/(\d+))*(?:/\d+)* H100", row["notes"])
        if layout != "none" and not stated:
            raise Skip("number of devices not published")
        numbers = re.search(r"((?:\d+/)+\d+) H100", row["notes"])
        world = int(numbers[1].split("/")[-1]) if numbers else tensor * pipeline * context
    world = int(world or (data or 1) * tensor * pipeline * context)
    ranks = max(1, world // (tensor * pipeline * context))
    group = re.search(r"zero1 group=(\d+)", row["notes"])
    shard = {"none": 1, "hsdp": min(8, ranks)}.get(layout, int(group[1]) if group else ranks)
    shard = math.gcd(shard, ranks)
    gathered = 2 if pipeline > 1 else 3  # in a pipeline weights stay gathered
    level = {"none": 1, "zero1": 1, "zero2": 2}.get(layout, gathered)
    mesh = Mesh(pipeline=pipeline, replicate=ranks // shard, shard=shard, context=context, tensor=tensor)
    return mesh, level, world


def candidates_of(row, shape: Shape, found: System, mesh: Mesh, level: int, cluster: Cluster) -> tuple[Candidate, ...]:
    """What the row leaves open, least recomputation and largest micro-batch first. Raises Skip."""
    notes, states = row["notes"].lower(), found.states
    if found.name == "mosaic" and row["precision"] == "bf16":
        states = states._replace(reduce=2)  # MosaicML's PURE: gradients too travel in bf16
    activations = re.search("activation offload|fine.grained.offload", notes) is not None
    made = []
    for again in shares(row, found):
        for micro, accumulation, chunks in batches(row, shape, found, mesh):
            schedule, parts = schedule_of(mesh.pipeline, chunks, accumulation)
            made.append(
                Candidate(
                    mesh=mesh,
                    micro_batch=micro,
                    accumulation=accumulation,
                    starts=starts(shape, mesh.pipeline * parts, found.cuts),
                    schedule=schedule,
                    chunks=parts,
                    shard_level=level,
                    recompute="full" if again else "none",
                    keep=1 - again,
                    # Megatron-LM runs experts beside tensor parallelism only with sequence parallelism
                    sequence_parallel=mesh.tensor > 1 and splits_positions(row, shape, found),
                    precision=precision(row, cluster.device),
                    states=states._replace(optimizer=0) if "SGD" in row["notes"] else states,
                    expert=whole(row, "ep") * divided(row),
                    bucket_bytes=found.bucket_bytes,
                    overlap_gradients=found.overlap_gradients,
                    overlap_weights=found.overlap_weights,
                    overlap_tensor=found.overlap_tensor or re.search(r"async[ -]?t(p|ensor)", notes) is not None,
                    overlap_expert=re.search(r"a2a overlap|dualpipe", notes) is not None,
                    offload_activations=activations,
                    shard_all=row["sharding"] not in ("", "none"),
                    gradient_buffers=found.gradient_buffers,
                    blocking_s=found.blocking_s,
                    cpu_offload=re.search(r"(cpu|parameter|optimizer) offload(?! false)", notes) is not None,
                )
            )
    if found.offloads and len({plan.keep for plan in made}) > 1:
        made.append(made[-1]._replace(offload_activations=True))
    return tuple(made)


def divided(row) -> int:
    """Ranks that each expert is divided over (expert tensor parallelism)."""
    said = re.search(r"\bETP ?(\d+)|\betp=(\d+)", row["notes"])
    return int(said[1] or said[2]) if said else 1


def shares(row, found: System) -> list[float]:
    """Shares of the layers that may have been recomputed, the least first."""
    share = recomputed(row, found.name.startswith("megatron"))
    share = 0.0 if "operations" in found.software.again else share
    share = found.recomputed if share is None else share
    if share is None:
        return [step / 4 for step in range(found.recompute_steps + 1)]
    return [share, min(1.0, share + doubt(row))] if 0 < share < 1 and doubt(row) else [share]


def doubt(row) -> float:
    """Share of the layers that the rounding of published utilisations may hide."""
    found = re.search(r"HFU ([\d.]+)", row["notes"])
    if not found or not number(row, "mfu"):
        return 0.0
    halves = [0.5 * 10.0 ** -len(text.partition(".")[2]) for text in (found[1], row["mfu"].rstrip("% "))]
    return 3 * (
        (float(found[1]) + halves[0]) / (number(row, "mfu", 0.0) - halves[1])
        - float(found[1]) / number(row, "mfu", 1.0)
    )


def batches(row, shape: Shape, found: System, mesh: Mesh) -> list[tuple[int, int, int]]:
    """Micro-batch, micro-batches and chunks per rank: as stated, else all that are usual. Who leaves the micro-batch
    open leaves interleaving open too; a batch that is not published is one micro-batch, of a pipeline four per stage.
    """
    ranks, pipeline = mesh.shard * mesh.replicate, mesh.pipeline
    stated, batch = int(number(row, "micro_batch") or 0), number(row, "global_batch_sequences")
    chunks = [whole(row, "vp")]
    if not stated and not row["vp"] and pipeline > 1 and found.name == "megatron":
        slots = shape.layers if shape.layers % pipeline == 0 else shape.layers + 2
        chunks = [n for n in range(1, CHUNKS + 1) if n == 1 or slots % (pipeline * n) == 0]
    made = []
    if not stated and found.name in PYTORCH and pipeline > 1 and batch:  # torchtitan's pipelining_utils.py: as many
        return [(max(1, round(batch / (ranks * pipeline))), pipeline, parts) for parts in chunks]  # as it has stages
    for micro in (stated,) if stated else MICRO_BATCHES:
        usual = micro * ranks * (4 * pipeline if pipeline > 1 else 1)
        accumulation = max(1, round((batch or usual) / (micro * ranks)))
        if micro in (stated, 1) or not batch or micro * ranks <= batch:
            made += [(micro, accumulation, parts) for parts in chunks]
    return made


def splits_positions(row, shape: Shape, found: System) -> bool:
    """Whether tensor ranks share positions out: by the cell; where it is empty, as the system does by itself."""
    said = says(row, "seq_parallel")
    return shape.experts is not None or (found.splits_positions if said is None else said)


def schedule_of(pipeline: int, chunks: int, accumulation: int) -> tuple[str | None, int]:
    """The schedule and chunks per rank; with fewer micro-batches than stages 1F1B is GPipe."""
    if pipeline == 1:
        return None, 1
    if chunks > 1 and accumulation % max(1, accumulation // pipeline) == 0:
        return "interleaved-1f1b", chunks
    return ("1f1b" if accumulation >= pipeline else "gpipe"), 1


def starts(shape: Shape, stages: int, cuts: str = "") -> tuple[int, ...]:
    """First block of each stage; blocks: embedding, layers, head. Raises Skip.

    ``cuts``: "cost": on to the next stage once a stage's part of the products' FLOPs is reached; "last": the same
    number of layers, and one more for the last stages. Else an equal number of layers, or of layers with embedding and
    head counted in, as Megatron-LM cuts.
    """
    layers = shape.layers
    if stages == 1:
        return (0,)
    if cuts == "cost":
        layer = 4 * shape.heads * shape.head * shape.hidden + 3 * shape.hidden * shape.ffn
        costs = [0, *([layer] * layers), shape.vocab * shape.hidden]
        found, run = [0], 0
        for index, cost in enumerate(costs[:-1]):
            run += cost
            if run >= sum(costs) * len(found) / stages:
                found.append(index + 1)
        return (*found, *([found[-1]] * (stages - len(found))))[:stages]
    if cuts != "last" and layers % stages and (layers + 2) % stages == 0:
        return tuple(range(0, layers + 2, (layers + 2) // stages))
    if stages > layers:
        raise Skip("more stages than layers")
    each, rest = divmod(layers, stages)
    if cuts == "last":
        return (0, *(1 + each * stage + max(0, stage + rest - stages) for stage in range(1, stages)))
    return (0, *(1 + round(layers * stage / stages) for stage in range(1, stages)))


def shape_of(row) -> Shape:
    """The model's shape, from the cells or from the table of public ones. Raises Skip."""
    name = re.sub(r"[^a-z0-9.]", "", row["model"].lower().replace("sft", "")).replace("a22b", "").replace("a3b", "")
    known = MODELS.get(max((key for key in MODELS if key in name), key=len, default=""))
    if not number(row, "hidden") or not number(row, "layers"):
        return known or by_count(row, name)
    if known is not None and known.layers == number(row, "layers") and known.hidden == number(row, "hidden"):
        return known
    return from_cells(row, name)


def is_old(name: str) -> bool:
    """Whether a model of that name has two feed-forward products and learned positions, as GPT-3."""
    return any(word in name for word in ("mpt", "gpt", "opt", "bloom", "turing", "mtnlg"))


def by_count(row, name: str) -> Shape:
    """A dense transformer of the published number of parameters: the width of the nearest published size, as many
    layers as give the number. Raises Skip where there is no number, or where experts hide how it is made up."""
    stated = re.search(r"(?<![\w.])(\d+(?:\.\d+)?) ?-?([mbt])(?![a-z])", row["model"].lower())
    unit = {"m": 1e6, "b": 1e9, "t": 1e12}[stated[2]] if stated else 0
    count = 1e9 * (number(row, "params_b") or 0) or (float(stated[1]) * unit if stated else 0)
    mixed = re.search(r"moe|expert|mixtral|\d+x\d|-a\d|hybrid|mamba", f"{row['model']} {row['notes']}".lower())
    if not count > 0 or mixed or whole(row, "ep") > 1:
        raise Skip("shape not published")

    def shape(layers: int, hidden: int) -> Shape:
        old = is_old(name)
        ffn = 4 * hidden if old else -(-8 * hidden // 3 // 256) * 256
        heads = hidden // HEAD if hidden >= 2048 else hidden // 64
        made = Shape(row["model"], layers, hidden, heads, heads, ffn, GPT2_VOCAB if old else LLAMA_VOCAB, gated=not old)
        return made._replace(learned=whole(row, "seq_len", 2048) if old else 0)

    near = min((shape(*size) for size in LADDER), key=lambda made: abs(math.log(made.parameters / count)))
    layer = (near.parameters - near._replace(layers=0).parameters) / near.layers
    rest = near._replace(layers=0).parameters
    return near._replace(layers=max(1, round((count - rest) / layer)))


def from_cells(row, name: str) -> Shape:
    """A shape from its cells; gated or not and tied or not as the count of parameters says, else by family."""
    notes = row["notes"]
    hidden, layers = whole(row, "hidden"), whole(row, "layers")
    heads = whole(row, "heads", hidden // HEAD or 1)
    old = is_old(name)
    ffn = whole(row, "ffn", 4 * hidden)
    vocab = whole(row, "vocab", GPT2_VOCAB if old or "golden" in row["section"] else LLAMA_VOCAB)
    stated = re.search(r"experts=(\d+) topk=(\d+) moe_ffn=(\w+)", notes)
    experts = None
    if stated:
        wide = ffn if stated[3] == "None" else int(stated[3])
        experts = Experts(int(stated[1]), int(stated[2]), wide)
    if "hybrid" in notes or "multi-latent" in notes or "mtp" in notes:
        raise Skip("shape not published")
    made = Shape(row["model"], layers, hidden, heads, whole(row, "kv_heads", heads), ffn, vocab, experts=experts)
    positions = whole(row, "seq_len", 2048) if old and "rope" not in notes else 0
    made = made._replace(learned=positions)
    count = (number(row, "params_b", 0) or 0) * 1e9
    if not count or experts:
        return made._replace(gated="swiglu" in notes or not old, tied=old and "untie-embeddings" not in notes)
    options = [
        made._replace(gated=gated, tied=tied)
        for gated in ((False,) if old else (True, False))
        for tied in (True, False)
    ]
    return min(options, key=lambda option: abs(option.parameters - count))
