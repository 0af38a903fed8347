"""job + settings -> run, in one visible order: kernels, model, batch norm, buckets, optimizer, data, checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint.reader import Reader
from shoal.checkpoint.writer import Writer
from shoal.core.errors import ConfigError, DataError, ModelError
from shoal.core.heap import keep_freed
from shoal.data.loader import DataSettings, Windows
from shoal.engine import compression, kernels, record, state
from shoal.engine.average import WeightAverage
from shoal.engine.buffers import BufferWatch
from shoal.engine.forward import split_inputs
from shoal.engine.found import newest_everywhere
from shoal.engine.layout import Layout, lay_out
from shoal.engine.lr_schedule import check_scaled, make_schedule, scale_rates
from shoal.engine.meet import meet
from shoal.engine.names import refuse_parallel
from shoal.engine.optimizer import NamedOptimizer
from shoal.engine.parts import spread
from shoal.engine.precision import Precision, Scaler
from shoal.engine.randomness import seed_all
from shoal.engine.resolve import gave_way, resolve
from shoal.engine.run import Hooks, Run
from shoal.engine.saver import Saver
from shoal.engine.settings import RunSettings
from shoal.engine.start import Start, Unknown, begin, check_module, check_trains
from shoal.engine.weights import load_weights
from shoal.job import Job
from shoal.monitor.events import cut_back
from shoal.monitor.sinks import Sink, Sinks, load_sinks
from shoal.parallel.pipeline.apply import Example
from shoal.parallel.replicate.batchnorm import GlobalBatchNorm, globalise


@dataclass(frozen=True)
class Place:
    """Where this rank stands: its device, and how many restarts came before.

    ``memory``: what holds where this rank's part of the model gets its memory (fake tensors, in a rehearsal); given,
    the model is built from shapes whatever the layout, and its weights have no values."""

    device: torch.device
    restart: int = 0
    memory: Callable[[], AbstractContextManager[Any]] | None = None


def build(
    job: Job,
    settings: RunSettings,
    place: Place,
    hooks: Hooks,
    sinks: tuple[Sink, ...] = (),
    origins: Mapping[str, Any] | None = None,
) -> Run:
    """Make this rank's run. Collective. Raises before any training step if anything does not fit.

    ``origins`` (where each field and setting has its value from) goes into the run's record."""
    settings.check("settings")
    if place.device.type == "cpu":
        keep_freed()
    rank, ranks, out = dist.get_rank(), dist.get_world_size(), Path(settings.out)
    found, skipped = newest_everywhere(out / "checkpoints") if settings.resume else (None, [])
    reader = Reader(found.path) if found else None
    chosen = _same_kernels(settings, place.device, reader)
    layout = lay_out(resolve(settings, ranks), place.device.type)
    precision = Precision(layout.plan.precision, place.device.type, layout.plan.recompute != "none")

    weights = _weights(job, settings) if reader is None and place.memory is None else None
    start, norms, optimizer, notes = _made(job, settings, precision, layout, place, weights)
    model = start.model
    layout = layout.of_model(model)
    scaled = scale_rates(optimizer.optimizer, settings.lr_factor)
    check_trains(model)
    data_settings = _data_settings(job, settings, layout, precision, place)
    with precision.user_code():
        seed_all(settings.seed)
        dataset = job.data()
    source = Windows(dataset, data_settings)
    check_same_data(source)
    loaded = weights is not None or reader is not None
    memory = place.memory or nullcontext
    parts = spread(start, layout, place.device, lambda: _example(job, source, precision, place.device), loaded, memory)
    notes += parts.notes
    if weights is not None and layout.divides:
        notes += load_weights(model, *weights, parts.held)
    with memory():
        optimizer.hold(model, parts.held)
        average = WeightAverage(model, settings.ema)
    total = total_steps(settings, source.windows_per_epoch)
    schedule = make_schedule(job, optimizer.optimizer, total)
    check_scaled(schedule.chosen, settings.lr_factor)
    optimizer.built = optimizer.describe()
    writer = Writer(out / "checkpoints", rank, ranks, keep=settings.keep)
    meet("once model, data and optimizer are made")
    run = Run(
        job=job, settings=settings, rank=rank, ranks=ranks, device=place.device, layout=layout, model=model,
        norms=norms, trained=parts.trained, holds=parts.holds, forwards=parts.forwards, buckets=parts.gradients,
        held=parts.held,
        optimizer=optimizer, schedule=schedule, precision=precision, scaler=Scaler(layout.plan.precision == "fp16"),
        average=average, watch=BufferWatch(model, layout.data),
        data_settings=data_settings, windows_source=source, saver=Saver(writer),
        record=record.Record(out, rank, _sinks(settings, rank, sinks), hooks.tell), hooks=hooks, kernels=chosen,
        total_steps=total, model_flops=parts.model_flops,
    )  # fmt: skip
    if reader is not None:
        notes += state.restore(run, reader)
        if settings.init_from:
            notes.append(f"--init-from {settings.init_from} is not used: the run goes on from its own checkpoint")
        run.saver.last_step = run.step_count
    batch = {name: getattr(layout.plan, name) for name in ("global_batch", "micro_batch", "accumulation")}
    batch["ranks"] = layout.data_ranks
    if settings.plan is not None:
        decided = {name for name, source in (origins or {}).get("settings", {}).items() if source == "plan"}
        own = {name: value for name, value in getattr(type(job), "defaults", {}).items() if name in decided}
        notes += gave_way(layout.plan, settings.plan, own)
    notes += [*source.notes, *_told(skipped, found), *([scaled] if scaled else [])]
    told = {"batch": batch, "plan": layout.plan.model_dump(mode="json"), "origins": origins}
    if coded := compression.account(run):
        told["compress"] = coded
        if not coded["plain_bytes"]:
            notes.append(
                f"compress {coded['codec']}: one worker sends nothing, and its gradients are coded all the same"
            )
    _start_record(run, place, notes, told)
    if settings.compile:
        model.compile()
    return run


