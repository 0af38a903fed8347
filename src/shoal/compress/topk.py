"""The largest values of each gradient, the rest in a later step (Stich et al. 2018, https://arxiv.org/abs/1809.07599)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.compress.codec import Part, Remembers, Stages, gather


class TopK(Remembers):
    """Each rank sends its largest values and their places to all, who add them up in the order of ranks.

    A value that is not finite is among the largest, so that every rank sees it.
    """

    def reduce(self, parts: Sequence[Part], flat: Tensor, group: dist.ProcessGroup | None) -> Stages:
        """Collective. One all-gather of k values and k places (int32) of each parameter."""
        self.memory.add(parts)
        chosen, start = [], 0
        for part in parts:
            numel = part.matrix.numel
            mine = flat[start : start + numel].abs()
            chosen.append(mine.topk(self.spec.values(part.matrix), sorted=False).indices + start)
            start += numel
        places = torch.cat(chosen)
        values = flat[places]
        self.memory.leave(parts, flat.index_fill(0, places, 0.0))
        sent = torch.cat([values.view(torch.int32), places.int()])
        got = sent.new_empty(dist.get_world_size(group) * sent.numel())
        yield gather(got, sent, group=group, async_op=True)
        flat.zero_()
        width = sent.numel() - places.numel()
        for told in got.view(-1, sent.numel()):
            flat.index_add_(0, told[width:], told[:width].clone().view(flat.dtype))  # a copy begins where its type may
