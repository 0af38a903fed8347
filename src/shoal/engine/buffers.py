"""Buffers that the model changes in forward: rank 0's value holds on all ranks after each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.core.errors import ModelError
from shoal.parallel.replicate.batchnorm import GlobalBatchNorm

_RESHAPED = float(1 << 20)  # more than there are ranks: one that sees a new shape shows in the sum over them


class BufferWatch:
    """Finds changed buffers by name at each step, so that rebinding one (``self.buf = self.buf + 1``) is seen.

    A buffer outside the state (``persistent=False``) whose shape comes to differ between ranks is a cache: each rank
    keeps its own from then on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        equal = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            if isinstance(module, GlobalBatchNorm)
            for name, _ in module.named_buffers(recurse=False)
        }
        self.names = [name for name, _ in model.named_buffers() if name not in equal]
        self._apart: set[str] = set()
        self._seen = [self._mark(name) for name in self.names]

    def _tensor(self, name: str) -> Tensor:
        return self.model.get_buffer(name)

    def _mark(self, name: str) -> tuple[Tensor, int]:
        """The tensor itself: its address alone may be used again once it is freed."""
        tensor = self._tensor(name)
        return tensor, tensor._version

    def changed(self) -> list[float]:
        """More than 0 for each watched buffer that this rank changed since the last step."""
        return [self._change(name, *seen) for name, seen in zip(self.names, self._seen, strict=True)]

    def _change(self, name: str, seen: Tensor, version: int) -> float:
        tensor = self._tensor(name)
        if name in self._apart or (tensor is seen and tensor._version == version):
            return 0.0
        return 1.0 if tensor.shape == seen.shape else _RESHAPED

    def equalise(self, changed: list[float]) -> None:
        """Collective. Take rank 0's value of every buffer that any rank changed; ``changed``: summed over ranks."""
        self._part([name for name, value in zip(self.names, changed, strict=True) if value >= _RESHAPED])
        for number, (name, value) in enumerate(zip(self.names, changed, strict=True)):
            if value > 0:
                if dist.get_world_size() > 1 and name not in self._apart:
                    with torch.no_grad():
                        value = self._tensor(name).contiguous()
                        dist.broadcast(value, src=0)
                        self._tensor(name).copy_(value)
                self._seen[number] = self._mark(name)

    def _part(self, names: list[str]) -> None:
        """Collective where there are ``names``. Leave caches apart whose shape is not everywhere the same."""
        if not names:
            return
        shapes: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(shapes, [list(self._tensor(name).shape) for name in names])
        for name, *found in zip(names, *shapes, strict=True):
            other = next((rank for rank, shape in enumerate(found) if shape != found[0]), None)
            if other is None:
                continue
            owner, _, last = name.rpartition(".")
            if last not in self.model.get_submodule(owner)._non_persistent_buffers_set:
                raise ModelError(
                    f"forward gave the buffer {name!r} the shape {found[0]} on rank 0 and {found[other]} on rank "
                    f"{other}, but a checkpoint holds it once; give it one shape whatever the batch, or register it "
                    "with persistent=False"
                )
            self._apart.add(name)


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """A forward inside, which is no training step, leaves the model's buffers as they were."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in kept:
            module._buffers[name] = buffer.copy_(value)
