"""``shoal rehearse`` as a Python call: the engine's own code of one rank of any world, here, on fake tensors.

The process group is torch's fake one (collectives complete at once and move nothing), and weights, gradients and
activations are fake tensors, which have shapes and no memory. Submeshes and the model's parts are made before fake
tensors are on; the one figure that the host reads in a step is supplied.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed import fake_pg  # registers the backend "fake"
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.blueprint.known import Known
from shoal.blueprint.stored import Sketch
from shoal.cluster.presets import find
from shoal.core.errors import ConfigError, LaunchError, ModelError
from shoal.data.loader import Window
from shoal.data.randomness import undisturbed
from shoal.engine.build import Place, build
from shoal.engine.resolve import resolve, wanted_mesh
from shoal.engine.run import Hooks, Run
from shoal.engine.settings import RunSettings
from shoal.engine.step import FIGURES
from shoal.job import Job
from shoal.launch.jobfile import LoadingStops, load_class, loading, make_job, make_settings, origins
from shoal.launch.sketch import sketch
from shoal.parallel.shard.pieces import local
from shoal.plan.plan import Plan
from shoal.plan.ranks import coordinates, rank_of
from shoal.verify.foretold import BARE_CPU, Foretold, foretell
from shoal.verify.rehearsed import Counting
from shoal.verify.rehearsed_report import Counted, Rehearsal, Rehearsed, named

STEPS = 2  # the second is counted: the optimizer has its state then
#: Run settings that a rehearsal takes.
SETTINGS = (
    "mesh", "plan", "schedule", "chunks", "sequence_parallel", "shard_level", "recompute", "cpu_offload",
    "global_batch", "micro_batch", "clip", "precision", "ema", "bucket_mb", "compress", "seed",
)  # fmt: skip


def rehearse(
    job: Job | str,
    *,
    fields: Mapping[str, Any] | Sequence[str] | None = None,
    rank: int | None = None,
    ranks: str | None = None,
    cluster: str | None = None,
    predict: bool = True,
    **settings: Any,
) -> Rehearsal:
    """Run a step of ``job`` (an instance, or the path of its file) as rank ``rank`` of the world that ``mesh`` or
    ``plan`` asks for, in this process, without its memory or its computing.

    ``ranks``: ``distinct`` (one rank of each pipeline coordinate; the others are like one of these) or ``0,8``.
    ``cluster``: a preset or file whose device's kernels and capacity are held against what was found. ``predict``:
    also trace the model and say what its plan foretells. ``settings``: those of a run's layout.
    Raises ConfigError and ModelError as training would, LaunchError where a process group is there already.
    """
    if loading():
        raise LoadingStops
    if dist.is_initialized():
        raise LaunchError(
            "a rehearsal makes a process group of its own, and this process has one already; call rehearse() before "
            "torch.distributed.init_process_group, or in another process"
        )
    for name in settings:
        if name not in SETTINGS:
            raise ConfigError(f"rehearse() takes no setting {name!r}; it takes {', '.join(SETTINGS)}")
    cls = type(job) if isinstance(job, Job) else load_class(job)
    made = job if isinstance(job, Job) else make_job(cls, fields or {})
    quiet = {"kernels": "default", "sinks": (), "loader_workers": 0, "steps": STEPS, "epochs": None}
    asked = make_settings(cls, {**settings, **quiet})
    plan = resolve(asked, wanted_mesh(asked, None).size)
    chosen = _ranks(plan, rank, ranks)
    device = find(cluster).device if cluster else None
    said: list[Foretold | None] = [None] * plan.mesh.pipeline
    notes: list[str] = []
    if predict:
        said, notes = _prediction(made, asked, plan)
    origin = origins(made, (), settings, asked)
    found = [
        _rehearsed(made, asked, plan, each, said[coordinates(plan.mesh, each).pipeline], origin) for each in chosen
    ]
    correction = None
    if device is not None and predict:
        correction = _correction(_sketch(made, asked, plan), plan, device.kernels)
    return Rehearsal(plan, tuple(found), device, correction, tuple(notes))


def _ranks(plan: Plan, rank: int | None, ranks: str | None) -> list[int]:
    """The ranks that were asked for. Raises ConfigError."""
    if rank is not None and ranks is not None:
        raise ConfigError(f"--rank {rank} and --ranks {ranks} were given; give one of them")
    if ranks == "distinct":
        return [rank_of(plan.mesh, pipeline=place) for place in range(plan.mesh.pipeline)]
    words = (ranks or str(rank or 0)).split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--ranks {ranks!r}: it takes the word distinct (one rank of each kind), or numbers: 0,8,16")
    chosen = list(dict.fromkeys(int(word) for word in words))
    for each in chosen:
        coordinates(plan.mesh, each)
    return chosen


def _sketch(job: Job, settings: RunSettings, plan: Plan) -> Sketch:
    return sketch(job, settings.model_copy(update={"precision": plan.precision}))


def _prediction(job: Job, settings: RunSettings, plan: Plan) -> tuple[list[Foretold | None], list[str]]:
    """Each pipeline coordinate's, or why there is none."""
    try:
        return [*foretell(_sketch(job, settings, plan), plan)], []
    except ModelError as error:
        return [None] * plan.mesh.pipeline, [str(error)]


