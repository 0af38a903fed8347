"""What published training systems do apart from their plans, and which hardware a row names: all constants.

Every constant is a property of the software as it was released, with how it was found; docs/planning.md lists them with
the errors that they leave. Nothing here depends on a file or a row.
"""

import re
from functools import cache
from typing import NamedTuple

from shoal.cluster.facts import Cluster, Device
from shoal.cluster.presets import names, networks, preset
from shoal.plan.candidate import States
from shoal.plan.shapes import Software


class Skip(Exception):
    """Why a row is not predicted."""


class System(NamedTuple):
    """A training system. ``reserved``: device memory its allocator takes over what tensors need, alone and in a
    pipeline. ``piped_kernels``: host time of tensor collectives in a pipeline, in kernel starts per rank and block.
    ``recompute_steps``: quarters of all layers that it recomputes at most. ``workspace_bytes``: on every device, beyond
    tensors, before Hopper and since. ``overlap_tensor``, ``gradient_buffers``, ``blocking_s``: as a Candidate's; the
    last holds where ``in_place`` says. ``hopper``: constants of the H100 and H200 that its kernels reach,
    where they are not PyTorch's. ``splits_positions``: tensor ranks share positions out, where a row does not say.
    ``stranded``: bytes per parameter a rank updates that its step frees in pieces too
    small for what comes next: the allocator keeps them as long as the device has room. ``cuts``: a pipeline's stages,
    as ``starts`` says. ``recomputed``: share of the layers, where a row does not say (None: as few as fit);
    ``chunks_loss``: float32 for an eighth of the logits at a time.
    ``offloads``: to the host what layers keep, where recomputing does not do."""

    name: str
    software: Software
    states: States
    overlap_gradients: bool = True
    overlap_weights: bool = True
    bucket_bytes: float = 25 * 2**20
    reserved: tuple[float, float] = (1.05, 1.05)
    cuts: str = ""
    piped_kernels: float = 0.0
    recompute_steps: int = 4
    workspace_bytes: tuple[float, float] = (0.0, 0.0)
    overlap_tensor: bool = False
    gradient_buffers: bool = True
    blocking_s: float = 0.0
    hopper: dict[str, float] = {}
    splits_positions: bool = False
    stranded: float = 0.0
    recomputed: float | None = None
    chunks_loss: bool = False
    offloads: bool = False
    first_word: tuple[str, ...] = ()

    def workspaces(self, device: Device) -> float:
        """Bytes on a device."""
        return self.workspace_bytes[not any(name in device.name for name in ("A100", "V100", "RTX", "L40S"))]

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster as this system's kernels use it."""
        device = cluster.device
        if "H100" not in device.name and "H200" not in device.name:
            return cluster
        faster = device.model_copy(update=self.hopper)
        return cluster.model_copy(update={"device": faster})


