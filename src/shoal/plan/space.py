"""All the ways to run a job that are worth asking about, as plain numbers: what divides, and what the engine runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from shoal.plan.candidate import Candidate, States
from shoal.plan.mesh import Mesh
from shoal.plan.schedule import conflicts

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
#: Whether the engine shares out positions between tensor regions; a plan that asks for it is refused where not.
SEQUENCE_PARALLEL = True
#: Chunks of a rank that are tried with interleaved schedules.
CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
#: Divided tensors are not sent over more ranks than a node holds, nor over more than these where nodes are small.
LEAST_TENSOR = 8


class Question(NamedTuple):
    """What is asked: ``global_batch`` samples of a step on ``world`` ranks. ``most_tensor``: the largest degree.
    ``thorough``: tensor without sequence parallelism is tried where it works too, not only where it does not.
    ``mesh``: no other one."""

    world: int
    global_batch: int
    precision: str = "fp32"
    states: States = States()
    most_tensor: int = LEAST_TENSOR
    bucket_bytes: float = 25 * 2**20
    thorough: bool = True
    mesh: Mesh | None = None


class Core(NamedTuple):
    """What decides a rank's work on its samples; ``data``: ranks that read different samples."""

    pipeline: int
    tensor: int
    sequence_parallel: bool
    data: int
    micro_batch: int
    accumulation: int
    schedule: str | None
    chunks: int
    recompute: Recompute

    @property
    def stages(self) -> int:
        """Into how many the model is cut."""
        return self.pipeline * self.chunks


class Spread(NamedTuple):
    """How a core's data ranks hold its weights."""

    replicate: int
    shard: int
    level: int
    offload: bool


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [d for d in range(1, number + 1) if number % d == 0] if number < 4096 else sorted(_divisors(number))


def _divisors(number: int) -> set[int]:
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return {*low, *(number // d for d in low)}


def degrees(question: Question) -> list[tuple[int, bool]]:
    """Tensor degrees that divide the world and are small enough, each with sequence parallelism first."""
    found = [degree for degree in divisors(question.world) if degree <= question.most_tensor]
    if question.mesh is not None:
        found = [question.mesh.tensor]
    both = [(degree, sequence) for degree in found for sequence in (True, False)]
    return [(degree, sequence) for degree, sequence in both if not sequence or (degree > 1 and SEQUENCE_PARALLEL)]


def cores(question: Question, tensors: Mapping[tuple[int, bool], int], repeated: bool = True) -> list[Core]:
    """Every core. ``tensors``: (degree, sequence parallel) -> number of places to cut. ``repeated``: the model has
    repeated blocks, without which nothing is recomputed."""
    found, mesh = [], question.mesh
    for (tensor, sequence), blocks in tensors.items():
        if question.world % tensor:
            continue
        left = question.world // tensor
        for pipeline in divisors(left) if mesh is None else [mesh.pipeline]:
            data = left // pipeline
            if pipeline > blocks or question.global_batch % data:
                continue
            each = question.global_batch // data
            for micro in divisors(each):
                for schedule, chunks in schedules(pipeline, blocks, each // micro):
                    found += [
                        Core(pipeline, tensor, sequence, data, micro, each // micro, schedule, chunks, level)
                        for level in (RECOMPUTE if repeated else RECOMPUTE[:1])
                    ]
    return found


def schedules(pipeline: int, blocks: int, micro_batches: int) -> list[tuple[str | None, int]]:
    """Schedules with their chunks. gpipe and looped-bfs wait as long as 1f1b and interleaved-1f1b and hold more, so
    they stand in only where those need more micro-batches."""
    if pipeline == 1:
        return [(None, 1)]
    chunks = [count for count in CHUNKS if pipeline * count <= blocks]
    pairs = [("1f1b", 1), ("interleaved-zero-bubble", 1)]
    pairs += [(name, count) for count in chunks for name in ("interleaved-1f1b", "interleaved-zero-bubble")]
    pairs += [(name, 2) for name in ("zbv", "dualpipev") if 2 in chunks]
    found: list[tuple[str | None, int]] = [
        pair for pair in pairs if not conflicts(pair[0], pipeline, pair[1], micro_batches)
    ]
    names = {name for name, _ in found}
    if "1f1b" not in names:
        found.append(("gpipe", 1))
    if "interleaved-1f1b" not in names:
        found += [("looped-bfs", count) for count in chunks]
    return found


def spreads(data: int, mesh: Mesh | None = None) -> Iterator[Spread]:
    """Every way to hold weights on ``data`` ranks (of ``mesh``: those that it has), those that keep most first; offload
    last."""
    for offload in (False, True):
        for shard in divisors(data) if mesh is None else [mesh.shard]:
            if shard == 1 and offload:
                continue
            for level in (1, 2, 3) if shard > 1 else (3,):
                yield Spread(data // shard, shard, level, offload)


def candidate(question: Question, core: Core, spread: Spread, starts: tuple[int, ...]) -> Candidate:
    """A core and a spread as what is priced."""
    mesh = Mesh.model_construct(
        pipeline=core.pipeline, replicate=spread.replicate, shard=spread.shard, context=1, tensor=core.tensor
    )
    return Candidate(
        mesh=mesh, micro_batch=core.micro_batch, accumulation=core.accumulation, starts=starts, schedule=core.schedule,
        chunks=core.chunks, shard_level=spread.level, recompute=core.recompute,
        sequence_parallel=core.sequence_parallel, cpu_offload=spread.offload, precision=question.precision,
        states=question.states, bucket_bytes=question.bucket_bytes,
    )  # fmt: skip
