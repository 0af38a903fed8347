"""What is priced: a plan, and what the engine does not run yet but published runs use (experts, context, fp8)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from shoal.plan.codec import Codec
from shoal.plan.mesh import Mesh


class States(NamedTuple):
    """Bytes per parameter of a training recipe. ``weight``: as held between steps; ``compute``: of a copy that is
    made for computing (0: computes with ``weight`` itself); ``gradient``; ``optimizer``: moments and, where kept
    apart, float32 master weights; ``reduce``: of a gradient in a collective (0: as it is held); ``step``: made by a
    step of the optimizer for what a rank updates and gone after it (fused optimizers: 0).

    Shoal: float32 weights 4, gradients 4, Adam 8, and autocast's copies of 2. Megatron-LM, bf16: 2, gradients 4, 12.
    """

    weight: float = 4
    compute: float = 0
    gradient: float = 4
    optimizer: float = 8
    reduce: float = 0
    step: float = 0

    @property
    def sent(self) -> float:
        """Bytes of a gradient's number in a collective."""
        return self.reduce or self.gradient


class Candidate(NamedTuple):
    """One way to run a model. ``mesh.context`` and ``expert`` may exceed what the engine runs; experts are divided
    within the data ranks. ``starts``: index of the first block of every stage. ``shard_level``: 1 shards optimizer
    state, 2 gradients too, 3 weights too, over ``mesh.shard``. ``keep``: share of blocks that are not
    recomputed. ``first_bucket_bytes``: of the engine's first bucket of gradients, which starts the links early.
    ``overlap_gradients``, ``overlap_weights``: whether reducing gradients hides behind the last backward, and gathering
    weights that the optimizer updated in shards behind the next forward. ``overlap_tensor``: with sequence parallelism,
    tensor collectives go chunk by chunk beside the products that need them (Transformer Engine's userbuffers,
    https://docs.nvidia.com/nemo-framework/user-guide/latest/nemotoolkit/features/optimizations/communication_overlap.html;
    torch's async tensor parallelism). ``overlap_expert``: experts' rows travel while another micro-batch
    computes (DualPipe, https://arxiv.org/abs/2412.19437). ``offload_activations``: what blocks keep for their
    backward lies on the host meanwhile. ``shard_all``: what is sharded is shared out among all ranks that hold the same
    weights: context ranks too, and of experts tensor ranks (Megatron-LM's distributed optimizer). ``blocking_s``: for
    which a message from or to another stage holds up its rank. ``gradient_buffers``: gradients have their room all step
    long; else it is made in the backward, and with one micro-batch what was kept for the backward is gone by then.
    ``codec``: in which gradients of replicated weights travel; no search chooses one, as it changes the numbers."""

    mesh: Mesh
    micro_batch: int
    accumulation: int
    starts: tuple[int, ...] = (0,)
    schedule: str | None = None
    chunks: int = 1
    shard_level: int = 3
    recompute: Literal["none", "selective", "full"] = "none"
    sequence_parallel: bool = False
    cpu_offload: bool = False
    precision: str = "fp32"
    states: States = States()
    expert: int = 1
    bucket_bytes: float = 25 * 2**20
    first_bucket_bytes: float = 2**20
    keep: float = 0.0
    overlap_gradients: bool = True
    overlap_weights: bool = False
    overlap_tensor: bool = False
    overlap_expert: bool = False
    offload_activations: bool = False
    shard_all: bool = False
    blocking_s: float = 0.0
    gradient_buffers: bool = True
    codec: Codec | None = None

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.mesh.replicate * self.mesh.shard

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.accumulation * self.data_ranks

    @property
    def world(self) -> int:
        """Ranks."""
        return math.prod(self.mesh.degrees.values())


class Memory(NamedTuple):
    """Bytes on one rank at the moment of its step that needs most (``moment``: forward, loss, backward, optimizer)."""

    rank: int
    moment: str
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    overhead: float

    @property
    def total_bytes(self) -> float:
        """All categories."""
        return sum(value for value in self[2:])


class Cost(NamedTuple):
    """Seconds of one step, of the rank that is busiest; the parts add up to ``step_s``. ``bubble_s``: waiting in the
    pipeline. The four ``_s`` of axes are communication that compute does not hide. ``rest_s``: launches that the
    device waits for, data, logging."""

    compute_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    pipeline_s: float
    shard_s: float
    replicate_s: float
    bubble_s: float
    optimizer_s: float
    rest_s: float

    @property
    def step_s(self) -> float:
        """All parts."""
        return sum(self)