#: Eager SwiGLU: silu and product apart. Eager RMSNorm and rotation: ten kernels each, most of them in float32; the norm
#: keeps its input in float32 and what it scales. Keys and values of fewer heads are copied to all. Of each logit the
#: loss's backward holds log-probability and two gradients, in float32; its kernels read and write a logit 36 bytes:
#: cast (6), log-softmax (8), its two backwards (4 and 12), cast (6).
#: https://github.com/pytorch/torchtune torchtune/modules/rms_norm.py, attention.py; torch's cross_entropy.
_EAGER = Software(
    activation=5, activation_kept=3, norm=24, norm_kept=3, rope=18, expands=True, loss_kept=12, loss_bytes=36
)
_COMPILED = Software(expands=True, loss_kept=12)
#: It recomputes single modules (norms, activations, up-projections): at most half of a layer's work. It keeps logits in
#: bf16 and their softmax in float32; on Hopper Transformer Engine's attention is as fast as FlashAttention 3,
#: https://github.com/stas00/ml-engineering/blob/744d01e1/insights/when-to-upgrade-gpus/README.md (447 TFLOP/s in a
#: step); workspaces: of cuBLAS (8 MiB, since Hopper 32) and Transformer Engine (4 MiB, 32: cpp_extensions/gemm.py), and
#: 48 MiB that the golden values show besides on both.
#: Products in NeMo: the best measured rate (compute/accelerator/README.md#L354 there); their half fits GPT-3 175B,
#: Llama 3.1 8B to 405B and Nemotron-4 340B (https://github.com/NVIDIA/dgxc-benchmarking/tree/143b90dd).
HOPPER = {"attention_share": 0.452, "matmul_share": 0.803, "matmul_half": 400}
#: Megatron-LM alone: for GPT-3 175B its README has 47 % of the peak where NeMo has 53.5 %.
HOPPER_PLAIN = HOPPER | {"matmul_share": 0.74}
#: Bytes of a logit that cross-entropy over parts of the vocabulary reads and writes: cast (6), maximum (4), minus it,
#: exponential, sum, quotient (28), gradient and cast back (14). megatron/core/tensor_parallel/cross_entropy.py, and
#: nanotron's parallel/tensor_parallel/functional.py, which is taken from it.
PARALLEL_LOSS = 52
_MEGATRON = System(
    "megatron", Software(kernels=30, grouped=1.0, expert_kernels=80, loss_kept=6, loss_bytes=PARALLEL_LOSS),
    States(2, 0, 4, 12), bucket_bytes=160e6, recompute_steps=2, workspace_bytes=(60 * 2**20, 112 * 2**20),
    hopper=HOPPER_PLAIN, first_word=("megatron",),
)  # fmt: skip
#: The block of the bf16 logits (2) lies idle beside those in float32: nothing asks for one of its size. Gradients of
#: keys and values go round in float32 (torch/distributed/tensor/experimental/_attention.py).
_FSDP = System(
    "fsdp", _EAGER._replace(loss_kept=14, ring_gradient=4), States(4, 2, 4, 8, 2), gradient_buffers=False,
    splits_positions=True, first_word=("fsdp",),
)  # fmt: skip
#: Systems of PyTorch's own wrappers.
PYTORCH = ("fsdp", "torchtitan")
SYSTEMS = (
    System(
        # RMSNorm fused, SwiGLU not; float32 gradients accumulated, then reduced without overlap in large buckets.
        # kernels: floor of 4.4 ms per block at tensor 2 to 8 and micro-batch 1; piped_kernels: floor of 8.5, 13, 20 ms
        # at tensor 2, 4, 8 in a pipeline; reserved: median over the memory column.
        "nanotron",
        Software(activation=5, activation_kept=3, residual=3, loss_kept=14, loss_bytes=PARALLEL_LOSS, kernels=310),
        States(2, 0, 4, 12),
        overlap_gradients=False,
        overlap_weights=False,
        bucket_bytes=0.75e9,
        reserved=(1.05, 1.2),
        workspace_bytes=(0.3 * 2**30, 0.3 * 2**30),
        cuts="cost",
        piped_kernels=147,
        blocking_s=0.25,
        first_word=("nanotron", "ultrascale"),
    ),
    System(
        # Eager attention with dropout; kernels: floor of 3.4 ms per block, forward, recompute and backward.
        "megatron-deepspeed",
        Software(flash=False, dropout=True, kernels=162, scores=5, loss_bytes=PARALLEL_LOSS),
        States(2, 0, 2, 12),
        overlap_gradients=False,
        first_word=("megatron-deepspeed", "vtrain", "gpt-neox"),
    ),
    # NeMo and Megatron-Bridge on top of it overlap tensor collectives with Transformer Engine's products, keep and
    # reduce gradients in bf16, and offload what layers keep (grad_reduce_in_fp32, cpu_offloading_num_layers).
    _MEGATRON._replace(
        states=States(2, 0, 2, 12), overlap_tensor=True, splits_positions=True, offloads=True, hopper=HOPPER,
        first_word=("nemo", "megatron-bridge", "megascale"),
    ),
    _MEGATRON,
    # Cross-entropy fused: bf16 logits and their gradient are all that is kept.
    System("mosaic", Software(skips=False, loss_kept=4), States(4, 2, 4, 8), first_word=("mosaic", "llm-foundry")),
    # Its step copies the rank's gradients to float32 in one piece (4) and torch's AdamW (up to 2.0) makes sqrt and
    # denominator as large (8), while the bf16 gradients (2) are gone. What lay in pieces is not given out again for
    # these: the gradients, their float32 copies for the norm (4), their flat bf16 copy (2). Logits: float32, and three
    # such copies for the accuracy it reports. internlm/solver/optimizer/hybrid_zero_optim.py, model/metrics.py.
    System(
        "internevo", _EAGER._replace(norm_kept=2, loss_kept=16), States(2, 0, 2, 12, step=10), stranded=8, cuts="last",
        first_word=("internevo", "internlm"),
    ),
    # Weights, gradients and Adam in bf16; its configurations checkpoint every layer and cut the loss into eight chunks,
    # of which one at a time is in float32.
    System(
        "torchtune", _EAGER, States(2, 0, 2, 4), gradient_buffers=False, recomputed=1.0, chunks_loss=True,
        first_word=("torchtune",),
    ),
    # ZeRO: bf16 weights and gradients, float32 for the optimizer, gradients flattened and cast for its step (4), in
    # buckets of 5e8 numbers. https://deepspeed.readthedocs.io/en/latest/memory.html: 4 bytes and 16 shared out.
    System(
        "deepspeed", _EAGER, States(2, 0, 2, 12, step=4), bucket_bytes=1e9, splits_positions=True,
        first_word=("deepspeed",),
    ),
    # As FSDP, but gradients are reduced in float32.
    _FSDP._replace(name="torchtitan", states=States(4, 2, 4, 8), first_word=("torchtitan",)),
    _FSDP,
)  # fmt: skip
#: internlm/solver/optimizer/fsdp_optimizer.py: FSDP's bf16 gradients stay; units' float32 copies take the places of
#: those for the norm.
INTERNEVO_STEP_FSDP = 12


