"""What a checkpoint holds of a run, under the model's own names, and how a run takes it up again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.checkpoint.reader import Reader, compare
from shoal.core.errors import CheckpointError
from shoal.engine.names import plain

if TYPE_CHECKING:
    from shoal.engine.run import Run


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """``model/<plain name>`` of every parameter and persistent buffer, tied ones once; and {other name: first name}."""
    tensors: dict[str, Tensor] = {}
    first: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    tied = {}
    for own, tensor in model.state_dict(keep_vars=True).items():
        name = plain(own)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"the model's extra state {name!r} is not a tensor; only tensors can be saved")
        mark = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if tensor.numel() and mark in first:
            tied[name] = first[mark]
            continue
        first[mark] = name
        tensors[f"model/{name}"] = tensor.detach()
    return tensors, tied


def all_tensors(run: Run) -> dict[str, Tensor]:
    """Every tensor of the run's state by its name in a checkpoint."""
    return {**model_tensors(run.model)[0], **run.optimizer.tensors(), **run.average.tensors()}


def collect(run: Run, finite: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON values of the whole state after the last step. Collective where data has a reader state."""
    readers: list[Any] = [run.reader_state]
    if run.reader_state is not None:
        readers = [None] * run.ranks
        dist.all_gather_object(readers, run.reader_state)
    values = {
        "step": run.step_count,
        "seed": run.settings.seed,
        "tied": model_tensors(run.model)[1],
        "optimizer": run.optimizer.values(),
        "lr_schedule": run.schedule.state(),
        "scaler": run.scaler.state(),
        "readers": readers,
        "kernels": run.kernels,
        "ranks": run.ranks,
        "finite": finite,
        "loss": run.last_loss,
        "data": run.windows_source.identity,
    }
    return all_tensors(run), values


def load_model(model: nn.Module, reader: Reader, where: str) -> None:
    """Copy ``model/*`` of a checkpoint into the model. Raises CheckpointError naming what differs."""
    tensors, _ = model_tensors(model)
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    difference = compare(reader, expected, "model/")
    if difference:
        raise CheckpointError(f"{where} is of another model: {difference}; use the model it was written by")
    for name, tensor in tensors.items():
        reader.read_into(name, tensor)


def restore(run: Run, reader: Reader) -> list[str]:
    """Take up everything a checkpoint holds; returns notes on settings that changed."""
    values = reader.values
    load_model(run.model, reader, f"the checkpoint {reader.path}")
    notes, ratios = run.optimizer.load(values["optimizer"], reader.read)
    run.schedule.load(values["lr_schedule"], ratios)
    run.scaler.load(values["scaler"])
    for name, tensor in run.average.tensors().items():
        if name not in reader.names():
            raise CheckpointError(f"{reader.path} holds no averaged weights ({name}); resume without --ema")
        reader.read_into(name, tensor)
    readers = values["readers"]
    if len(readers) > 1 and len(readers) != run.ranks:
        raise CheckpointError(
            f"the data's readers were saved by {len(readers)} workers and {run.ranks} ask for them: this data is bound "
            f"to its number of readers; resume with --workers {len(readers)}"
        )
    run.reader_state = readers[run.rank] if len(readers) > 1 else readers[0]
    run.step_count, run.last_loss = values["step"], values["loss"]
    before, now = values.get("data"), run.windows_source.identity
    if before not in (None, now):
        notes.append(f"the data was {before} and is now {now}: samples come in another order from here on")
    return notes
