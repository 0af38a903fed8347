"""What a plan's prediction says of one rank, in the terms in which a rehearsal counts. No process group."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from shoal.blueprint.cut import cut
from shoal.blueprint.stored import Sketch
from shoal.cluster.facts import Device
from shoal.cluster.presets import find
from shoal.core.errors import ModelError
from shoal.launch.comparing import candidate_of
from shoal.plan.candidate import Candidate, Memory, States
from shoal.plan.from_blueprint import profile
from shoal.plan.memory import ranks, recomputed
from shoal.plan.plan import Plan
from shoal.plan.profile import Block, Profile, sendings
from shoal.plan.ranks import rank_stages
from shoal.plan.sharded import Sharded

#: Memory depends on a device by its kernels and what it reserves alone: those of a CPU that reserves nothing.
BARE_CPU = find("h100").device.model_copy(update={"kernels": "cpu", "reserved_bytes": 0})


class Foretold(NamedTuple):
    """Of one pipeline coordinate: its peak, a step's FLOPs, bytes of a step's collectives by mesh axis."""

    memory: Memory
    flops: float
    traffic: dict[str, float]


def foretell(sketch: Sketch, plan: Plan, device: Device = BARE_CPU) -> list[Foretold]:
    """Each pipeline coordinate's. Raises ConfigError where the plan does not go with the model."""
    if not sketch.blueprint.operations:
        raise ModelError(f"nothing can be predicted of {sketch.name}: {'; '.join(sketch.notes)}")
    made = profile(
        sketch.blueprint, sketch.units, tensor=plan.mesh.tensor, sequence_parallel=plan.sequence_parallel,
        precision=plan.precision, kernels=device.kernels, name=sketch.name,
    )  # fmt: skip
    cuts = plan.cuts or (cut(sketch.blueprint, sketch.units, plan.stages) if plan.stages > 1 else ())
    paths = [block.path for block in made.blocks]
    wide = 8 if plan.precision == "fp64" else 4
    states = States(weight=wide, gradient=wide, optimizer=sketch.optimizer_bytes)
    candidate = candidate_of(plan, (0, *(paths.index(unit) for unit in cuts)), states)
    return [
        Foretold(memory, *work(made, candidate, place)) for place, memory in enumerate(ranks(made, candidate, device))
    ]


def work(made: Profile, candidate: Candidate, place: int) -> tuple[float, dict[str, float]]:
    """FLOPs and traffic of a step; of a pipeline what this rank sends and what it receives."""
    samples = candidate.micro_batch * candidate.accumulation
    again = recomputed(made, candidate)
    starts = [*candidate.starts, len(made.blocks)]
    pipeline = candidate.mesh.pipeline
    stages = rank_stages(candidate.schedule or "gpipe", place, pipeline, candidate.chunks) if pipeline > 1 else (0,)
    numbers = [number for stage in stages for number in range(starts[stage], starts[stage + 1])]
    flops = sum(_flops(made.blocks[n]) + _forward(made.blocks[n]) * (n in again) for n in numbers) * samples
    traffic = defaultdict[str, float](float)
    for number in numbers:
        for phase in ("forward", "backward", *(["again"] if number in again else [])):
            for each in sendings(made.blocks[number], phase):
                traffic[each.axis] += each.bytes * samples + each.fixed_bytes * candidate.accumulation
    for stage in stages:
        inside = (stage - 1 in stages, stage + 1 in stages)
        ends = [
            sum(made.blocks[starts[at]].crossing(candidate.micro_batch))
            for at, here in zip((stage, stage + 1), inside, strict=True)
            if 0 < at < len(starts) - 1 and not here
        ]
        traffic["pipeline"] += sum(ends) * candidate.accumulation
        if stage + 1 < len(starts) - 1:
            traffic["tensor"] += made.blocks[starts[stage + 1]].gathered_bytes * samples
    for axis, nbytes in Sharded(made, candidate, numbers).traffic().items():
        traffic[axis] += nbytes
    return flops, {axis: nbytes for axis, nbytes in traffic.items() if nbytes}


def _forward(block: Block) -> float:
    return sum(op.flops for op in block.ops)


def _flops(block: Block) -> float:
    return sum(op.flops * (1 + op.backward) for op in block.ops)