def _example(job: Job, source: Windows, precision: Precision, device: torch.device) -> Example:
    """The first micro-batch's inputs: what a model is traced on."""
    window = next(source.iterate(0, 1))
    micro = window.micro_batches[0]
    inputs = precision.place(job.inputs(micro.batch)[0], device)
    args, kwargs = split_inputs(inputs)
    return Example(args, kwargs, precision.forward, micro.samples)


def _data_settings(job: Job, settings: RunSettings, layout: Layout, precision: Precision, place: Place) -> DataSettings:
    plan = layout.plan
    return DataSettings(
        global_batch=plan.global_batch, micro_batch=plan.micro_batch, rank=layout.data_rank, ranks=layout.data_ranks,
        seed=settings.seed, short_windows=settings.short_windows, loader_workers=settings.loader_workers,
        pin_memory=place.device.type == "cuda", default_dtype=precision.default_dtype,
        collate=job.collate if type(job).collate is not Job.collate else None,
    )  # fmt: skip


def _same_kernels(settings: RunSettings, device: torch.device, reader: Reader | None) -> dict[str, Any]:
    """Collective. Rank 0 measures; all use its choice, and a resumed run its old one, also before its first save."""
    saved = reader.values.get("kernels") if reader else None
    if saved is None and settings.resume and (path := Path(settings.out) / record.RECORD).exists():
        saved = record.read_json(path).get("kernels")
    chosen: list[Any] = [None] * dist.get_world_size()
    tells = dist.get_rank() == 0 or settings.kernels == "default"
    dist.all_gather_object(chosen, kernels.select(settings.kernels, device.type, saved) if tells else None)
    agreed: dict[str, Any] = chosen[0]
    torch.set_float32_matmul_precision(agreed["float32_matmul"])
    return agreed


def _weights(job: Job, settings: RunSettings) -> tuple[str, str] | None:
    """Weights to begin from, and who asked for them."""
    if settings.init_from:
        return settings.init_from, "--init-from"
    asked = job.init_from()
    return (str(asked), "init_from()") if asked else None


class _Made(NamedTuple):
    start: Start
    norms: list[GlobalBatchNorm]
    optimizer: NamedOptimizer
    notes: list[str]


def _made(
    job: Job, settings: RunSettings, precision: Precision, layout: Layout, place: Place,
    weights: tuple[str, str] | None, whole: str | None = None,
) -> _Made:  # fmt: skip
    """Collective. Model and optimizer; where the layout divides the model, before it has its weights.

    ``whole``: why it is built whole nonetheless."""
    start, notes = _model(job, settings, precision, layout, place, whole)
    model = start.model
    if weights is not None and not layout.divides:
        notes += load_weights(model, *weights)
    if start.values is None:
        check_same_model(model)
    norms = globalise(model, layout.data) if layout.data_ranks > 1 else []
    with precision.user_code():
        seed_all(settings.seed)
        optimizer = NamedOptimizer(job.optimizer(model), model)
    if start.values is not None and optimizer.optimizer.state:
        kind = type(optimizer.optimizer).__name__
        return _made(job, settings, precision, layout, place, weights, f"{kind} has state before its first step")
    return _Made(start, norms, optimizer, notes)


