"""What one rank computes, holds and sends for one sample, block by block: all that pricing needs to know of a model.

A profile is for one way to divide a model over ranks that read the same samples (tensor degree, sequence parallelism,
context and expert degree) in one precision: its operations, weights and traffic are already one rank's own, so that
memory.py, time.py and search.py know nothing of roles. ``from_blueprint.py`` makes it of a traced model,
``transformer.py`` of shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import Field

from shoal.core.settings import Settings
from shoal.plan.codec import Matrix

#: Axes whose ranks read the same samples and exchange activations.
ActivationAxis = Literal["tensor", "context", "expert"]


class Op(NamedTuple):
    """One operation of a forward. ``m``, ``flops``, ``moved_bytes``, ``kept_bytes`` are per sample; a micro-batch of b
    samples has b times as much. A product is (m, k) x (k, n). ``moved_bytes``, ``fixed_bytes`` (of weights, per call):
    read and written by the forward; ``back_moved_bytes``, ``back_fixed_bytes``: by the backward; None: ``backward``
    times the forward's.
    ``kept_bytes``: newly kept for backward without recompute; ``kept_fixed_bytes``: per call, as cast weights are.
    ``backward``: backward FLOPs over forward FLOPs. ``launches``: kernels started in the forward; ``back_launches``: in
    the backward; None: as many. ``precision``: where it is not the profile's. ``causal``: attention that only looks
    back, whose ``flops`` count what the mask hides. ``call_bytes``: of arguments and results, where a device's measured
    function of that name goes before the traffic of kernels.
    """

    name: str
    kind: Literal["matmul", "attention", "memory"]
    m: float
    k: float
    n: float
    flops: float
    moved_bytes: float
    fixed_bytes: float
    kept_bytes: float
    backward: float
    launches: float
    kept_fixed_bytes: float = 0
    precision: str = ""
    causal: bool = False
    back_moved_bytes: float | None = None
    back_fixed_bytes: float = 0
    back_launches: float | None = None
    call_bytes: float | None = None


class Traffic(NamedTuple):
    """A collective among ranks that read the same samples. ``bytes``: of the whole buffer, per sample and pass.
    ``copies``: of each row, to as many ranks (experts per token): a node needs one of them. ``repeats``: where of the
    forward, it is sent again as its block is recomputed. ``fixed_bytes``: per pass, whatever the samples."""

    axis: ActivationAxis
    collective: str
    phase: Literal["forward", "backward"]
    bytes: float
    copies: int = 1
    repeats: bool = True
    fixed_bytes: float = 0


class Weight(NamedTuple):
    """A parameter as this rank holds it before any sharding. ``rows``: its first dimension. ``copies``: of how many
    of the ranks that read the same samples it is the same (its gradient may have to be summed over them). ``expert``:
    divided over the expert axis, so that fewer data ranks hold it alike. ``tie``: name shared by tied weights, or ''.
    """

    name: str
    numel: int
    rows: int
    trains: bool
    copies: int
    expert: bool
    tie: str

    @property
    def matrix(self) -> Matrix:
        """As gradient codecs see it."""
        return Matrix(self.rows, self.numel // self.rows) if self.rows else Matrix(1, self.numel)


class Moment(NamedTuple):
    """Bytes at a moment of a block's forward or backward, beyond what the blocks before it left for backward.

    ``sample_bytes``: per sample, of which other blocks made ``entering_bytes`` (what comes in). ``fixed_bytes``:
    whatever the samples. ``gradient_bytes``: of the block's weights' gradients that are complete, not in the rest.
    """

    sample_bytes: float
    fixed_bytes: float = 0
    entering_bytes: float = 0
    gradient_bytes: float = 0


class Holding(NamedTuple):
    """What a block holds: each pair is (bytes per sample, fixed bytes).

    ``kept``: left by its forward until its backward. ``passed``: of it, what later blocks read: all that is left where
    the block is recomputed. ``forward`` (``bare``: where nothing is kept for backward) and ``backward``: its moments
    that need most. ``between``: per sample, gradients of what its weights' operations give, which wait where weights'
    gradients are worked out apart.
    """

    kept: tuple[float, float] = (0, 0)
    passed: tuple[float, float] = (0, 0)
    forward: tuple[Moment, ...] = ()
    bare: tuple[Moment, ...] = ()
    backward: tuple[Moment, ...] = ()
    between: float = 0


class Block(NamedTuple):
    """A place to cut, up to the next. ``kind``: blocks of one kind cost the same. ``repeated``: one of the model's
    repeated blocks, which may be recomputed. ``carried_bytes``: per sample, what crosses a cut before it, one way.
    ``handed_bytes``: (per sample, fixed) what crosses besides, forward only, as it needs no gradient.
    ``returned_bytes``: per sample, the gradients that cross it back; None: of all that is carried. ``gathered_bytes``:
    per sample, of what crosses, that lies in parts on the tensor ranks (shared positions) and is gathered to be sent.
    ``input_bytes``: per sample, what is kept in place of all else where the block is recomputed. ``buffer_bytes``: of
    the model's buffers in it. ``waits``: kernels of a forward whose start waits for the device, which the host then
    cannot hide (after it has read how many rows each expert gets). ``holding``: None where only the operations' kept
    bytes are known. ``again_bytes``: per sample, of parts of it that its backward computes again. ``unit``: sharded as
    a unit; None: where it is repeated.
    """

    path: str
    kind: str
    repeated: bool
    ops: tuple[Op, ...]
    traffic: tuple[Traffic, ...]
    weights: tuple[Weight, ...]
    carried_bytes: float
    input_bytes: float
    buffer_bytes: float = 0
    holding: Holding | None = None
    waits: float = 0
    again_bytes: float = 0
    unit: bool | None = None
    handed_bytes: tuple[float, float] = (0, 0)
    returned_bytes: float | None = None
    gathered_bytes: float = 0

    @property
    def learns(self) -> bool:
        """Whether a gradient comes to it: not where neither it nor what comes in is trained."""
        return not self.ops or any(op.backward for op in self.ops)

    @property
    def returns(self) -> bool:
        """Whether gradients cross a cut before it back: not where all that comes in is of frozen blocks."""
        return self.returned_bytes != 0

    def crossing(self, samples: int) -> tuple[float, float]:
        """Bytes that cross a cut before it for a micro-batch: values on, and gradients back."""
        grows, fixed = self.handed_bytes
        back = self.carried_bytes if self.returned_bytes is None else self.returned_bytes
        return (self.carried_bytes + grows) * samples + fixed, back * samples


def sendings(block: Block, phase: str) -> list[Traffic]:
    """What a pass of a block sends among ranks that read the same samples: ``forward``, ``backward``, or ``again``:
    what its forward sends once more where it is recomputed."""
    of = "forward" if phase == "again" else phase
    return [each for each in block.traffic if each.phase == of and (each.repeats or phase != "again")]


class Numbers(NamedTuple):
    """Numbers in weights: of ``all`` of them, of those that are ``trained``, and how many ``weights`` these are."""

    all: int
    trained: int
    weights: int


def numbers(weights: Iterable[Weight]) -> Numbers:
    """Of ``weights``, tied ones once."""
    held = {weight.tie or weight.name: weight for weight in weights}.values()
    trained = [weight.numel for weight in held if weight.trains]
    return Numbers(sum(weight.numel for weight in held), sum(trained), len(trained))


class Profile(Settings):
    """One rank's share of a model. The last block holds the head and the loss."""

    name: str = Field(description="of the model")
    tokens: int = Field(default=1, ge=1, description="positions of a sample, over all context ranks")
    tensor: int = Field(default=1, ge=1, description="degree that it was made for")
    sequence_parallel: bool = Field(default=False, description="positions shared out between tensor regions")
    context: int = Field(default=1, ge=1, description="degree that it was made for")
    expert: int = Field(default=1, ge=1, description="degree that it was made for")
    precision: str = Field(default="fp32", description="of products: fp64, fp32, bf16, fp16, fp8")
    kernels: str = Field(default="cpu", description="whose kernels decide what is kept")
    blocks: tuple[Block, ...] = Field(description="in the order of the forward")
    input_bytes: float = Field(default=0, description="of the inputs and targets of a sample")
    model_flops: float = Field(description="of a forward of one whole sample, full attention, for utilisation")
    notes: tuple[str, ...] = Field(default=(), description="what is not known or not divided, in sentences")

    @cached_property
    def held(self) -> Numbers:
        """In this rank's weights, tied ones once."""
        return numbers(weight for block in self.blocks for weight in block.weights)

    @property
    def parameters(self) -> int:
        """Numbers in this rank's weights, tied ones once."""
        return self.held.all

    @property
    def trained(self) -> int:
        """Of them those that are trained."""
        return self.held.trained
