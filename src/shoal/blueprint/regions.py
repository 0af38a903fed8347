"""One region tried: column layers carried through the rules, operation by operation, to a row layer. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from shoal.blueprint.calls import Call, Outcome
from shoal.blueprint.facts import Blueprint, Operation, Ref, refs
from shoal.blueprint.layers import Layer
from shoal.blueprint.rules import LOSSES, rule
from shoal.blueprint.split import Refusal, Seen, Split, fits


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
            self.weights |= layer.columns(outputs)
        self.visited: list[int] = []
        self.made = {c.first: number for number, (c, _) in columns.items() if c.first is not None}

    def run(self) -> Split:
        """How the row's weight is split. Raises Failed."""
        for number, (_, outputs) in self.columns.items():
            if not fits(outputs.parts, self.degree):
                raise self.failed(
                    f"{' + '.join(map(str, outputs.parts))} outputs cannot be divided among {self.degree}", {number}
                )
        seen, ended = {*self.columns, *self.made}, None
        waiting = sorted(seen)
        while waiting:
            number = heapq.heappop(waiting)
            if number == self.row.number:
                ended = self.end()
                continue
            operation = self.blueprint.operations[number]
            own = number if number in self.columns else self.made.get(number)
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
        """At the row layer: what reaches it must make its results sums over the group. How its weight lies for that."""
        row, columns = self.row, set(self.columns)
        operation = self.blueprint.operations[row.number]
        call = self.call(operation, row.operand)
        try:
            outcome = rule(call)
        except Refusal as refusal:
            raise self.failed(f"{operation.name} with {row.weight}: {refusal}", columns) from None
        places = refs((operation.arguments, tuple(value for _, value in operation.keywords)))
        lying = {ref.of: (seen.split, to) for ref, seen, to in zip(places, call.tensors, outcome.targets, strict=True)}
        wanted = lying[row.operand][1]
        split = wanted.on(row.dims[wanted.dim]) if outcome.partial and wanted else None
        if split is not None and self.weights.get(row.weight, split) != split:
            raise self.failed(f"{row.weight} is a column layer's too, and divided in another way there", columns)
        if split is None or any(now and now != to for now, to in lying.values()):
            raise self.failed(f"what reaches {row.weight} is not split along what it sums over", columns)
        return split

    def outcome(self, operation: Operation, number: int, origin: frozenset[int]) -> Outcome:
        """An operation by the rules; where it must gather, the region cannot be."""
        where = f"{operation.name} in {operation.module or 'the model'}"
        if number in self.layers and number not in self.columns:
            raise self.failed(f"its output is read by {self.layers[number].weight} too", origin)
        call = self.call(operation)
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

    def call(self, operation: Operation, whole: int | str | None = None) -> Call:
        """An operation as the rules see it, with the operand ``whole`` not split."""
        keywords = {key: self.seen(value, whole) for key, value in operation.keywords}
        return Call(operation.name, self.seen(operation.arguments, whole), keywords, self.degree, operation.in_place)

    def seen(self, value: Any, whole: int | str | None) -> Any:
        if isinstance(value, Ref):
            if isinstance(value.of, int):
                shape, split = self.blueprint.values[value.of].shape, self.splits.get(value.of)
            else:
                shape, split = self.blueprint.parameter[value.of].shape, self.weights.get(value.of)
            return Seen(shape, None if value.of == whole else split)
        return tuple(self.seen(part, whole) for part in value) if isinstance(value, tuple) else value

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