def _model(
    job: Job, settings: RunSettings, precision: Precision, layout: Layout, place: Place, whole: str | None
) -> tuple[Start, list[str]]:  # fmt: skip
    if layout.divides or place.memory is not None:
        start = begin(job.model, lambda: seed_all(settings.seed), precision.default_dtype, whole)
        if place.memory is not None:
            start.values = Unknown()
    else:
        with precision.user_code():
            seed_all(settings.seed)
            start = Start(job.model())
    model = start.model
    check_module(model)
    refuse_parallel(model)
    notes = precision.widen(model)
    if start.whole is not None:
        notes.append(f"every rank builds the whole model before it is divided: {start.whole}")
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(place.device))
    model.train()
    drops = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())
    if drops and dist.get_world_size() > 1:
        notes.append("dropout masks depend on the number of workers: this run repeats exactly only with as many")
    return start, notes


def total_steps(settings: RunSettings, per_epoch: int | None) -> int | None:
    """The step at which the run ends; None where only the data knows."""
    if per_epoch is None and settings.epochs not in (None, 1):
        raise ConfigError(
            f"--epochs {settings.epochs} was asked for, but this iterable data does not tell its length; "
            "give --steps, or one epoch"
        )
    if settings.steps is not None:
        if settings.epochs is not None and per_epoch is not None:
            return min(settings.steps, settings.epochs * per_epoch)
        return settings.steps
    return None if per_epoch is None else (settings.epochs or 1) * per_epoch


def check_same_model(model: nn.Module) -> None:
    """Collective. All ranks must have built the same model, weights included. Raises ModelError naming a difference."""
    listed = [(name, str(tuple(p.shape)), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    listed += [(name, str(tuple(b.shape)), str(b.dtype), "buffer") for name, b in model.named_buffers()]
    held = [*model.parameters(), *model.buffers()]
    sums = torch.stack([_real(tensor.detach()).double().sum() for tensor in held]).tolist()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (hashlib.sha256(json.dumps(listed).encode()).hexdigest(), listed, sums))
    for rank, (digest, other, _) in enumerate(every):
        if digest != every[0][0]:
            here = [" ".join(map(str, entry)) for entry in every[0][1]]
            there = [" ".join(map(str, entry)) for entry in other]
            place = next(
                (i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b),
                min(len(here), len(there)),
            )
            pair = [names[place] if place < len(names) else "nothing" for names in (here, there)]
            raise ModelError(
                f"ranks 0 and {rank} built different models: parameter {place} is {pair[0]!r} on rank 0 and "
                f"{pair[1]!r} on rank {rank}; model() must not depend on the rank"
            )
    if any(not _equal(other[2], every[0][2]) for other in every):
        for tensor in held:  # own randomness in model(): rank 0's weights hold
            value = tensor.detach().contiguous()
            dist.broadcast(value, src=0)
            tensor.detach().copy_(value)


def check_same_data(source: Windows) -> None:
    """Collective. All ranks must have been given the same whole data. Raises DataError naming the difference."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, source.identity)
    for rank, other in enumerate(every):
        if other != every[0]:
            raise DataError(
                f"ranks 0 and {rank} were given different data: {every[0]} on rank 0 and {other} on rank {rank}; give "
                "the whole data on every rank (it is split over them later), and shuffle with the same seed"
            )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _equal(a: list[float], b: list[float]) -> bool:
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))


def _sinks(settings: RunSettings, rank: int, extra: tuple[Sink, ...]) -> Sinks:
    return Sinks([*extra, *load_sinks(settings.sinks)] if rank == 0 else [])


def _told(skipped: list[Any], found: Any) -> list[str]:
    notes = [f"checkpoint {item.path} is skipped: {item.problem}" for item in skipped]
    if found:
        notes.append(f"going on from {found.path}, after step {found.step}")
    return notes


def _start_record(run: Run, place: Place, notes: list[str], more: dict[str, Any]) -> None:
    """Collective. Rank 0 cuts the events back to where the run stands and writes the record; then all begin rows."""
    fields = record.job_fields(run.job)
    told = {
        "job": record.job_name(run.job), "fields": fields, "settings": run.settings.model_dump(mode="json"),
        "workers": run.ranks, **more, "lr_factor": run.settings.lr_factor, "kernels": run.kernels,
        "torch": torch.__version__,
        "device": str(place.device), "parameters": sum(p.numel() for p in run.model.parameters()),
        "windows_per_epoch": run.windows_source.windows_per_epoch,
    }  # fmt: skip
    if run.rank == 0:
        notes = record.check_folder(run.out, run.job, run.settings) + notes
        record.write_json(run.out / record.RECORD, told)
        run.layout.plan.write(run.out / record.PLAN)
        cut_back(run.out, run.step_count)
    meet("once the run's record is written")
    sized = run.total_steps
    run.record.start({"out": str(run.out), "step": run.step_count, "steps": sized, "restart": place.restart, **told})
    for text in notes:
        run.record.note(text)