#: Year and month of fused attention, https://arxiv.org/abs/2205.14135: papers before it had none. It needs an A100.
FUSED_ATTENTION = 2206
#: Bytes of a weight's copies in fp8, one of them transposed, which Transformer Engine keeps over a step's micro-batches
#: (is_first_microbatch), https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
NARROW_COPIES = 2


def system(row) -> System:
    """Of the names that a row's source, section and notes contain, the first; else by whether layers are divided."""
    text = " ".join((row["source"], row["section"], row["notes"])).lower()
    named = [one for one in SYSTEMS if any(word in text for word in one.first_word)]
    divided = any(row[axis] not in ("", "1") for axis in ("tp", "pp", "ep"))
    found = named[0] if named else _MEGATRON if divided else SYSTEMS[-1]
    if "pure bf16" in row["precision"] or row["precision"] == "bf16-true":  # weights, gradients and Adam in bf16
        found = found._replace(states=States(2, 0, 2, 4))
    if found.name == "internevo" and row["sharding"] == "zero3":
        found = found._replace(states=found.states._replace(step=INTERNEVO_STEP_FSDP), stranded=0.0)
    fused = r"fused (layer.?norm|rms.?norm|norm|dropout|swiglu|kernels)|liger|unsloth|torch\.compile|maxtext|\bjax\b"
    compiled = row["compile"].lower() in ("yes", "true", "1") or re.search(fused, text) is not None
    if found.name in (*PYTORCH, "torchtune") and compiled and row["compile"].lower() != "no":
        found = found._replace(software=compiled_software(found, row))
    if found.name in (*PYTORCH, "torchtune") and by_operation(row):
        found = found._replace(software=found.software._replace(again=("operations",)))
    alone = re.search("select|attn|attention", row["recompute"].lower())
    named = re.search(r"recompute ([^;]+)", row["notes"])  # which modules are
    others = named is not None and not re.search("attn|attention", named[1])
    if found.name.startswith("megatron") and alone and not others:
        found = found._replace(software=found.software._replace(again=("attention",)))
    if found.name == "megatron-deepspeed" and "bf16" in row["precision"]:
        found = found._replace(states=States(2, 0, 6, 12, 4))  # DeepSpeed adds bf16 gradients up in float32
    narrow = re.search("(fp|float)[48]", row["precision"].lower())
    if found.name == "megatron" and narrow and not re.search("native.fp8|fp8.param", row["notes"].lower()):
        found = found._replace(states=found.states._replace(weight=found.states.weight + NARROW_COPIES))
    old = re.search(r"arxiv\D{0,12}(\d{4})\.\d", row["source"].lower())
    early = old is not None and int(old[1]) < FUSED_ATTENTION or "V100" in row["gpu"].upper()
    if early and "flash" not in row["notes"].lower():
        found = found._replace(software=found.software._replace(flash=False, dropout=True))
    return with_notes(found, row["notes"].lower())


def by_operation(row) -> bool:
    """Whether selective checkpointing is torchtitan's, of single operations, not of every second layer."""
    cell = row["recompute"].lower()
    if "HFU" in row["notes"]:  # which says how much was computed again
        return False
    return cell == "selective" and "block" not in row["notes"] or re.search(r"\bop\b", cell) is not None


