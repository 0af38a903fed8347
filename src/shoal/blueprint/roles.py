"""How each parameter of a model is divided over a tensor group, from the blueprint's data flow alone. No torch.

A region is a set of column layers (divided over their outputs) whose outputs pass only through operations that act on
each part alone, and end in exactly one row layer (divided over its inputs). It is found by walking back from a
possible row layer to the layers that feed it, and accepted only where the rules (rules.py) take it all the way.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.blueprint.facts import Blueprint, Ref
from shoal.blueprint.layers import Layer, layers
from shoal.blueprint.regions import Failed, Trial
from shoal.blueprint.rules import head_splits
from shoal.blueprint.split import Split
from shoal.core.errors import ConfigError, nearest

TRIALS = 32  # of columns and packings, for one row layer

HEAD_PASSES = ("float", "to", "getitem", "view", "reshape", "contiguous", "add", "mul", "div", "tanh", "transpose",
               "flatten", "squeeze", "log_softmax", "nll_loss", "cross_entropy")  # fmt: skip

Columns = tuple[tuple[Layer, Split], ...]  # column layers and how their outputs are split

KINDS = ("column", "row", "vocabulary", "replicated")


class Role(NamedTuple):
    """``kind``: column, packed column, row, vocabulary, replicated. ``split``: None where every rank has all of it."""

    kind: str
    split: Split | None


class Region(NamedTuple):
    """Weights of the column layers, the weight of the one row layer, and the operations (numbers) between.

    ``end``: the operation whose results are sums over the group."""

    columns: tuple[str, ...]
    row: str
    operations: tuple[int, ...]
    end: int


class Roles(NamedTuple):
    """``role``: by each parameter's first name. ``reasons``: why a weight of two dimensions stays replicated."""

    degree: int
    role: dict[str, Role]
    regions: tuple[Region, ...]
    reasons: dict[str, str]

    def share(self, blueprint: Blueprint) -> float:
        """Share of the parameters' bytes that is divided."""
        held = [p for p in blueprint.parameters if not p.buffer]
        return sum(p.bytes for p in held if self.role[p.name].split) / max(sum(p.bytes for p in held), 1)


def roles(blueprint: Blueprint, degree: int, overrides: Mapping[str, str] | None = None) -> Roles:
    """Each parameter's role. ``overrides``: name pattern (fnmatch) -> kind. Raises ConfigError where one is none."""
    search = _Search(blueprint, degree)
    kept = search.override(overrides or {})
    search.regions_of_all(kept)
    search.attention_layers(kept)
    search.vocabularies(kept)
    found = {p.name: search.found.get(p.name, Role("replicated", None)) for p in blueprint.parameters if not p.buffer}
    reasons = {
        name: search.reason(name)
        for name, role in found.items()
        if role.split is None and len(blueprint.parameter[name].shape) >= 2
    }
    return Roles(degree, found, tuple(search.regions), reasons)


