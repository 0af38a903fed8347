"""Eight bits a value, a scale for each 256 (Wang et al. 2023, ZeRO++, https://arxiv.org/abs/2306.10209)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.compress.codec import Part, Remembers, Stages, gather
from shoal.plan.codec import BLOCK


class Int8(Remembers):
    """A quantised reduce-scatter as an all-to-all, a sum in the gradient's own type, and an all-gather of the sum,
    quantised again: two quantisations, however many ranks. Sums of int8 would overflow.

    What rounding to the nearest takes away, in either of them, is added in the next step.
    """

    def reduce(self, parts: Sequence[Part], flat: Tensor, group: dist.ProcessGroup | None) -> Stages:
        """Collective. N bytes and N / 256 scales, padded to whole blocks on every rank, go out twice."""
        self.memory.add(parts)
        ranks, rank, numel = dist.get_world_size(group), dist.get_rank(group), flat.numel()
        share = -(-numel // (ranks * BLOCK)) * BLOCK
        rest = torch.cat([flat, flat.new_zeros(ranks * share - numel)]).view(ranks, share)
        sent = _packed(rest)
        rest.sub_(_unpacked(sent, flat.dtype))
        got = torch.empty_like(sent)
        yield dist.all_to_all_single(got, sent, group=group, async_op=True)
        total = _unpacked(got, flat.dtype).sum(0)
        mine = _packed(total[None])
        rest[rank] += total - _unpacked(mine, flat.dtype)[0]  # of the sum, whose error one rank keeps for all
        self.memory.leave(parts, rest.view(-1)[:numel])
        del sent, total  # two bytes a number and more, beside what is unpacked last
        yield gather(got, mine, group=group, async_op=True)
        flat.copy_(_unpacked(got, flat.dtype).view(-1)[:numel])


def _packed(values: Tensor) -> Tensor:
    """(R, S) values, S a multiple of BLOCK -> (R, S + 4 S / BLOCK) bytes: int8 values and, behind them, scales."""
    blocks = values.view(len(values), -1, BLOCK)
    scales = (blocks.abs().amax(-1) / 127).float()
    whole = (blocks / torch.where(scales == 0, 1.0, scales)[..., None]).round_().clamp_(-127, 127)
    return torch.cat([whole.to(torch.int8).view(len(values), -1).view(torch.uint8), scales.view(torch.uint8)], 1)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``_packed`` held. A scale that is not finite makes its whole block so."""
    size = packed.shape[1] * BLOCK // (BLOCK + 4)
    whole = packed[:, :size].view(torch.int8).to(dtype).view(len(packed), -1, BLOCK)
    scales = packed[:, size:].contiguous().view(torch.float32).to(dtype)
    return (whole * scales[..., None]).view(len(packed), -1)
