"""job -> Sketch: the model built without memory, traced on a micro-batch of its own data."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shoal.blueprint.facts import Blueprint, Parameter
from shoal.blueprint.stored import Sketch
from shoal.blueprint.trace import Ending, trace
from shoal.core.errors import ModelError
from shoal.data.loader import DataSettings, MicroBatch, Windows
from shoal.engine.forward import split_inputs
from shoal.engine.precision import Precision
from shoal.engine.randomness import seed_all
from shoal.engine.record import job_name
from shoal.engine.settings import RunSettings
from shoal.engine.start import check_module, check_trains
from shoal.job import Job
from shoal.launch.jobfile import load_class, make_job, make_settings
from shoal.parallel.pipeline.units import unit_paths
from shoal.parallel.shard.units import parameters

#: Samples of the traced micro-batch: what grows with them shows, and statistics have more than one.
SAMPLES = 2
#: After so long a model is taken for one that cannot be traced.
_LONGEST_S = 60.0


def sketch_of(job: Job | str, fields: Mapping[str, Any] | Sequence[str], precision: str | None = None) -> Sketch:
    """The sketch of a job, or of the one in a file with these ``fields``. Raises ConfigError."""
    cls = type(job) if isinstance(job, Job) else load_class(job)
    made = job if isinstance(job, Job) else make_job(cls, fields)
    return sketch(made, make_settings(cls, {"plan": None} | ({"precision": precision} if precision else {})))


def sketch(job: Job, settings: RunSettings, whole: bool = True) -> Sketch:
    """The job as a plan sees it, under its own precision. Nothing is computed, and no weight has memory, unless its
    constructor reads values back and it may be built ``whole``.

    A model that cannot be traced gives a blueprint without operations, and a note that says why.
    """
    with torch.random.fork_rng(devices=[]):
        return _sketch(job, settings, whole)


def sketch_apart(job: Job, settings: RunSettings, least: int = 0) -> Sketch | int | str:
    """The sketch, taken in a fork, so that nothing that the job's code does (threads, memory, seeds) is left here.

    Models of fewer than ``least`` parameters are only counted. Text: why there is no sketch.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-sketch-") as folder:
        path = Path(folder) / "sketch.json"
        child = _fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                _write_apart(job, settings, least, path)
                status = 0
            os._exit(status)
        return _await(child, path)


def _write_apart(job: Job, settings: RunSettings, least: int, path: Path) -> None:
    """In the fork: the sketch, or the number of parameters, or why there is none."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)  # the threads of the process that it was forked from are not here
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what the job's code prints, its workers print again
        os.dup2(null, stream)
    try:
        if least and (size := count_parameters(job)) < least:
            path.with_suffix(".count").write_text(str(size))
        else:
            sketch(job, settings, whole=False).write(path)
    except Exception as error:
        path.with_suffix(".why").write_text(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # Python warns of forks beside threads; this one runs on one thread
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _await(child: int, path: Path) -> Sketch | int | str:
    until_s = time.monotonic() + _LONGEST_S
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > until_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"it was not traced within {_LONGEST_S:.0f} s"
        time.sleep(0.005)
    if path.exists():
        return Sketch.read(path)
    if path.with_suffix(".count").exists():
        return int(path.with_suffix(".count").read_text())
    why = path.with_suffix(".why")
    return why.read_text() if why.exists() else "the process that traced it died"


def count_parameters(job: Job) -> int:
    """Numbers in the model's weights; nothing is computed, and no weight has memory."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        return sum(param.numel() for param in job.model().parameters())


def _sketch(job: Job, settings: RunSettings, whole: bool) -> Sketch:
    precision = Precision(settings.precision, "cpu")
    notes: list[str] = []
    with precision.user_code():
        seed_all(settings.seed)
        model = _model(job, notes, whole)
        check_module(model)
        precision.widen(model)
        model.train()
        state_bytes = _optimizer_bytes(job, model, notes)
        check_trains(model)
        seed_all(settings.seed)
        source = Windows(job.data(), _data_settings(job, settings, precision))
    micro, samples = _micro_batch(source), source.samples_per_epoch
    source.close()
    inputs, targets = job.inputs(precision.place(micro.batch, torch.device("cpu")))
    args, kwargs = split_inputs(inputs)
    try:
        with precision.forward():
            blueprint = trace(model, args, kwargs, micro.samples, Ending(job.loss, targets))
    except ModelError as error:
        notes.append(f"{error}; compute, activations and all cuts through the model are therefore unknown")
        blueprint = _untraced(model)
    return Sketch(
        name=job_name(job), blueprint=blueprint, units=tuple(unit_paths(model)), precision=settings.precision,
        global_batch=settings.global_batch, clip=settings.clip,
        dataset_samples=samples, optimizer_bytes=state_bytes, notes=tuple(notes),
    )  # fmt: skip


def _model(job: Job, notes: list[str], whole: bool) -> nn.Module:
    """The model of tensors without memory; whole where its constructor reads values back."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return job.model()
    except Exception as error:
        if not whole:
            raise
        notes.append(
            f"the model is built with its memory, since its constructor cannot do without: {type(error).__name__}: "
            f"{next(iter(str(error).splitlines()), '')}"
        )
        return job.model()


def _data_settings(job: Job, settings: RunSettings, precision: Precision) -> DataSettings:
    return DataSettings(
        global_batch=SAMPLES, micro_batch=SAMPLES, rank=0, ranks=1, seed=settings.seed, short_windows="use",
        loader_workers=0, pin_memory=False, default_dtype=precision.default_dtype,
        collate=job.collate if type(job).collate is not Job.collate else None,
    )  # fmt: skip


def _micro_batch(source: Windows) -> MicroBatch:
    return next(source.iterate(0, 1)).micro_batches[0]


def _optimizer_bytes(job: Job, model: nn.Module, notes: list[str]) -> float:
    """Bytes of state per trained number after a step, taken on tensors without memory."""
    trained = [param for param in model.parameters() if param.requires_grad]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _fake(model):
            optimizer = job.optimizer(model)
            held = [param for group in optimizer.param_groups for param in group["params"]]
            if not all(isinstance(param, FakeTensor) for param in held):
                raise ModelError("the optimizer was made before the model")
            for param in held:
                param.grad = torch.empty_like(param)
            optimizer.step()
            state = [value for each in optimizer.state.values() for value in each.values()]
            size = sum(t.numel() * t.element_size() for t in state if isinstance(t, torch.Tensor) and t.dim())
    except Exception as error:
        notes.append(
            f"what the optimizer holds is taken to be two numbers per weight: a step of it could not be tried "
            f"({type(error).__name__})"
        )
        return 2.0 * max((param.element_size() for param in trained), default=4)
    return size / max(1, sum(param.numel() for param in trained))


@contextmanager
def _fake(model: nn.Module) -> Iterator[None]:
    """The model's weights as tensors of the mode that is on, for as long."""
    own = {id(module): dict(module._parameters) for module in model.modules()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in made:
                    made[id(param)] = nn.Parameter(
                        torch.empty(param.shape, dtype=param.dtype), requires_grad=param.requires_grad
                    )
                module._parameters[name] = made[id(param)]
    try:
        yield
    finally:
        for module in model.modules():
            module._parameters.update(own[id(module)])


def _untraced(model: nn.Module) -> Blueprint:
    """Parameters alone."""
    held: list[Parameter] = parameters(model)
    modules: dict[str, Any] = {path: type(module).__name__ for path, module in model.named_modules()}
    return Blueprint(
        values=(), operations=(), parameters=tuple(held), inputs=(), outputs=(), modules=modules, samples=1
    )
