"""From a job's sketch and a cluster to the best plans, and what is said of them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shoal.blueprint.stored import Sketch
from shoal.cluster.facts import Cluster
from shoal.core.errors import ConfigError
from shoal.plan import explain
from shoal.plan.candidate import Candidate, States
from shoal.plan.explain import Tried, Work
from shoal.plan.from_blueprint import profile
from shoal.plan.mesh import Mesh
from shoal.plan.plan import Plan
from shoal.plan.profile import Profile
from shoal.plan.search import USABLE, Found, Profiles, Search
from shoal.plan.space import LEAST_TENSOR, Core, Question, Spread
from shoal.plan.untraced import states_alone

#: Memory with which nothing binds, as a multiple of the device's.
_ROOMY = 1000
#: Of models with more operations tensor parallelism is looked at with sequence parallelism alone, where that works: it
#: holds less, sends as much, and each way takes seconds to work out.
MANY = 2000
#: How many times the devices are tried where nothing fits, and how many numbers between the last two.
DOUBLED, BETWEEN = (2, 4, 8, 16, 32, 64), 8


@dataclass
class Planned:
    """The answer. ``best``: fastest first, each of another mesh; empty where nothing fits, and ``changes`` say what
    would. ``plan``: the best one as a run takes it. ``whole``: the cluster that ``cluster`` is some devices of.
    ``elsewhere``: where a mesh was asked for, the best plan of all meshes."""

    sketch: Sketch
    cluster: Cluster
    question: Question
    search: Search
    best: tuple[Found, ...]
    asked: int
    priced: int
    free: Found | None = None
    tried: tuple[Tried, ...] = ()
    changes: tuple[str, ...] = ()
    whole: Cluster | None = None
    elsewhere: Found | None = None
    work: Work = field(init=False)

    def __post_init__(self) -> None:
        whole = next(iter(self.search.profiles.values()))
        peak = self.cluster.device.flops_per_s[self.question.precision]  # priced already, so it is there
        traced = bool(self.sketch.blueprint.operations)
        self.work = Work(self.sketch.name, self.sketch.parameters, whole.tokens, whole.model_flops, peak, traced)

    @property
    def plan(self) -> Plan:
        """The best plan. Raises ConfigError where none fits."""
        if not self.best:
            raise ConfigError("\n".join(self.sentences()))
        return self.as_plan(self.best[0].candidate)

    def as_plan(self, candidate: Candidate) -> Plan:
        """A candidate as a run takes it."""
        blocks = self.search.profiles[candidate.mesh.tensor, candidate.sequence_parallel].blocks
        return Plan.parse(
            {
                "mesh": candidate.mesh, "schedule": candidate.schedule, "chunks": candidate.chunks,
                "cuts": tuple(blocks[start].path for start in candidate.starts[1:]),
                "sequence_parallel": candidate.sequence_parallel, "shard_level": candidate.shard_level,
                "recompute": candidate.recompute, "cpu_offload": candidate.cpu_offload,
                "precision": candidate.precision, "global_batch": candidate.global_batch,
                "micro_batch": candidate.micro_batch, "accumulation": candidate.accumulation,
                "clip": self.sketch.clip, "bucket_mb": candidate.bucket_bytes / 2**20,
                "compress": candidate.codec and str(candidate.codec),
            },
            "plan",
        )  # fmt: skip

    def sentences(self) -> list[str]:
        """What binds, why the runner-up lost, why the obvious choices are not the plan, what is not known."""
        told = []
        if self.best:
            fastest, *others = self.best
            told.append(explain.binds(fastest, self.free, self.cluster) if self.work.traced else explain.UNTRACED)
            told += [f"Runner-up: {explain.lost(fastest, other)}." for other in others[:1]]
            told += [explain.obvious(fastest, each, self.cluster) for each in self.tried]
            if self.question.mesh is not None:
                told.append(explain.elsewhere(fastest, self.elsewhere))
        else:
            told += self.changes
        told += [f"tensor={degree} is not possible: {why}." for degree, why in list(self.search.refused.items())[:1]]
        return told + [f"Not known: {note}." for note in self.sketch.notes]

    def lines(self) -> list[str]:
        """The printed page."""
        work, batch = self.work, self.question.global_batch
        tokens = f", {explain.count(batch * work.tokens)} tokens" if work.tokens > 1 else ""
        told = [
            f"{work.name}: {explain.count(work.parameters)} parameters, a global batch of {batch:,} samples{tokens}, "
            f"{self.question.precision}",
            explain.cluster_text(self.cluster),
            "",
        ]
        if self.best:
            told += [
                *explain.aligned(explain.table(self.best, work, self.cluster)),
                "2 x 16 after a mesh: micro-batches a rank takes in a step x samples in each.",
                "MFU: 3 x a forward's model FLOPs (attention in full, recompute not counted) over the matrix peak.",
                "",
                ("" if work.traced else "known: ") + explain.step_text(self.best[0].cost),
                explain.memory_text(self.best[0].memory, self.cluster),
                "",
            ]
        return [*told, *self.sentences(), f"{self.asked:,} plans, {self.priced:,} priced."]

    def as_json(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {
            "model": self.work._asdict(),
            "cluster": self.cluster.name,
            "world": self.question.world,
            "global_batch": self.question.global_batch,
            "precision": self.question.precision,
            "memory_bytes": self.cluster.device.memory_bytes,
            "best": [self.found_json(found) for found in self.best],
            "sentences": self.sentences(),
            "asked": self.asked,
            "priced": self.priced,
        }

    def found_json(self, found: Found) -> dict[str, Any]:
        """One plan in plain values; rates None where the step is not known."""
        rates = explain.rates(found.candidate, found.cost.step_s, self.work)
        return {
            "plan": self.as_plan(found.candidate).model_dump(mode="json"),
            "step_s": found.cost.step_s,
            "parts": found.cost._asdict(),
            "memory": {**found.memory._asdict(), "total_bytes": found.memory.total_bytes},
            **{name: value if self.work.traced else None for name, value in rates._asdict().items()},
        }


def answer(
    sketch: Sketch,
    cluster: Cluster,
    global_batch: int | None = None,
    top: int = 5,
    micro_batch: int | None = None,
    whole: Cluster | None = None,
    mesh: Mesh | None = None,
) -> Planned:
    """The best plans on all devices of ``cluster``, and what to say of them. ``micro_batch``, ``mesh``: with no other
    one. ``whole``: the cluster that it is some devices of, whose nodes more devices would have."""
    question = question_of(sketch, cluster, global_batch)._replace(mesh=mesh)
    profiles = profiles_of(sketch, cluster)
    search = Search(profiles, cluster, question)
    if mesh is not None and mesh.tensor in search.refused:
        raise ConfigError(
            f"--mesh {mesh}: {search.refused[mesh.tensor]}; choose another degree than tensor={mesh.tensor}"
        )
    result = search.run(top, within=None if micro_batch is None else lambda core: core.micro_batch == micro_batch)
    if not result.best:
        return Planned(
            sketch, cluster, question, search, (), result.asked, result.priced, whole=whole,
            changes=_changes(sketch, search, whole or cluster, profiles),
        )  # fmt: skip
    faster_s = result.best[0].cost.step_s * (1 - explain.EQUAL)
    free = search.with_memory(_ROOMY).run(1, below_s=faster_s)
    return Planned(
        sketch, cluster, question, search, result.best, result.asked, result.priced,
        next(iter(free.best), None), _obvious(search, result.best[0]) if mesh is None else (), whole=whole,
        elsewhere=None if mesh is None else _of_all(search, profiles),
    )  # fmt: skip


def question_of(sketch: Sketch, cluster: Cluster, global_batch: int | None) -> Question:
    """What is asked of a search."""
    wide = 8 if sketch.precision == "fp64" else 4
    return Question(
        world=cluster.world, global_batch=global_batch or sketch.global_batch, precision=sketch.precision,
        states=States(weight=wide, gradient=wide, optimizer=sketch.optimizer_bytes),
        thorough=len(sketch.blueprint.operations) < MANY,
        most_tensor=max(cluster.devices_per_node, LEAST_TENSOR) if sketch.blueprint.operations else 1,
    )  # fmt: skip


def profiles_of(sketch: Sketch, cluster: Cluster) -> Profiles:
    """Tensor degree -> profile, or why there is none."""

    @cache
    def made(tensor: int, sequence_parallel: bool) -> Profile | str:
        if not sketch.blueprint.operations:
            return (
                states_alone(sketch) if tensor == 1 else "the model cannot be traced, and tensor ranks need its trace"
            )
        try:
            return profile(
                sketch.blueprint, sketch.units, tensor=tensor, sequence_parallel=sequence_parallel,
                precision=sketch.precision, kernels=cluster.device.kernels, name=sketch.name,
            )  # fmt: skip
        except ConfigError as error:
            return str(error)

    return made


def _of_all(search: Search, profiles: Profiles) -> Found | None:
    """The best plan of all meshes."""
    return next(iter(Search(profiles, search.cluster, search.question._replace(mesh=None)).run(1).best), None)


def _obvious(search: Search, best: Found) -> tuple[Tried, ...]:
    """Plain data parallel, and all ranks one shard."""
    world, batch = search.question.world, search.question.global_batch
    tried = []
    for name, axis in (("Plain data parallel", "replicate"), ("All ranks one shard", "shard")):
        if world == 1:
            continue
        if batch % world:
            tried.append(Tried(name, None, None, f"{world:,} ranks cannot share out a global batch of {batch:,}"))
            continue

        def of(core: Core, spread: Spread, axis: str = axis) -> bool:
            return core.data == world and getattr(spread, axis) == world

        found = search.run(1, of, lambda core: core.data == world)
        least = None if found.best else search.least(lambda core: core.data == world, axis)
        tried.append(Tried(name, next(iter(found.best), None), least, ""))
    return tuple(tried)


def _changes(sketch: Sketch, search: Search, whole: Cluster, profiles: Profiles) -> tuple[str, ...]:
    """Nothing fits: what needs least, and the smallest change that would."""
    question = search.question
    least = search.least()
    if least is None:
        return (_undivided(search),)
    candidate, memory = least
    name, value, _ = explain.parts(memory, explain.HELD)[0]
    asked = f"with mesh {question.mesh} " if question.mesh else ""
    told = [
        f"No plan {asked}fits: the least that any needs is {explain.gib(memory.total_bytes)} per device "
        f"({explain.layout(candidate)}), {explain.gib(value)} of it {name}; "
        f"{explain.gib(search.usable_bytes)} are usable."
    ]
    ways = [f"devices of {explain.gib(memory.total_bytes / USABLE, room=True)}"]
    if question.mesh is None:
        more = _more_devices(sketch, whole, question)
    else:
        other = _of_all(search, profiles)
        more = f"another mesh, {explain.layout(other.candidate)}" if other is not None else None
    if more is not None:
        ways.insert(0, more)
    told.append(f"The smallest change that fits: {'; or '.join(ways)}.")
    return tuple(told)


def _more_devices(sketch: Sketch, cluster: Cluster, question: Question) -> str | None:
    """The fewest more devices on which something fits: doubling first, then what lies between."""
    known: dict[int, Found | None] = {}

    def found(world: int) -> Found | None:
        if world not in known:
            larger = cluster.resized(world)
            search = Search(profiles_of(sketch, larger), larger, question._replace(world=world))
            known[world] = next(iter(search.run(1).best), None)
        return known[world]

    def between(low: int, high: int) -> list[int]:
        step = max(1, (high - low) // BETWEEN)
        return [world for world in range(low + step, high, step) if _possible(cluster, world)]

    doubled = [world for factor in DOUBLED if _possible(cluster, world := question.world * factor)]
    enough = next((world for world in doubled if found(world)), None)
    if enough is None:
        return None
    world = next(world for world in [*between(enough // 2, enough), enough] if found(world))
    best = found(world)
    assert best is not None
    return f"{world:,} devices instead of {question.world:,} ({explain.layout(best.candidate)})"


def _possible(cluster: Cluster, world: int) -> bool:
    """Whether the cluster can have so many devices."""
    try:
        return cluster.resized(world).world == world
    except ConfigError:
        return False


def _undivided(search: Search) -> str:
    world, batch, mesh = search.question.world, search.question.global_batch, search.question.mesh
    asked, other = (f" with mesh {mesh}", "mesh") if mesh else ("", "number of devices")
    ranks = mesh.replicate * mesh.shard if mesh else world
    return (
        f"No plan divides{asked}: {ranks:,} ranks cannot share out a global batch of {batch:,} samples and the model's "
        f"{max(len(p.blocks) for p in search.profiles.values())} blocks; use a global batch that is a multiple of "
        f"{ranks:,}, or another {other}."
    )
