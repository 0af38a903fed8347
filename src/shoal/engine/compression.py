"""What gradient codecs keep, in checkpoints; and what they make of a step's traffic.

A rank's errors are its own: of all ranks together they are saved as one tensor with a row for each. Another number of
ranks takes their sum up, as that, and not who holds which part of it, is what training has not seen yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.reader import Reader
from shoal.compress import ERROR, Codec
from shoal.core.errors import CheckpointError
from shoal.parallel.replicate.buckets import GradientBuckets
from shoal.plan.codec import matrix, traffic

if TYPE_CHECKING:
    from shoal.engine.run import Run

PREFIX = "compress/"


def codec_of(run: Run) -> Codec | None:
    """The codec that the run's gradients travel in."""
    return run.buckets.codec if isinstance(run.buckets, GradientBuckets) else None


def pieces(run: Run) -> dict[str, Piece]:
    """What this rank's codec keeps, by its name in a checkpoint: ``compress/<key>/<parameter>``."""
    codec = codec_of(run)
    kept = codec.memory.kept if codec else {}
    found = {}
    for (key, name), tensor in kept.items():
        saved = f"{PREFIX}{key}/{name}"
        if key == ERROR:
            row = (tensor[None], (run.rank,) + (0,) * tensor.ndim)
            found[saved] = Piece.of((run.ranks, *tensor.shape), [row], (run.rank,))
        else:
            found[saved] = Piece.whole(tensor)
    return found


def restore(run: Run, reader: Reader) -> list[str]:
    """Take up what the codec kept; returns notes. Raises CheckpointError where something of it would be lost."""
    codec = codec_of(run)
    kept = codec.memory.kept if codec else {}
    saved = {name for name in reader.names() if name.startswith(PREFIX)}
    asked = run.layout.plan.compress
    errors = {name for name in saved if name.startswith(f"{PREFIX}{ERROR}/")}
    if lost := sorted(errors - {f"{PREFIX}{key}/{name}" for key, name in kept}):
        before = reader.values["compress"]
        raise CheckpointError(
            f"{reader.path} holds what compress = {before!r} had not sent yet of {len(lost)} gradients ({lost[0]}), "
            f"and compress = {asked!r} keeps nothing of them, so that it would be lost; resume with --compress {before}"
        )
    notes = []
    for (key, name), old in kept.items():
        place = f"{PREFIX}{key}/{name}"
        if place in saved and (key == ERROR or reader.shape(place) == tuple(old.shape)):
            kept[key, name] = _read(run, reader, place, old, key == ERROR)
    if kept and not errors:
        notes.append(f"compress {asked}: the checkpoint holds no errors of earlier steps; they begin at zero")
    elif errors and reader.ranks != run.ranks:
        notes.append(
            f"compress {asked}: what {reader.ranks} workers had not sent yet was summed, and worker 0 of {run.ranks} "
            "has it now"
        )
    return notes


def _read(run: Run, reader: Reader, place: str, old: torch.Tensor, by_rank: bool) -> torch.Tensor:
    """This rank's own; with another number of ranks all rows' sum on rank 0, nothing on others."""
    made = torch.zeros_like(old, memory_format=torch.contiguous_format)
    if not by_rank:
        reader.read_into(place, made)
        return made
    rows = [run.rank] if reader.ranks == run.ranks else range(reader.ranks) if run.rank == 0 else ()
    row = torch.empty_like(made[None])
    for number in rows:
        reader.read_into(place, row, (number,) + (0,) * old.ndim)
        made += row[0]
    return made


def account(run: Run) -> dict[str, Any] | None:
    """The codec, and bytes that a worker sends in a step to sum gradients: so, and without it. None: no codec."""
    codec = codec_of(run)
    if codec is None or not isinstance(run.buckets, GradientBuckets):
        return None
    params = [param for _, param in run.buckets.parameters]
    weights = [matrix(param.shape) for param in params]
    number_bytes = max((param.element_size() for param in params), default=0)  # a rank may have frozen weights alone
    sent, plain = (
        traffic(spec, weights, run.buckets.ranks, number_bytes).sent_bytes(run.buckets.ranks)
        for spec in (codec.spec, None)
    )
    return {"codec": str(codec.spec), "sent_bytes": round(sent), "plain_bytes": round(plain)}
