"""Memory of a step in closed form, for any training recipe and shard level: states, what is kept for backward, logits.

memory.py plays the step as Shoal's engine runs it, from what a trace says is kept. This is the cross-check from closed
formulas alone, for transformers of shapes (transformer.py): tests hold the two to each other, and published runs of
other systems are held against this one (benchmarks/published.py). Chunks in flight: Narayanan et al.,
https://arxiv.org/abs/2104.04473, and the papers named in schedule.py; states: Rajbhandari et al.,
https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cluster.facts import Device
from shoal.plan.candidate import Candidate, Memory
from shoal.plan.profile import Block, Profile
from shoal.plan.ranks import rank_of, rank_stages

#: Units that lie side by side where weights are gathered or activations fetched: one in use, one on its way.
UNITS = 2


def closed_ranks(profile: Profile, candidate: Candidate, device: Device) -> list[Memory]:
    """Each pipeline coordinate's peak. Where some blocks are recomputed (``keep``), all count alike."""
    return [_memory(profile, candidate, device, place) for place in range(candidate.mesh.pipeline)]


def closed_peak(profile: Profile, candidate: Candidate, device: Device) -> Memory:
    """The rank that needs most."""
    return max(closed_ranks(profile, candidate, device), key=lambda memory: memory.total_bytes)


def chunks_in_flight(schedule: str | None, pipeline: int, place: int, chunks: int, micro_batches: int) -> int:
    """Chunks that the rank at ``place`` holds activations of at most (published bounds; simulate.py counts them)."""
    if pipeline == 1:
        return 1
    whole = micro_batches * chunks
    if schedule in ("gpipe", "looped-bfs"):
        return whole
    if schedule == "1f1b":
        return min(micro_batches, pipeline - place)
    if schedule == "interleaved-1f1b":
        return min(whole, (chunks - 1) * pipeline + 2 * (pipeline - 1 - place) + 1)
    return min(whole, chunks * pipeline + (1 if schedule == "dualpipev" else 0))


def _memory(profile: Profile, candidate: Candidate, device: Device, place: int) -> Memory:
    mesh, states, micro = candidate.mesh, candidate.states, candidate.micro_batch
    schedule = candidate.schedule or "1f1b"
    stages = rank_stages(schedule, place, mesh.pipeline, candidate.chunks) if mesh.pipeline > 1 else (0,)
    ends = [*candidate.starts[1:], len(profile.blocks)]
    blocks = [block for stage in stages for block in profile.blocks[candidate.starts[stage] : ends[stage]]]
    counts = [_numel(blocks, expert) for expert in (False, True)]
    copies = mesh.shard * (mesh.context if candidate.shard_all else 1)
    shards = [copies, max(1, copies * (mesh.tensor if candidate.shard_all else 1) // candidate.expert)]

    def held(width: float, level: int) -> float:
        return sum(
            count * width / (shard if candidate.shard_level >= level else 1)
            for count, shard in zip(counts, shards, strict=True)
        )

    flying = chunks_in_flight(candidate.schedule, mesh.pipeline, place, candidate.chunks, candidate.accumulation)
    each = [_kept(block, candidate) * micro for block in blocks if block.kind != "head"]
    kept = UNITS * max(each, default=0.0) if candidate.offload_activations else sum(each) * flying / len(stages)
    largest = max((sum(op.kept_bytes for op in block.ops) for block in blocks if block.repeated), default=0.0) * micro
    recomputes = candidate.recompute != "none" and candidate.keep < 1
    head = [op for block in blocks if block.kind == "head" for op in block.ops]
    host = candidate.cpu_offload and mesh.shard > 1
    whole = 0.0  # copies that weights in shards are computed with, and whole gradients until a pipeline's last one
    if states.compute and copies > 1 and candidate.shard_level < 3:
        whole = sum(counts) * states.compute
    width, level = (states.sent, 4) if whole and mesh.pipeline > 1 else (states.gradient, 2)
    found = Memory(
        rank=rank_of(mesh, pipeline=place),
        moment="loss",
        weights=whole + (0.0 if host else held(states.weight, 1 if whole else 3)),
        gradients=_gradients(blocks, candidate, 0.0 if host else held(width, level)),
        optimizer=0.0 if host else held(states.optimizer, 1),
        activations=kept,
        logits=sum(op.kept_bytes for op in head) * micro,
        buffers=_gathered(blocks, candidate, copies),
        overhead=float(device.reserved_bytes),
    )
    late = not candidate.gradient_buffers and candidate.accumulation == 1  # gradients get their room in the backward
    moments = [found._replace(gradients=0.0) if late and states.gradient else found]
    if recomputes:
        moments.append(moments[0]._replace(moment="backward", activations=kept + largest, logits=0.0))
    elif again := max((block.again_bytes for block in blocks), default=0.0) * micro:
        moments.append(moments[0]._replace(moment="backward", activations=kept + again, logits=0.0))
    if late:
        moments.append(found._replace(moment="backward", activations=largest, logits=0.0))
    step = 0.0 if host else held(states.step, 1)
    update = found._replace(moment="optimizer", activations=0.0, logits=0.0, buffers=0.0)
    moments.append(update._replace(optimizer=found.optimizer + step))
    return max(moments, key=lambda memory: memory.total_bytes)


def _gradients(blocks: Sequence[Block], candidate: Candidate, held: float) -> float:
    """Bytes of gradients, ``held`` of them all step long. Where each is used up by its optimizer as soon as it is there
    (no bytes held), those of the largest weight."""
    if candidate.states.gradient:
        return held
    return max((weight.numel for block in blocks for weight in block.weights), default=0) * candidate.states.sent


def _gathered(blocks: Sequence[Block], candidate: Candidate, copies: int) -> float:
    """Bytes of gathered units, and of the gradient of one, where weights are shared out among ``copies`` ranks."""
    states = candidate.states
    if candidate.shard_level < 3 or copies == 1:
        return 0.0
    unit = max((_numel([block], False) for block in blocks), default=0.0)
    return unit * ((states.compute or states.weight) * UNITS + states.sent)


def _kept(block: Block, candidate: Candidate) -> float:
    """Bytes per sample that a block's forward leaves."""
    whole = sum(op.kept_bytes for op in block.ops)
    again = {"none": 0.0, "selective": 0.5, "full": 1 - candidate.keep}[candidate.recompute]
    return whole + again * (block.input_bytes - whole) if block.repeated else whole


def _numel(blocks: Sequence[Block], expert: bool) -> float:
    """Numbers in weights, tied ones once."""
    seen = {weight.tie or weight.name: weight.numel for b in blocks for weight in b.weights if weight.expert == expert}
    return float(sum(seen.values()))
