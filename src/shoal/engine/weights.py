"""Weights alone to begin from: of a run, a checkpoint, or safetensors: a file, or a folder of files with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal.checkpoint.layout import MANIFEST
from shoal.checkpoint.pieces import Part
from shoal.checkpoint.reader import Reader, candidates
from shoal.core.errors import CheckpointError
from shoal.engine import state
from shoal.engine.found import first_differing, newest_everywhere
from shoal.engine.held import Held
from shoal.engine.names import plain

INDEX = ".safetensors.index.json"


def load_weights(
    model: nn.Module, source: str | Path, asked: str = "weights from", held: Held | None = None
) -> list[str]:
    """Copy the weights of a run's folder, a checkpoint or safetensors into ``model``; returns notes.

    Safetensors: one file, or a folder as Hugging Face models are saved in. What is read is cast to the parameters' own
    dtype. ``held``: what of the model is here; all of it where nothing is said. Collective where a process group is
    there. Raises CheckpointError.
    """
    source = Path(source)
    files = _safetensors(source, f"{asked} {source}")
    if files is not None:
        other = None if held is None else first_differing(sorted(set(files.values())))
        if other is not None:
            raise CheckpointError(
                f"{asked} {source}: rank {other} sees other bytes there than rank 0; give all ranks the same files"
            )
        return _load_files(model, files, f"{asked} {source}", held or Held())
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    found, skipped = newest_everywhere(folder)
    if found is None:
        why = "".join(f"; {bad.path} is none: {bad.problem}" for bad in skipped)
        what = "holds no good checkpoint" if source.exists() else "does not exist, so it holds no good checkpoint"
        near = ", ".join(path.name for _, path in candidates(source.parent)) if not source.exists() else ""
        there = f"; {source.parent} has {near}" if near else ""
        raise CheckpointError(f"{asked} {source} {what}{why}{there}; name a run, a step-N or a .safetensors")
    state.load_model(model, Reader(found.path), str(found.path), held)
    return [f"checkpoint {bad.path} is skipped: {bad.problem}" for bad in skipped]


def _safetensors(source: Path, where: str) -> dict[str, Path] | None:
    """{tensor's name: its file} where ``source`` is or holds safetensors; None where it may be a run or checkpoint."""
    if source.suffix == ".safetensors":
        if not source.exists():
            raise CheckpointError(f"{where}: no such file")
        return _names([source], where)
    if not source.is_dir() or (source / "checkpoints").is_dir() or (source / MANIFEST).exists() or candidates(source):
        return None
    indices, files = sorted(source.glob(f"*{INDEX}")), sorted(source.glob("*.safetensors"))
    single = source / "model.safetensors"
    if len(indices) == 1 and not single.exists():
        return _indexed(indices[0], where)
    if len(files) > 1 and single not in files:
        found = ", ".join(file.name for file in files[:3])
        raise CheckpointError(f"{where} holds {len(files)} safetensors ({found}) and not one index; name one file")
    return _names([single] if single in files else files, where) if files else None


def _indexed(index: Path, where: str) -> dict[str, Path]:
    """What an index says, as {"weight_map": {tensor's name: file's name}}, held against the files."""
    try:
        found = json.loads(index.read_text())["weight_map"]
        files = {name: os.path.basename(file) for name, file in found.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{where}: {index.name} cannot be read as an index ({type(error).__name__}: {error}); "
            'it should be JSON with a "weight_map" from tensors to files'
        ) from None
    there = _names([index.parent / file for file in sorted(set(files.values()))], where)
    for name, file in files.items():
        if there.get(name) != index.parent / file:
            raise CheckpointError(
                f"{where}: {index.name} says that {name} is in {file}, which does not hold it; get all files of the "
                "model once more"
            )
    return there


def _names(files: Iterable[Path], where: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{where}: {path.name} cannot be read as safetensors: {error}") from None
    return found


def _load_files(model: nn.Module, files: Mapping[str, Path], where: str, here: Held) -> list[str]:
    """One tensor at a time, and of it what is held here."""
    mine, tied = state.model_tensors(model, here)
    wanted = {name.removeprefix("model/"): tensor for name, tensor in mine.items()}
    names, notes = _without_wrappers(files, wanted, where)
    names, more = _under_base(names, {*wanted, *tied}, where)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, tensor in wanted.items():
            own = next((n for n in (name, *(k for k, v in tied.items() if v == name)) if n in names), None)
            if own is None:
                raise _another(where, f"{name} is missing; it has {', '.join(list(names)[:3])}, ...")
            path = files[names[own]]
            try:
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                _read(opened[path], names[own], name, tensor, where, here)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{where}: {path.name} cannot be read as safetensors: {error}") from None
    unexpected = [name for name in names if name not in wanted and name not in tied]
    if unexpected:
        raise _another(where, f"it has {', '.join(unexpected[:3])}, which the model has not")
    return notes + more


def _read(file: Any, own: str, name: str, tensor: Tensor, where: str, here: Held) -> None:
    """Fill this rank's parts of a tensor from those of the file's ``own``."""
    given = file.get_slice(own)
    found, whole = tuple(given.get_shape()), here.shape(name, tensor)
    if found != whole:
        raise _another(where, f"{name} has shape {found}, the model's is {whole}")
    for part in () if tensor.is_meta else here.piece(name, tensor).parts:
        if part.tensor.numel():
            part.tensor.copy_(given[_slices(part)] if found else file.get_tensor(own))


def _slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(part.offsets, part.tensor.shape, strict=True))


def _under_base(held: dict[str, str], known: set[str], where: str) -> tuple[dict[str, str], list[str]]:
    """Names of a model's inner part as the model has them (``h.0.weight``: ``transformer.h.0.weight``), and a note."""
    for base in {} if known & held.keys() else dict.fromkeys(name.partition(".")[0] for name in sorted(known)):
        if all(f"{base}.{name}" in known for name in held):
            said = f"{where}: its tensors are those of the model's part {base}"
            return {f"{base}.{name}": own for name, own in held.items()}, [said]
    return held, []


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
