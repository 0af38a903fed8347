"""Weights for others: one safetensors file under the model's own names; and the list of a run's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.files import FileSystem
from shoal.checkpoint.layout import CHUNK_BYTES, STEP_NAME, Layout, plan_file
from shoal.checkpoint.reader import Found, Reader, candidates, checkpoints, newest_good
from shoal.core.errors import CheckpointError, nearest

FOLDER = "checkpoints"  # in a run's folder
EXPORT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def list_checkpoints(run_folder: Path) -> list[Found]:
    """A run's checkpoints, newest first; sizes are checked, contents are not read."""
    return _present(run_folder, verify=False)


def verify_checkpoints(run_folder: Path) -> list[Found]:
    """A run's checkpoints, newest first, every file held against its checksum."""
    return _present(run_folder, verify=True)


def _present(run_folder: Path, verify: bool) -> list[Found]:
    folder = Path(run_folder) / FOLDER
    if not folder.is_dir():
        raise CheckpointError(f"{run_folder} holds no run: it has no folder {FOLDER!r}; give the run's --out folder")
    return checkpoints(folder, verify)


def export(
    run_folder: Path,
    to: Path,
    step: int | None = None,
    dtype: str | torch.dtype | None = None,
    ema: bool = False,
    files: FileSystem | None = None,
) -> Path:
    """Write ``to/model.safetensors`` and ``to/export.json``; returns the former.

    The newest good checkpoint unless ``step`` is given. ``dtype`` ("fp32", "bf16", "fp16", "fp64") is what all
    floating tensors become, None keeps each one's own. ``ema`` takes the averaged weights where there are some. Tied
    tensors are written once, under their first name; the others stand in the metadata under ``tied``.
    Raises CheckpointError.
    """
    files = files or FileSystem()
    wanted = _dtype(dtype)
    reader = Reader(_choose(Path(run_folder), step))
    sources = _sources(reader, ema)
    kept = {name: (reader.shape(source), reader.dtype(source)) for name, source in sources.items()}
    stored = {name: (shape, _stored(own, wanted)) for name, (shape, own) in kept.items()}
    floating = sorted({str(own).removeprefix("torch.") for _, own in stored.values() if own.is_floating_point})
    facts = {
        "step": reader.step,
        "dtype": floating[0] if len(floating) == 1 else (floating or None),
        "ema": ema,
        "tied": reader.values.get("tied", {}),
        "tensors": len(stored),
    }
    metadata = {"format": "pt", "step": str(reader.step), "dtype": json.dumps(facts["dtype"])}
    if facts["tied"]:
        metadata["tied"] = json.dumps(facts["tied"])
    layout = plan_file(stored, metadata)
    path = Path(to) / "model.safetensors"
    try:
        files.mkdir(path.parent)
        _write(path, layout, _tensors(reader, sources, stored, layout), files)
        files.write_whole(path.with_name("export.json"), json.dumps(facts, indent=2).encode() + b"\n")
        files.fsync_dir(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot export to {to}: {error}; it needs {layout.file_bytes} bytes") from error
    return path


def _dtype(asked: str | torch.dtype | None) -> torch.dtype | None:
    if asked is None or isinstance(asked, torch.dtype):
        return asked
    if asked not in EXPORT_DTYPES:
        raise CheckpointError(f"cannot export as {asked!r}: {nearest(asked, EXPORT_DTYPES)}")
    return EXPORT_DTYPES[asked]


def _stored(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _choose(run_folder: Path, step: int | None) -> Path:
    """The checkpoint to export; it verifies. Raises CheckpointError saying what was found instead."""
    _present(run_folder, verify=False)
    folder = run_folder / FOLDER
    if step is None:
        found, skipped = newest_good(folder)
        if found is None:
            why = "; ".join(f"step {bad.step}: {bad.problem}" for bad in skipped) or "none was saved"
            raise CheckpointError(f"{run_folder} has no good checkpoint to export: {why}")
        return found.path
    for found in _present(run_folder, verify=True):
        if found.step == step and found.problem is None:
            return found.path
        if found.step == step and STEP_NAME.fullmatch(found.path.name):
            raise CheckpointError(f"cannot export step {step} of {run_folder}: {found.problem}; choose another step")
    steps = ", ".join(str(known) for known, _ in candidates(folder)) or "none"
    raise CheckpointError(f"cannot export step {step} of {run_folder}: there is no such checkpoint; saved: {steps}")


def _sources(reader: Reader, ema: bool) -> dict[str, str]:
    """{name in the model: name in the checkpoint}."""
    own = [name.removeprefix("model/") for name in reader.names() if name.startswith("model/")]
    averaged = {name.removeprefix("ema/") for name in reader.names() if name.startswith("ema/")}
    if not own:
        raise CheckpointError(f"{reader.path} holds no weights to export (no tensor named model/...)")
    if ema and not averaged:
        raise CheckpointError(f"{reader.path} holds no averaged weights; export without ema, or train with --ema")
    return {name: f"ema/{name}" if ema and name in averaged else f"model/{name}" for name in own}


def _tensors(
    reader: Reader, sources: dict[str, str], stored: dict[str, tuple[tuple[int, ...], torch.dtype]], layout: Layout
) -> Iterator[Tensor]:
    """One tensor at a time, in the file's order."""
    for name in layout.spans:
        yield reader.read(sources[name]).to(stored[name][1])


def _write(path: Path, layout: Layout, tensors: Iterator[Tensor], files: FileSystem) -> None:
    beside = path.with_name(path.name + ".tmp")
    descriptor = files.create(beside)
    try:
        files.write(descriptor, layout.header)
        for tensor in tensors:
            if not tensor.numel():
                continue
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK_BYTES):
                files.write(descriptor, data[start : start + CHUNK_BYTES])
        files.fsync(descriptor)
    except BaseException:
        files.unlink(beside)
        raise
    finally:
        files.close(descriptor)
    files.rename(beside, path)