class _Search:
    """The state of the search: what has been given a role."""

    def __init__(self, blueprint: Blueprint, degree: int) -> None:
        self.blueprint, self.degree = blueprint, degree
        self.layers = layers(blueprint)
        self.found: dict[str, Role] = {}
        self.reasons: dict[str, str] = {}
        self.failures: dict[str, list[str]] = {}  # of trials as a column layer
        self.row_failures: dict[str, list[str]] = {}
        self.regions: list[Region] = []
        self.inside: set[int] = set()  # layers that stand in a region

    def first(self, name: str) -> str:
        return self.blueprint.parameter[name].name

    def override(self, overrides: Mapping[str, str]) -> set[str]:
        """Names kept from the search; sets what people ask for."""
        kept: set[str] = set()
        names = [p.name for p in self.blueprint.parameters if not p.buffer]
        for pattern, kind in overrides.items():
            matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
            if not matched:
                raise ConfigError(f"tensor role {pattern!r} = {kind!r} names no parameter; {nearest(pattern, names)}")
            if kind not in KINDS:
                raise ConfigError(f"tensor role {pattern!r} = {kind!r}: no such role; {nearest(kind, KINDS)}")
            for name in matched:
                self.asked(name, kind)
            kept |= set(matched)
        return kept

    def asked(self, name: str, kind: str) -> None:
        """Give a parameter the role that was asked for. Raises ConfigError where its shape does not allow it."""
        shape = self.blueprint.parameter[name].shape
        if kind == "replicated":
            self.found[name] = Role(kind, None)
            self.reasons[name] = "asked for"
            return
        layer = next((layer for layer in self.layers.values() if layer.weight == name), None)
        output_dim = layer.output_dim if layer else 0
        dim = 1 - output_dim if kind == "row" else output_dim if len(shape) > 1 else 0
        if len(shape) > 2 or dim >= len(shape) or shape[dim] < self.degree:
            raise ConfigError(
                f"{name!r} of shape {tuple(shape)} cannot take the tensor role {kind!r} over {self.degree} ranks: "
                f"dimension {dim} must exist and have {self.degree} entries or more; leave it replicated"
            )
        self.found[name] = Role(kind, Split(dim, (shape[dim],)))
        if layer and layer.bias and kind != "row":
            self.found.setdefault(layer.bias, Role(kind, Split(0, (shape[dim],))))

    # Regions

    def regions_of_all(self, kept: set[str]) -> None:
        """Find every region, from possible row layers in order."""
        for number, row in self.layers.items():
            if row.weight in kept or number in self.inside:
                continue
            columns = [layer for layer in self.feeding(row) if layer.weight not in kept]
            if columns:
                self.region(row, columns)

    def feeding(self, row: Layer) -> list[Layer]:
        """The layers whose outputs reach a layer's input without passing through another layer."""
        found, seen, stack = [], set(), list(row.inputs)
        while stack:
            value = stack.pop()
            if value in seen or not self.blueprint.values[value].of_model:
                continue
            seen.add(value)
            maker = self.blueprint.maker.get(value)
            if maker is None:
                continue
            layer = self.layers.get(maker)
            if layer is None:
                stack += self.blueprint.operations[maker].reads
            elif maker not in self.inside:
                found.append(layer)
        return sorted(found)

    def region(self, row: Layer, columns: list[Layer]) -> None:
        """Accept the region that divides most: all of these columns, or without those that stand in its way."""
        waiting: list[Columns] = [tuple((c, Split(0, (c.outputs,))) for c in columns)]
        tried: set[Columns] = set()
        best: tuple[int, Any] | None = None
        while waiting and len(tried) < TRIALS:
            chosen = waiting.pop(0)
            if not chosen or chosen in tried:
                continue
            tried.add(chosen)
            trial = Trial(
                self.blueprint, self.degree, self.layers, row,
                {column.number: (column, outputs) for column, outputs in chosen},
            )  # fmt: skip
            try:
                lies = trial.run()
            except Failed as failed:
                for name in failed.weights:
                    self.failures.setdefault(name, []).append(str(failed))
                self.row_failures.setdefault(row.weight, []).append(str(failed))
                others = [
                    tuple((c, other if c.number == number else outputs) for c, outputs in chosen)
                    for number, packings in failed.packings.items()
                    for other in packings
                ]
                without = tuple(pair for pair in chosen if pair[0].number not in failed.columns)
                waiting = [*others, *waiting, without]
                continue
            size = sum(self.blueprint.parameter[column.weight].bytes for column, _ in chosen)
            if best is None or size > best[0]:
                best = (size, (lies, chosen, trial.visited))
            if len(chosen) == len(columns):
                break
        if best is not None:
            self.accept(row, *best[1])

    def accept(self, row: Layer, lies: Split, columns: Columns, visited: list[int]) -> None:
        """Give a region's parameters their roles."""
        for column, outputs in columns:
            kind = "column" if len(outputs.parts) == 1 else "packed column"
            self.found |= {self.first(name): Role(kind, s) for name, s in column.columns(outputs).items()}
            self.inside.add(column.number)
        self.found[row.weight] = Role("row", lies)
        self.inside.add(row.number)
        self.regions.append(Region(tuple(c.weight for c, _ in columns), row.weight, tuple(visited), row.number))

    def reason(self, name: str) -> str:
        """Why a parameter stays whole: numbers that do not divide before operations in the way."""
        failures = [*self.failures.get(name, ()), *self.row_failures.get(name, ())]
        numbers = sorted((failure for failure in failures if "cannot be divided" in failure), key=len)
        known = [self.reasons[name]] if name in self.reasons else []
        return next(iter([*known, *numbers, *failures]), "it is the weight of no layer that can be divided")

    def attention_layers(self, kept: set[str]) -> None:
        """torch's own attention layers: a region in one operation."""
        for number, operation in enumerate(self.blueprint.operations):
            if operation.name != "multi_head_attention_forward":
                continue
            packed, bias, out = (operation.arguments[place] for place in (5, 6, 11))
            if not (isinstance(packed, Ref) and isinstance(out, Ref)):
                continue
            names = [self.first(str(ref.of)) for ref in (packed, out, bias) if isinstance(ref, Ref)]
            width, heads = self.blueprint.parameter[names[1]].shape[1], operation.arguments[4]
            if heads < self.degree:
                self.reasons |= dict.fromkeys(names[:2], f"{heads} heads cannot be divided among {self.degree}")
            elif not kept & set(names) and not self.found.keys() & set(names):
                columns, rows = head_splits(heads, width, self.degree)
                self.found |= {n: Role("packed column", columns) for n in (names[0], *names[2:])}
                self.found[names[1]] = Role("row", rows)
                self.regions.append(Region((names[0],), names[1], (number,), number))

    # Vocabulary

    def vocabularies(self, kept: set[str]) -> None:
        """Tables of the model's inputs, and heads whose outputs only leave the model."""
        total = sum(p.bytes for p in self.blueprint.parameters if not p.buffer)
        uses: dict[str, list[int]] = {}
        for number, operation in enumerate(self.blueprint.operations):
            for name in operation.parameters:
                uses.setdefault(self.first(name), []).append(number)
        for parameter in self.blueprint.parameters:
            name, numbers = parameter.name, uses.get(parameter.name, [])
            if parameter.buffer or name in kept or name in self.found or len(parameter.shape) != 2 or not numbers:
                continue
            tables = [n for n in numbers if self.is_table(n)]
            heads = [n for n in numbers if n in self.layers and self.is_head(self.layers[n])]
            if len(tables) + len(heads) < len(numbers):
                continue
            if parameter.bytes < total / 100:
                self.reasons[name] = "it holds less than 1 % of the weights"
                continue
            dim = self.layers[heads[0]].output_dim if heads else 0
            size = parameter.shape[dim]
            if size < self.degree:
                self.reasons[name] = f"its vocabulary of {size} cannot be divided among {self.degree}"
                continue
            self.found[name] = Role("vocabulary", Split(dim, (size,)))
            self.reasons.pop(name, None)
            for number in heads:
                if bias := self.layers[number].bias:
                    self.found[self.first(bias)] = Role("vocabulary", Split(0, (size,)))

    def is_table(self, number: int) -> bool:
        """An embedding whose ids are an input of the model, perhaps reshaped."""
        operation = self.blueprint.operations[number]
        if operation.name != "embedding" or not operation.reads:
            return False
        value, inputs = operation.reads[0], set(self.blueprint.inputs)
        while value not in inputs:
            maker = self.blueprint.maker.get(value)
            if maker is None or self.blueprint.operations[maker].name not in (
                "view",
                "reshape",
                "to",
                "long",
                "masked_fill",
                "new_zeros",
            ):
                return False
            reads = self.blueprint.operations[maker].reads
            if not reads:
                return False
            value = reads[0]
        return True

    def is_head(self, layer: Layer) -> bool:
        """A layer whose output leaves the model through no other layer."""
        stack, seen, leaves = list(self.blueprint.operations[layer.number].gives), set(), False
        while stack:
            value = stack.pop()
            leaves |= value in self.blueprint.outputs
            for reader in self.blueprint.readers.get(value, ()):
                if reader in self.layers or self.blueprint.operations[reader].name not in HEAD_PASSES:
                    return False
                if reader not in seen:
                    seen.add(reader)
                    stack += self.blueprint.operations[reader].gives
        return leaves
