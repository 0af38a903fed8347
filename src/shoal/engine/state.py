"""What a checkpoint holds of a run, under the model's own names, and how a run takes it up again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.reader import Reader, compare
from shoal.core.errors import CheckpointError
from shoal.engine import compression
from shoal.engine.held import Held
from shoal.engine.names import plain
from shoal.engine.optimizer import first_names
from shoal.parallel.shard.pieces import local

if TYPE_CHECKING:
    from shoal.engine.run import Run


def model_tensors(model: nn.Module, held: Held | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """``model/<plain name>`` of every parameter and persistent buffer, tied ones once; and {other name: first name}.

    Placeholders (on the meta device) of what other stages hold are among them, for their names and shapes.
    """
    tensors: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    tied = dict(held.tied) if held else {}
    for own, tensor in model.state_dict(keep_vars=True).items():
        name = plain(own)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"the model's extra state {name!r} is not a tensor; only tensors can be saved")
        memory = local(tensor)
        nowhere = memory.is_meta or not memory.numel()
        mark: Any = id(tensor) if nowhere else (memory.data_ptr(), memory.shape, memory.dtype)
        if mark in first:
            tied.setdefault(name, first[mark])
            continue
        first[mark] = tied.get(name, name)
        saved = f"model/{first[mark]}"
        if saved not in tensors or tensors[saved].is_meta:
            tensors[saved] = tensor.detach()
    return tensors, tied


def all_pieces(run: Run) -> dict[str, Piece]:
    """What this rank holds of every tensor of the run's state, by its name in a checkpoint."""
    held = run.held
    pieces = {}
    for name, tensor in model_tensors(run.model, held)[0].items():
        if not tensor.is_meta:
            pieces[name] = held.piece(name.removeprefix("model/"), tensor)
    for key, own, param, value in run.optimizer.state_tensors():
        name = held.tied.get(own, own)
        pieces[f"optimizer/{key}/{name}"] = held.state(key, name, param, value)
    for saved, tensor in run.average.tensors().items():
        if tensor.is_meta:
            continue
        own = saved.removeprefix("ema/")
        name = held.tied.get(own, own)
        pieces[f"ema/{name}"] = held.piece(name, tensor)
    return pieces | compression.pieces(run)


def collect(run: Run, finite: bool) -> tuple[dict[str, Piece], dict[str, Any]]:
    """Pieces and JSON values of the state after the last step. Collective where data has a reader state, or stages."""
    readers: list[Any] = [run.reader_state]
    if run.reader_state is not None:
        every: list[Any] = [None] * run.ranks
        dist.all_gather_object(every, (run.layout.data_rank, run.reader_state))
        readers = [dict(every)[place] for place in range(run.layout.data_ranks)]
    values = {
        "step": run.step_count,
        "seed": run.settings.seed,
        "tied": model_tensors(run.model, run.held)[1],
        "optimizer": _optimizer_values(run),
        "lr_schedule": run.schedule.state(),
        "scaler": run.scaler.state(),
        "readers": readers,
        "kernels": run.kernels,
        "compress": run.layout.plan.compress,
        "ranks": run.ranks,
        "finite": finite,
        "loss": run.last_loss,
        "data": run.windows_source.identity,
    }
    return all_pieces(run), values


def _optimizer_values(run: Run) -> dict[str, Any]:
    """Collective where the mesh has stages: each knows the state of its own parameters only."""
    values = run.optimizer.values()
    states = [values["state"]]
    if run.held.mesh.pipeline > 1:
        states = [{} for _ in range(run.ranks)]
        dist.all_gather_object(states, values["state"])
    tied = run.held.tied
    values["state"] = {tied.get(name, name): state for held in states for name, state in held.items()}
    for group in values["groups"]:
        group["parameters"] = first_names(group["parameters"], tied)
    return values


def load_model(model: nn.Module, reader: Reader, where: str, held: Held | None = None) -> None:
    """Copy this rank's regions of ``model/*`` of a checkpoint into the model. Raises CheckpointError: what differs."""
    held = held or Held()
    tensors, _ = model_tensors(model, held)
    expected = {
        name: (held.shape(name.removeprefix("model/"), tensor), tensor.dtype) for name, tensor in tensors.items()
    }
    difference = compare(reader, expected, "model/")
    if difference:
        raise CheckpointError(f"{where} is of another model: {difference}; use the model it was written by")
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            held.read(reader, name, name.removeprefix("model/"), tensor)


def restore(run: Run, reader: Reader) -> list[str]:
    """Take up everything a checkpoint holds; returns notes on settings that changed."""
    values, held = reader.values, run.held
    load_model(run.model, reader, f"the checkpoint {reader.path}", held)

    def read(key: str, own: str, param: Tensor) -> Tensor:
        name = held.tied.get(own, own)
        return held.read_state(reader, f"optimizer/{key}/{name}", name, param)

    notes, ratios = run.optimizer.load(values["optimizer"], read, held.tied)
    run.schedule.load(values["lr_schedule"], ratios)
    run.scaler.load(values["scaler"])
    saved = set(reader.names())
    for own, tensor in run.average.tensors().items():
        if tensor.is_meta:
            continue
        name = held.tied.get(own.removeprefix("ema/"), own.removeprefix("ema/"))
        if f"ema/{name}" not in saved:
            raise CheckpointError(f"{reader.path} holds no averaged weights (ema/{name}); resume without --ema")
        held.read(reader, f"ema/{name}", name, tensor)
    notes += compression.restore(run, reader)
    readers = values["readers"]
    if len(readers) > 1 and len(readers) != run.layout.data_ranks:
        raise CheckpointError(
            f"the data's readers were saved by {len(readers)} workers and {run.layout.data_ranks} ask for them: this "
            f"data is bound to its number of readers; resume with --workers {len(readers)}"
        )
    run.reader_state = readers[run.layout.data_rank] if len(readers) > 1 else readers[0]
    run.step_count, run.last_loss = values["step"], values["loss"]
    before, now = values.get("data"), run.windows_source.identity
    if before not in (None, now):
        notes.append(f"the data was {before} and is now {now}: samples come in another order from here on")
    return notes
