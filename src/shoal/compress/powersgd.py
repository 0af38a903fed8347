"""Two thin factors of each gradient in its place (Vogels et al. 2019, https://arxiv.org/abs/1905.13727)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.compress.codec import Part, Remembers, Stages
from shoal.plan.codec import matrix

FACTOR = "factor"  # Q of the step before, equal on all ranks


class PowerSGD(Remembers):
    """One step of a power iteration, algorithm 1 of the paper, in sums: with M = gradient + error of a rank and Q of
    the step before, P = sum of M Q is made orthonormal, Q = sum of its M^T P, and P Q^T stands for the sum of M.

    What a rank's own part of that leaves of its M is its error, so that errors add up to what the sum lacks.
    """

    def begin(self, name: str, param: nn.Parameter) -> None:
        """No error yet, and a Q that only the name decides."""
        super().begin(name, param)
        of = matrix(param.shape)
        drawn = torch.randn(of.columns, self.spec.rank(of), generator=torch.Generator().manual_seed(_seed(name)))
        self.memory.kept[FACTOR, name] = drawn.to(param.device, param.dtype)

    def reduce(self, parts: Sequence[Part], flat: Tensor, group: dist.ProcessGroup | None) -> Stages:
        """Collective. An all-reduce of every P (rows x rank), then one of every Q (columns x rank)."""
        self.memory.add(parts)
        given = [part.gradient.reshape(part.matrix) for part in parts]
        before = [self.memory.kept[FACTOR, part.name] for part in parts]
        sums = torch.cat([(m @ q).flatten() for m, q in zip(given, before, strict=True)])
        yield dist.all_reduce(sums, group=group, async_op=True)
        sizes = [self.spec.rank(part.matrix) for part in parts]
        heights = [part.matrix.rows * size for part, size in zip(parts, sizes, strict=True)]
        bases = [
            torch.linalg.qr(p.view(-1, size)).Q for p, size in zip(sums.split(heights), sizes, strict=True)
        ]  # the paper orthogonalises by Gram-Schmidt: the same span
        own = [m.T @ base for m, base in zip(given, bases, strict=True)]
        rest = flat.clone()
        for part, base, q, kept in zip(parts, bases, own, _views(parts, rest), strict=True):
            kept.sub_((base @ q.T).view(part.gradient.shape))
        self.memory.leave(parts, rest)
        sums = torch.cat([q.flatten() for q in own])
        yield dist.all_reduce(sums, group=group, async_op=True)
        for part, base, old, q in zip(parts, bases, before, sums.split([q.numel() for q in own]), strict=True):
            q = q.view(old.shape)
            part.gradient.copy_((base @ q.T).view(part.gradient.shape))
            self.memory.left[FACTOR, part.name] = _directions(q, old)


def _views(parts: Sequence[Part], flat: Tensor) -> Iterator[Tensor]:
    """Each part's place in another flat tensor."""
    start = flat.storage_offset()
    for _, gradient in parts:
        yield flat.as_strided(gradient.shape, gradient.stride(), start)
        start += gradient.numel()


def _directions(factor: Tensor, old: Tensor) -> Tensor:
    """Columns of length 1, whatever the gradients' scale; where one is nothing, the old one, to go on from."""
    length = factor.norm(dim=0)
    return torch.where(length > 0, factor / length, old)


def _seed(name: str) -> int:
    return zlib.crc32(name.encode())
