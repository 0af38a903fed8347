"""Buffers that the model changes in forward: rank 0's value holds on all ranks after each step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.parallel.replicate.batchnorm import GlobalBatchNorm


class BufferWatch:
    """Finds changed buffers by name at each step, so that rebinding one (``self.buf = self.buf + 1``) is seen."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.model = model
        self.group = group
        equal = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            if isinstance(module, GlobalBatchNorm)
            for name, _ in module.named_buffers(recurse=False)
        }
        self.names = [name for name, _ in model.named_buffers() if name not in equal]
        self._seen = [self._mark(name) for name in self.names]

    def _tensor(self, name: str) -> Tensor:
        return self.model.get_buffer(name)

    def _mark(self, name: str) -> tuple[int, int]:
        tensor = self._tensor(name)
        return tensor.data_ptr(), tensor._version

    def changed(self) -> list[float]:
        """1.0 for each watched buffer that this rank changed since the last step."""
        return [float(self._mark(name) != seen) for name, seen in zip(self.names, self._seen, strict=True)]

    def equalise(self, changed: list[bool]) -> None:
        """Collective. Take the first rank's value (of the ranks that hold the same part) of each changed buffer."""
        for number, (name, is_changed) in enumerate(zip(self.names, changed, strict=True)):
            if is_changed and not self._tensor(name).is_meta:
                if dist.get_world_size(self.group) > 1:
                    with torch.no_grad():
                        value = self._tensor(name).contiguous()
                        dist.broadcast(value, group=self.group, group_src=0)
                        self._tensor(name).copy_(value)
                self._seen[number] = self._mark(name)
