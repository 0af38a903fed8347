"""How a run begins: what it holds and draws until its part of the model is there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.small_jobs import start
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.engine import parts
from shoal.engine.names import plain
from shoal.engine.run import Run
from shoal.job import Job
from shoal.parallel.shard.pieces import local

SLACK_BYTES = 4096  # samples, indices, norms' scalars


class Peak(TorchDispatchMode):
    """The most bytes of real tensors, made in here, that were there at once, and how many operations drew numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = self.draws = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, torch.Tensor)]
        real = [local(t) for t in made if not isinstance(t, FakeTensor) and not t.is_meta]
        if real and torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
        for storage in (t.untyped_storage() for t in real):
            self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self.most_bytes = max(self.most_bytes, sum(size for _, size in self._alive.values()))
        return result


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    storages = {local(t).untyped_storage()._cdata: local(t).untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def largest_weight(model: nn.Module) -> int:
    """Bytes of a model's largest parameter."""
    return max(param.numel() * param.element_size() for param in model.parameters())


def share_of(run: Run) -> int:
    """Bytes of the weights and buffers that this rank holds."""
    return bytes_of(t for t in [*run.model.parameters(), *run.model.buffers()] if not t.is_meta)


def watched(made: Job, out: Path, **settings: Any) -> tuple[Run, int, int]:
    """A run, and the most bytes and the draws up to where this rank's part of the model is there."""
    peak, at_end = Peak(), []
    gradients = parts._gradients

    def then(*args):
        at_end.extend((peak.most_bytes, peak.draws))
        return gradients(*args)

    with mock.patch.object(parts, "_gradients", then), peak:
        run = start(made, out, global_batch=8, micro_batch=1, steps=1, **settings)
    return run, at_end[0], at_end[1]


def compare(run: Run, wanted: dict[str, Tensor]) -> None:
    """What a rank holds is bitwise the same region of the whole."""
    held = 0
    for name, tensor in [*run.model.named_parameters(), *run.model.named_buffers()]:
        if not tensor.is_meta:
            piece = run.held.piece(plain(name), tensor.detach())
            assert piece.shape == tuple(wanted[name].shape)
            assert all(torch.equal(part.tensor, part.box.of(wanted[name])) for part in piece.parts), name
            held += sum(part.tensor.numel() for part in piece.parts)
    assert held
