"""Gradient codecs as a plan names them: which weights each carries, what it sends and keeps, from shapes alone.

The codecs themselves: compress/. Volumes: Vogels et al., PowerSGD, https://arxiv.org/abs/1905.13727, section 3; Wang et
al., ZeRO++, https://arxiv.org/abs/2306.10209 (quantised reduce-scatter as an all-to-all).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from shoal.core.errors import ConfigError, nearest
from shoal.plan.collectives import sent_bytes
from shoal.plan.mesh import Mesh

SMALLEST = 1024  # numbers in a weight: what a smaller one spares is less than its part of the work
PLACE_BYTES = 4  # of the place of a value that top-k sends
BLOCK = 256  # values that share a scale in int8
SCALE_BYTES = 4
#: Each codec's amount, in words; None: it takes none.
AMOUNTS = {
    "bf16": None,
    "int8": None,
    "topk": "the share of values to send, above 0 and at most 1",
    "powersgd": "its rank, a whole number from 1 on",
}
EXAMPLES = {"bf16": "bf16", "int8": "int8", "topk": "topk:0.01", "powersgd": "powersgd:4"}


class Wire(NamedTuple):
    """A collective in which gradients travel. ``bytes``: of the whole buffer, as all ranks hold it together."""

    collective: str
    bytes: float


class Matrix(NamedTuple):
    """A weight as codecs see it: its first dimension by all others."""

    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return self.rows * self.columns


def matrix(shape: Iterable[int]) -> Matrix:
    """The matrix that a weight of ``shape`` is; a vector has one column."""
    rows, *others = (*shape, 1)
    return Matrix(rows, math.prod(others))


class Codec(NamedTuple):
    """A codec's name and its amount (0 where it takes none). ``str`` gives back what was parsed."""

    name: str
    amount: float = 0

    def __str__(self) -> str:
        return self.name if AMOUNTS[self.name] is None else f"{self.name}:{self.amount:g}"

    @classmethod
    def parse(cls, text: str, where: str = "compress") -> Codec:
        """``"topk:0.01"``. Raises ConfigError: an unknown name, an amount that is missing, wrong or not taken."""
        name, colon, given = text.strip().partition(":")
        asked = f"{where} = {text!r}"
        if name not in AMOUNTS:
            raise ConfigError(f"{asked}: there is no codec {name!r}; {nearest(name, AMOUNTS)}")
        words = AMOUNTS[name]
        if words is None:
            if colon:
                raise ConfigError(f"{asked}: {name} takes no amount; write {name}")
            return cls(name)
        try:
            amount = float(given)
        except ValueError:
            amount = math.nan
        good = 0 < amount <= 1 if name == "topk" else amount >= 1 and amount == amount // 1 < math.inf
        if not good:
            raise ConfigError(
                f"{asked}: after {name}: comes {words}, found {given!r}; write for example {EXAMPLES[name]}"
            )
        return cls(name, amount)

    @property
    def remembers(self) -> bool:
        """Whether each rank keeps, from step to step, what it has not sent."""
        return self.name != "bf16"

    def rank(self, of: Matrix) -> int:
        """Of PowerSGD's factors."""
        return min(int(self.amount), of.rows, of.columns)

    def values(self, of: Matrix) -> int:
        """How many top-k sends."""
        return min(of.numel, max(1, math.ceil(self.amount * of.numel)))

    def carries(self, of: Matrix) -> bool:
        """Whether a weight's gradient is compressed: not vectors, not small ones, not where little would be spared."""
        if of.columns < 2 or of.numel < SMALLEST:
            return False
        return self.name != "powersgd" or 2 * self.rank(of) * (of.rows + of.columns) <= of.numel

    def wires(self, carried: Iterable[Matrix], ranks: int, number_bytes: float) -> list[Wire]:
        """The collectives, in turn, in which weights that are carried travel, as if in one bucket (unpadded)."""
        weights = list(carried)
        numel = sum(of.numel for of in weights)
        if self.name == "topk":
            chosen = sum(self.values(of) for of in weights)
            return [Wire("all_gather", ranks * chosen * (number_bytes + PLACE_BYTES))]
        if self.name == "powersgd":
            sides = [sum(self.rank(of) * of[side] for of in weights) for side in (0, 1)]
            return [Wire("all_reduce", side * number_bytes) for side in sides]
        nbytes = numel * 2 if self.name == "bf16" else numel * (1 + SCALE_BYTES / BLOCK)
        return [Wire("all_to_all", nbytes), Wire("all_gather", nbytes)]

    def kept_numbers(self, of: Matrix) -> int:
        """Numbers that a rank keeps of a weight: what it has not sent, and PowerSGD's factor to begin with."""
        return of.numel * self.remembers + (self.rank(of) * of.columns if self.name == "powersgd" else 0)

    def working_bytes(self, numel: float, number_bytes: float) -> float:
        """Of what the codec has at hand of a bucket of ``numel``, besides what it keeps and small parts, at most."""
        if self.name == "bf16":
            return numel * (2 * 2 + number_bytes)  # sent, received; widened
        return numel * (2 + 2 * number_bytes) if self.name == "int8" else 0.0


class Traffic(NamedTuple):
    """How gradients travel: the ``coded`` collectives and the bytes that are summed as they are (``plain``)."""

    coded: list[Wire]
    plain: float

    @property
    def wires(self) -> list[Wire]:
        """All of them."""
        return [*self.coded, Wire("all_reduce", self.plain)]

    def sent_bytes(self, ranks: int) -> float:
        """What each of ``ranks`` sends in a step."""
        return sum(sent_bytes(wire.collective, ranks, wire.bytes) for wire in self.wires)


def traffic(codec: Codec | None, weights: Iterable[Matrix], ranks: int, number_bytes: float) -> Traffic:
    """A step's gradients of ``weights`` among ``ranks``."""
    every = list(weights)
    carried = [of for of in every if codec and codec.carries(of)]
    plain = (sum(of.numel for of in every) - sum(of.numel for of in carried)) * number_bytes
    return Traffic(codec.wires(carried, ranks, number_bytes) if codec and carried else [], plain)


def conflicts(text: str | None, mesh: Mesh, precision: str) -> list[str]:
    """What of a codec does not go with a plan's mesh and precision."""
    if text is None:
        return []
    try:
        codec = Codec.parse(text)
    except ConfigError as error:
        return [str(error)]
    found, asked = [], f"compress = {text!r}"
    if mesh.shard > 1:
        found.append(
            f"{asked}, but the mesh is {mesh}: gradients of sharded weights are summed by reduce-scatters, which no "
            "codec takes part in; leave compress out, or set shard = 1"
        )
    elif codec.remembers and mesh.size != mesh.replicate:
        found.append(
            f"{asked} keeps what each rank has not sent of whole weights, and the mesh {mesh} divides the model; "
            'use replicate alone, or compress = "bf16"'
        )
    if codec.remembers and precision == "fp16":
        found.append(
            f"{asked} keeps errors from step to step, and under fp16 each step's gradients have that step's loss "
            'scale; use precision = "bf16", or compress = "bf16"'
        )
    if codec.name == "topk" and codec.amount * mesh.replicate > 1:
        found.append(
            f"{asked} over {mesh.replicate} replicas sends {codec.amount * mesh.replicate:.3g} times as much as no "
            f"codec, as every rank gets every other's values; send a share below {1 / mesh.replicate:.2g}, or use "
            "powersgd"
        )
    return found