#: When torchtitan came to compile the loss where it compiles the model: gradients of bf16 logits then are bf16, and
#: nothing is kept in float32. https://github.com/pytorch/torchtitan/pull/1033
COMPILES_LOSS = (2025, 4)


def compiled_software(found: System, row) -> Software:
    """Kernels of a compiled model of PyTorch; by the month that its source names (none: young) its loss too."""
    if found.chunks_loss:
        return _COMPILED._replace(loss_kept=10)
    dated = re.search(r"20(2\d)-?(0\d|1[0-2])", row["source"])
    loss = dated is None or (2000 + int(dated[1]), int(dated[2])) >= COMPILES_LOSS
    if found.name == "torchtitan":
        found = found._replace(software=found.software._replace(**({"loss_kept": 4, "loss_bytes": 16} if loss else {})))
    else:
        found = found._replace(software=found.software._replace(loss_bytes=_COMPILED.loss_bytes))
    kept = {name: getattr(found.software, name) for name in ("loss_kept", "loss_bytes", "ring_gradient")}
    return _COMPILED._replace(**kept)


#: What tables call the parts of a layer that are computed again.
AGAIN = {
    "norm": "layernorm", "layernorm": "layernorm", "act": "act", "moe_act": "act", "moe": "moe", "mlp": "mlp",
    "shared_expert": "shared", "shared_experts": "shared", "attn": "attention", "attention": "attention",
    "core_attn": "attention",
}  # fmt: skip


def with_notes(found: System, notes: str) -> System:
    """With what a row's notes say of its kernels and states."""
    software, states = found.software, found.states
    if said := re.search(r"recompute ((?:[a-z_]+[,+ ]+)*[a-z_]+)", notes):
        software = software._replace(
            again=tuple(
                sorted({*software.again, *(AGAIN[part] for part in re.split("[,+ ]+", said[1]) if part in AGAIN)})
            )
        )
    if re.search("transformer-impl=local|not fused|eager attention|(without|no) flash", notes):
        software = software._replace(flash=False, dropout=True)
    chunked = re.search("chunked cross.entropy|chunked loss", notes) is not None
    if chunked or (found.chunks_loss and "cumulative" not in notes):  # an ablation names its switches
        eager = 4 * (software.norm > 2)  # not compiled with the cast, log-probabilities of all chunks are kept
        software = software._replace(loss_kept=min(software.loss_kept, 2 + eager + software.loss_kept / 8))
    if re.search("8-?bit adam|8-?bit optimizer", notes):  # two moments, and a float32 scale for 256 of each
        states = states._replace(optimizer=2 + 8 / 256)
    if "paged" in notes:  # in memory that the host and the device share
        states = states._replace(optimizer=0)
    if re.search("optimizer.in.backward", notes):
        states = states._replace(gradient=0, reduce=states.sent)
    return found._replace(software=software, states=states)


#: What a row's device is called, and its preset.
DEVICES = {
    "GB300": "gb300", "GB200": "gb200", "B300": "b300", "B200": "b200", "GH200": "gh200", "H200": "h200",
    "H100": "h100", "H800": "h100", "H20": "h20", "V100": "v100-32gb", "L40S": "l40s",
    "4090": "rtx4090", "3090": "rtx3090", "MI300X": "mi300x", "MI325X": "mi325x", "MI355X": "mi355x",
}  # fmt: skip
#: Presets that are known with Amazon's network.
EFA = {f"{name}-efa" for name in names() if "efa" in networks(name)}
#: Devices of one NVLink domain that a job takes: whole trays of an NVL72 in powers of two.
NVL72 = 64
#: Names round a device's memory by less than this; what differs by more is another model of it.
MODEL = 0.1


def device_name(row) -> str:
    """The preset that a row's device is. Raises Skip."""
    text = row["gpu"].upper()
    found = next((preset_ for name, preset_ in DEVICES.items() if name in text), None)
    if found == "h100" and "PCIE" in text:
        found = "h100-pcie"
    if found == "v100-32gb" and "16" in text:
        found = "v100-16gb"
    if found is None and ("A100" in text or "A800" in text):
        found = "a100-40gb" if "40" in text else "a100-80gb"
    if found is None:
        raise Skip(f"device {row['gpu'] or 'not published'}")
    return found


