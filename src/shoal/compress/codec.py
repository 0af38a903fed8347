"""What a gradient codec is, and what it keeps of a parameter from one step to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.plan.codec import Codec as Spec
from shoal.plan.codec import Matrix, matrix

gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the old name warns from torch 2.13 on
#: Collectives on their way, one after the other; None: of a group without this rank.
Stages = Iterator[dist.Work | None]
ERROR = "error"  # what a rank has not sent of a parameter's gradient: each rank's own


class Part(NamedTuple):
    """A parameter's gradient in a bucket: a view of the parameter's shape, dense in memory."""

    name: str
    gradient: Tensor

    @property
    def matrix(self) -> Matrix:
        """Its rows and columns."""
        return matrix(self.gradient.shape)


@dataclass
class Memory:
    """What is kept of parameters, by (key, parameter's name). What a step leaves counts once it is taken over.

    So that a skipped step leaves it as it was, and no number that is not finite ever enters it.
    """

    kept: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    left: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def begin(self, name: str, param: Tensor) -> None:
        """No error yet."""
        self.kept[ERROR, name] = param.detach().new_zeros(()).expand(param.shape)

    def add(self, parts: Sequence[Part]) -> None:
        """Errors of earlier steps go into this step's gradients."""
        for part in parts:
            part.gradient.add_(self.kept[ERROR, part.name])

    def leave(self, parts: Sequence[Part], rest: Tensor) -> None:
        """``rest``: what of the parts, one after the other as in their bucket, is not sent in this step."""
        start = 0
        for name, gradient in parts:
            self.left[ERROR, name] = rest.as_strided(gradient.shape, gradient.stride(), rest.storage_offset() + start)
            start += gradient.numel()

    def take_over(self, names: Iterable[str]) -> None:
        """The step is applied to the parameters ``names``; what it left of others is forgotten, as it sent nothing."""
        taken = set(names)
        self.kept.update({key: tensor for key, tensor in self.left.items() if key[1] in taken})
        self.left.clear()

    def forget(self) -> None:
        """The step is not applied."""
        self.left.clear()


class Remembers:
    """What codecs have in common that keep what they did not send."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.memory = spec, Memory()

    def begin(self, name: str, param: nn.Parameter) -> None:
        """No error yet."""
        self.memory.begin(name, param)


def carries(spec: Spec, param: Tensor) -> bool:
    """Whether a parameter's gradient travels in the codec: a matrix of float32 or float64, large enough."""
    return param.dtype in (torch.float32, torch.float64) and spec.carries(matrix(param.shape))


class Codec(Protocol):
    """Sums gradients over ranks in fewer bytes. Every rank decodes the same bytes, so that replicas stay equal."""

    spec: Spec
    memory: Memory  # empty where nothing is kept

    def begin(self, name: str, param: nn.Parameter) -> None:
        """A parameter whose gradients it will carry; the same on every rank."""
        ...

    def reduce(self, parts: Sequence[Part], flat: Tensor, group: dist.ProcessGroup | None) -> Stages:
        """Collective. Put the sum over the ranks where this rank's gradients lie: ``parts``, one after the other in
        ``flat`` (N). Gives each collective when it is on its way, and goes on when it has come."""
        ...
