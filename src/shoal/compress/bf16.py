"""bfloat16 on the wire, float32 in the sum: half the bytes, nothing kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.compress.codec import Memory, Part, Stages, gather
from shoal.plan.codec import Codec as Spec


class Bf16:
    """Each rank gets its share of every other's gradient in bfloat16, sums it in the gradient's own type, and sends the
    sum in bfloat16 to all: two roundings, however many ranks (a bfloat16 all-reduce rounds at every hop)."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.memory = spec, Memory()

    def begin(self, name: str, param: nn.Parameter) -> None:
        """Nothing is kept."""

    def reduce(self, parts: Sequence[Part], flat: Tensor, group: dist.ProcessGroup | None) -> Stages:
        """Collective. An all-to-all and an all-gather of N bfloat16 numbers, padded to a multiple of the ranks."""
        ranks, numel = dist.get_world_size(group), flat.numel()
        share = -(-numel // ranks)
        sent = flat.new_zeros(ranks * share, dtype=torch.bfloat16)
        sent[:numel] = flat
        got = torch.empty_like(sent)
        yield dist.all_to_all_single(got, sent, group=group, async_op=True)
        total = got.view(ranks, share).to(flat.dtype).sum(0).bfloat16()
        yield gather(sent, total, group=group, async_op=True)
        flat.copy_(sent[:numel])