def cut(row) -> float:
    """What is left of NVLink on devices made for export: 400 GB/s of the A100's 600 and the H100's 900."""
    text = row["gpu"].upper()
    return 400 / 600 if "A800" in text else 400 / 900 if "H800" in text else 1.0


def stated_bytes(row) -> int | None:
    """Device memory where the device's name states it (a GH200's may state its host's)."""
    found = re.search(r"(\d+) ?GI?B?\b", row["gpu"].upper())
    host = found is not None and "GH200" in row["gpu"].upper() and int(found[1]) > 200
    return int(found[1]) * 10**9 if found and int(found[1]) >= 8 and not host else None


#: Watts that a device may draw, where less is stated: clocks and rates fall with the cube root, since a chip's power
#: grows with clock times voltage squared, and the voltage with the clock.
#: https://www.nvidia.com/en-us/data-center/h100/, h200/, a100/
WATTS = {"h100": 700.0, "h200": 700.0, "a100-80gb": 400.0, "a100-40gb": 400.0, "b200": 1000.0, "mi300x": 750.0}


def limited(device: Device, name: str, row) -> Device:
    """The device as a row says that it runs: at how many watts, and how fast its memory is."""
    text = f"{row['gpu']} {row['notes']}"
    slower = {}
    if said := re.search(r"(?:HBM|memory)[^;,]{0,30}?([\d.]+) ?TB/s", text):
        slower["memory_bytes_per_s"] = float(said[1]) * 1e12
    if (said := re.search(r"(\d{3,4}) ?W\b", text)) and float(said[1]) < WATTS.get(name, 0.0):
        clock = (float(said[1]) / WATTS[name]) ** (1 / 3)
        slower["flops_per_s"] = {precision: rate * clock for precision, rate in device.flops_per_s.items()}
    return device.model_copy(update=slower)


@cache
def hardware(
    name: str,
    per_node: int,
    node_bytes_per_s: float | None,
    efa: bool,
    world: int,
    left: float = 1.0,
    memory_bytes: int | None = None,
) -> Cluster:
    """``world`` devices of a preset, ``per_node`` to a node; its network's speed and the device's memory where they are
    not the usual; ``left``: of the speed inside a node."""
    base = preset(f"{name}-efa" if efa and f"{name}-efa" in EFA else name)
    if memory_bytes and abs(memory_bytes / base.device.memory_bytes - 1) > MODEL:
        base = base.model_copy(update={"device": base.device.model_copy(update={"memory_bytes": memory_bytes})})
    if base.inside is not None and left < 1:
        base = base.model_copy(
            update={"inside": base.inside.model_copy(update={"bytes_per_s": base.inside.bytes_per_s * left})}
        )
    if name.startswith("gb"):
        per_node = NVL72
    between = base.between
    if node_bytes_per_s is not None and between is not None:
        between = between.model_copy(update={"bytes_per_s": node_bytes_per_s / per_node})
    nodes = -(-world // per_node)
    return base.model_copy(update={"devices_per_node": per_node, "nodes": nodes, "between": between})


def network(row) -> tuple[float | None, bool]:
    """Bytes per second of a node's network where the row states it, and whether it is Amazon's EFA."""
    text = f"{row['section']} {row['notes']}"
    efa = re.search(r"(?<!without )\bEFA\b", text) is not None or "nanotron" in row["source"]
    if found := re.search(r"([\d.]+) ?Gb(?:/s|ps)[^;,.]* per (?:GPU|device|rank|accelerator)", text):
        return float(found[1]) / 8 * float(row["gpus_per_node"] or 8) * 1e9, efa
    patterns = (
        (r"(\d+)x(\d+) Gb ", lambda m: int(m[1]) * int(m[2]) / 8),
        (r"(\d+)x(\d+) GB/s per node", lambda m: int(m[1]) * int(m[2])),
        (r"([\d.]+) Gb/s (?:inter|EFA|RoCE|per node)", lambda m: float(m[1]) / 8),
        (r"([\d.]+) Tb/s (?:inter|EFA|RoCE|per node)", lambda m: float(m[1]) * 125),
        (r"(\d+) Gbps node-node", lambda m: int(m[1]) / 8),
    )
    for pattern, giga in patterns:
        if found := re.search(pattern, text):
            return giga(found) * 1e9, efa
    return None, efa
