"""Weights alone to begin from: of a run, a checkpoint or a safetensors file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from shoal.checkpoint.reader import Reader, candidates
from shoal.core.errors import CheckpointError
from shoal.engine import state
from shoal.engine.found import newest_everywhere
from shoal.engine.names import plain


def load_weights(model: nn.Module, source: str | Path, asked: str = "weights from") -> list[str]:
    """Copy the weights of a run's folder, a checkpoint or a safetensors file into ``model``; returns notes.

    Collective where a process group is there. Raises CheckpointError.
    """
    source = Path(source)
    if source.suffix == ".safetensors":
        if not source.exists():
            raise CheckpointError(f"{asked} {source}: no such file")
        return _load_file(model, source, asked)
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    found, skipped = newest_everywhere(folder)
    if found is None:
        why = "".join(f"; {bad.path} is none: {bad.problem}" for bad in skipped)
        what = "holds no good checkpoint" if source.exists() else "does not exist, so it holds no good checkpoint"
        near = ", ".join(path.name for _, path in candidates(source.parent)) if not source.exists() else ""
        there = f"; {source.parent} has {near}" if near else ""
        raise CheckpointError(f"{asked} {source} {what}{why}{there}; name a run, a step-N or a .safetensors")
    state.load_model(model, Reader(found.path), str(found.path))
    return [f"checkpoint {bad.path} is skipped: {bad.problem}" for bad in skipped]


def _load_file(model: nn.Module, source: Path, asked: str) -> list[str]:
    """One tensor at a time, so that no rank holds the file beside its model."""
    mine, tied = state.model_tensors(model)
    wanted = {name.removeprefix("model/"): tensor for name, tensor in mine.items()}
    try:
        with safe_open(source, framework="pt") as file:
            held, notes = _without_wrappers(file.keys(), wanted, f"{asked} {source}")
            for name, tensor in wanted.items():
                other = next((n for n in (name, *(k for k, v in tied.items() if v == name)) if n in held), None)
                if other is None:
                    raise _another(f"{asked} {source}", f"{name} is missing; it has {', '.join(list(held)[:3])}, ...")
                given = file.get_tensor(held[other])
                if given.shape != tensor.shape:
                    shapes = f"{tuple(given.shape)}, the model's is {tuple(tensor.shape)}"
                    raise _another(f"{asked} {source}", f"{name} has shape {shapes}")
                tensor.copy_(given)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{asked} {source} cannot be read as safetensors: {error}") from None
    unexpected = [name for name in held if name not in wanted and name not in tied]
    if unexpected:
        raise _another(f"{asked} {source}", f"it has {', '.join(unexpected[:3])}, which the model has not")
    return notes


def _without_wrappers(names: Iterable[str], wanted: Iterable[str], where: str) -> tuple[dict[str, str], list[str]]:
    """{name in the plain model: name in the file}, and a note where a wrapper's prefix was taken off."""
    held: dict[str, str] = {}
    names = list(names)
    whole = all(plain(name).startswith("module.") for name in names)
    whole = whole and not any(name.startswith("module.") for name in wanted)
    for own in names:
        name = plain(own).removeprefix("module.") if whole else plain(own)
        if name in held:
            raise CheckpointError(
                f"{where} holds {held[name]} and {own}, which are one name without a wrapper's prefix; keep one of them"
            )
        held[name] = own
    changed = [own for name, own in held.items() if name != own]
    if not changed:
        return held, []
    return held, [f"{where}: prefixes of a wrapper are left out of its names, as in {changed[0]}"]


def _another(where: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{where} is of another model: {problem}; use the model it was written by")