def _correction(sketched: Sketch, plan: Plan, kernels: Any) -> list[float]:
    """Bytes that another device's kernels keep beyond this machine's, by pipeline coordinate."""
    there = foretell(sketched, plan, BARE_CPU.model_copy(update={"kernels": kernels}))
    here = foretell(sketched, plan)
    return [a.memory.total_bytes - b.memory.total_bytes for a, b in zip(there, here, strict=True)]


def _rehearsed(
    job: Job, settings: RunSettings, plan: Plan, rank: int, said: Foretold | None, origin: Mapping[str, Any]
) -> Rehearsed:
    """One rank's step. No process group, file or random state is left behind."""
    mode, notes = FakeTensorMode(allow_non_fake_inputs=True), list[str]()
    matmul = torch.get_float32_matmul_precision()
    with _world(rank, plan.mesh.size), undisturbed(), tempfile.TemporaryDirectory(prefix="shoal-rehearsal-") as out:
        try:
            own = settings.model_copy(update={"out": str(Path(out) / "run")})
            run = build(
                job, own, Place(torch.device("cpu"), memory=lambda: mode), Hooks(tell=notes.append), origins=origin
            )
            try:
                counted = _stepped(run, mode)
            finally:
                run.close(alone=True)
        finally:
            torch.set_float32_matmul_precision(matmul)
    return Rehearsed(rank, coordinates(plan.mesh, rank), counted, said, tuple(notes))


@contextmanager
def _world(rank: int, ranks: int) -> Iterator[None]:
    """A world in which nobody else is. Nothing that DTensor remembers of it is left: its shapes are this rank's, and a
    mesh of the same form is the same to it, so that another rank, real ones of this process's forks too, took them."""
    _forget()
    dist.init_process_group(fake_pg.dist.Backend.FAKE, rank=rank, world_size=ranks, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget()
        gc.collect()  # modules and hooks hold each other, and groups


def _forget() -> None:
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()


def _stepped(run: Run, mode: FakeTensorMode) -> Counted:
    """What the second of two steps holds, sends and computes."""
    counting, plan = Counting(), run.layout.plan
    run.read = _supplied(run)
    run.scaler.fitted = True  # a scale for fp16 comes of the batch's counts, and changes no shape
    window = next(run.windows_source.iterate(0, 1))
    beat = run.enter

    def enter(phase: str) -> None:
        counting.enter(phase)
        beat(phase)

    run.enter = enter  # type: ignore[method-assign]
    try:
        with ExitStack() as stack:
            for each in (mode, Known(mode), counting, counting.resizing(), counting.generators(), counting.objects()):
                stack.enter_context(each)
            windows = [_shaped(window, plan, counting) for _ in range(2)]  # the loader reads the next one ahead
            for tensor in [*run.model.parameters(), *run.model.buffers()]:
                held = local(tensor.detach())
                if isinstance(held, FakeTensor) and not held.is_meta:
                    counting.see(held, "parameters")
            for bucket in getattr(run.buckets, "buckets", ()):
                counting.see(bucket.flat, "gradients")
            for _ in range(STEPS):
                counting.begin()
                run.step(windows[0])
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"the model, loss or optimizer reads a value ({error}), and in a rehearsal tensors have shapes and no "
            "values; keep values out of its control flow, or measure this job in a real run"
        ) from error
    collectives = named(counting.collectives, plan.mesh, run.rank)
    return Counted(
        counting.peak,
        counting.peak_phase,
        {k: v for k, v in counting.at_peak.items() if v},
        collectives,
        counting.flops,
    )


def _supplied(run: Run) -> Callable[[Tensor], list[float]]:
    """The figures of a step that goes well: every trained weight was used, nobody asks to stop, no buffer changed."""

    def read(total: Tensor) -> list[float]:
        figures = {name: 0.0 if name == "bad_counts" else 1.0 for name in FIGURES}
        values = [*figures.values(), *(0.0 for _ in run.signal_names), *(1.0 for _ in run.trained)]
        return values + [0.0] * (total.numel() - len(values))

    return read


def _shaped(window: Window, plan: Plan, counting: Counting) -> Window:
    """A whole window of fake micro-batches, each shaped as the first one of the data."""
    first = window.micro_batches[0]
    if first.samples != plan.micro_batch:
        raise ConfigError(
            f"the data's first micro-batch has {first.samples} samples, and the plan's have {plan.micro_batch}; "
            "rehearse with data of at least one global batch"
        )

    def fresh(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    made = [replace(first, batch=tree_map_only(Tensor, fresh, first.batch)) for _ in range(plan.accumulation)]
    for micro in made:
        for tensor in tree_leaves(micro.batch):
            if isinstance(tensor, FakeTensor):
                counting.see(tensor, "inputs")
    return replace(window, micro_batches=made)
