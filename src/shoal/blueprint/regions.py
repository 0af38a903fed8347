"""One region tried: column layers carried through the rules, operation by operation, to a row layer. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, NamedTuple

from shoal.blueprint.calls import Call, Outcome
from shoal.blueprint.facts import Blueprint, Operation, Ref
from shoal.blueprint.rules import LOSSES, rule
from shoal.blueprint.split import Refusal, Seen, Split, fits

#: Operations with a weight that can be divided: where input, weight and bias stand, and the weight's output dimension.
LAYERS = {"linear": (0, 1, 2, 0), "addmm": (1, 2, 0, 1), "matmul": (0, 1, 2, 1), "mm": (0, 1, 2, 1)}

TRANSPOSES = ("T", "t", "mT", "transpose")


class Layer(NamedTuple):
    """An operation with a weight."""

    number: int
    weight: str
    bias: str | None
    input: int | None
    output_dim: int
    outputs: int
    transposed: int | None  # the operation that transposes the weight, where one does

    def splits(self, kind: str, split: Split) -> dict[str, Split]:
        """The splits of its parameters as a column or a row layer, of which outputs or inputs are split so."""
        if kind == "row":
            return {self.weight: split.on(1 - self.output_dim)}
        return {self.weight: split.on(self.output_dim)} | ({self.bias: split.on(0)} if self.bias else {})


class Failed(Exception):
    """A region cannot be as tried. ``columns``: those in the way; ``packings``: of their outputs, which may do."""

    def __init__(self, reason: str, columns: Iterable[int], packings: dict[int, list[Split]], weights: Iterable[str]):
        super().__init__(reason)
        self.columns, self.packings, self.weights = set(columns), packings, list(weights)


class Trial:
    """One region carried through the rules, from its columns to its row."""

    def __init__(
        self,
        blueprint: Blueprint,
        degree: int,
        layers: dict[int, Layer],
        row: Layer,
        columns: dict[int, tuple[Layer, Split]],
    ) -> None:
        self.blueprint, self.degree, self.layers, self.row, self.columns = blueprint, degree, layers, row, columns
        self.splits: dict[int, Split] = {}  # of values
        self.origin: dict[int, frozenset[int]] = {}  # the columns that a value comes from
        self.weights: dict[str, Split] = {}
        for layer, outputs in columns.values():
            self.weights |= layer.splits("column", outputs)
        self.visited: list[int] = []
        self.transposes = {c.transposed: number for number, (c, _) in columns.items() if c.transposed is not None}

    def run(self) -> Split:
        """How the row's inputs are split. Raises Failed."""
        for number, (_, outputs) in self.columns.items():
            if not fits(outputs.parts, self.degree):
                raise self.failed(
                    f"{' + '.join(map(str, outputs.parts))} outputs cannot be divided among {self.degree}", {number}
                )
        seen, ended = {*self.columns, *self.transposes}, None
        waiting = sorted(seen)
        while waiting:
            number = heapq.heappop(waiting)
            if number == self.row.number:
                ended = self.end()
                continue
            operation = self.blueprint.operations[number]
            own = number if number in self.columns else self.transposes.get(number)
            origin = frozenset(() if own is None else (own,)).union(
                *(self.origin.get(value, frozenset()) for value in operation.reads)
            )
            outcome = self.outcome(operation, number, origin)
            self.visited.append(number)
            given = outcome.outputs
            each = (
                given if isinstance(given, tuple) and not isinstance(given, Split) else (given,) * len(operation.gives)
            )
            for value, split in zip(operation.gives, each, strict=True):
                if split is None:
                    continue
                self.splits[value], self.origin[value] = split, origin
                if value in self.blueprint.outputs:
                    raise self.failed("its output leaves the model", origin)
                for reader in self.blueprint.readers.get(value, ()):
                    if reader not in seen:
                        seen.add(reader)
                        heapq.heappush(waiting, reader)
        if ended is None:
            raise self.failed(f"its output does not reach {self.row.weight}", set(self.columns))
        return ended

    def end(self) -> Split:
        """At the row layer: its input must be split along its last dimension."""
        split = self.splits.get(self.row.input) if self.row.input is not None else None
        shape = self.blueprint.values[self.row.input].shape if self.row.input is not None else ()
        if split is None or split.dim != len(shape) - 1:
            raise self.failed(
                f"what reaches {self.row.weight} is not split along its last dimension", set(self.columns)
            )
        return split

    def outcome(self, operation: Operation, number: int, origin: frozenset[int]) -> Outcome:
        """An operation by the rules; where it must gather, the region cannot be."""
        where = f"{operation.name} in {operation.module or 'the model'}"
        if number in self.layers and number not in self.columns:
            layer = self.layers[number]
            split = self.splits.get(layer.input) if layer.input is not None else None
            raise self.failed(f"its output is read by {layer.weight} too ({split})", origin)
        call = Call(
            operation.name, self.seen(operation.arguments),
            {key: self.seen(value) for key, value in operation.keywords}, self.degree, operation.in_place,
        )  # fmt: skip
        try:
            outcome = rule(call)
        except Refusal as refusal:
            raise self.failed(f"{where}: {refusal}", origin, self.packings(refusal, origin)) from None
        for tensor, target in zip(call.tensors, outcome.targets, strict=True):
            if tensor.split is not None and tensor.split != target:
                raise self.failed(f"{where}: {tensor.split} meets {target}", origin)
        if outcome.partial or outcome.how in LOSSES:
            raise self.failed(f"{where}: a sum over the split dimension", origin)
        return outcome

    def seen(self, value: Any) -> Any:
        """An operation's argument as the rules see it."""
        if isinstance(value, Ref):
            if isinstance(value.of, int):
                return Seen(self.blueprint.values[value.of].shape, self.splits.get(value.of))
            return Seen(self.blueprint.parameter[value.of].shape, self.weights.get(value.of))
        return tuple(self.seen(part) for part in value) if isinstance(value, tuple) else value

    def packings(self, refusal: Refusal, origin: frozenset[int]) -> dict[int, list[Split]]:
        """Other packings for the one column that an operation refuses: blocks as they are, then other parts."""
        if len(origin) != 1:
            return {}
        (number,) = origin
        (layer, now), hints = self.columns[number], []
        if refusal.unit and all(length % refusal.unit == 0 for length in now.lengths):
            hints.append(Split(0, tuple(length // refusal.unit for length in now.lengths), refusal.unit))
        if refusal.parts and layer.outputs % sum(refusal.parts) == 0:
            scale = layer.outputs // sum(refusal.parts)
            hints.append(Split(0, tuple(part * scale for part in refusal.parts)))
        return {number: hints}

    def failed(self, reason: str, columns: Iterable[int], packings: dict[int, list[Split]] | None = None) -> Failed:
        return Failed(reason, columns, packings or {}, [self.columns[n][0].weight for n in columns])
