"""How each parameter of a model is divided over a tensor group, from the blueprint's data flow alone. No torch.

A region is a set of column layers (divided over their outputs) whose outputs pass only through operations that act on
each part alone, and end in exactly one row layer (divided over its inputs). It is found by walking back from a
possible row layer to the layers that feed it, and accepted only where the rules (rules.py) take it all the way.
"""

from __future__ import annotations

import fnmatch
import heapq
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shoal.blueprint.facts import Blueprint, Operation, Ref, refs
from shoal.blueprint.rules import rule
from shoal.blueprint.shape_rules import Call, Outcome
from shoal.blueprint.split import Refusal, Seen, Split, fits
from shoal.core.errors import ConfigError, nearest

#: Operations with a weight that can be divided: where input, weight and bias stand, and the weight's output dimension.
LAYERS = {"linear": (0, 1, 2, 0), "addmm": (1, 2, 0, 1), "matmul": (0, 1, 2, 1), "mm": (0, 1, 2, 1)}

TRANSPOSES = ("T", "t", "mT", "transpose")

TRIALS = 32  # of columns and packings, for one row layer

KINDS = ("column", "row", "vocabulary", "replicated")


class Role(NamedTuple):
    """``kind``: column, packed column, row, vocabulary, replicated. ``split``: None where every rank has all of it."""

    kind: str
    split: Split | None


class Region(NamedTuple):
    """Weights of the column layers, the weight of the one row layer, and the operations (numbers) between."""

    columns: tuple[str, ...]
    row: str
    operations: tuple[int, ...]


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
    search.vocabularies(kept)
    found = {p.name: search.found.get(p.name, Role("replicated", None)) for p in blueprint.parameters if not p.buffer}
    reasons = {
        name: search.reason(name)
        for name, role in found.items()
        if role.split is None and len(blueprint.parameter[name].shape) >= 2
    }
    return Roles(degree, found, tuple(search.regions), reasons)


class _Layer(NamedTuple):
    """An operation with a weight."""

    number: int
    weight: str
    bias: str | None
    input: int | None
    output_dim: int
    outputs: int
    transposed: int | None  # the operation that transposes the weight, where one does

    def splits(self, kind: str, parts: tuple[int, ...]) -> dict[str, Split]:
        """The splits of its parameters as a column or a row layer."""
        if kind == "row":
            return {self.weight: Split(1 - self.output_dim, parts)}
        return {self.weight: Split(self.output_dim, parts)} | ({self.bias: Split(0, parts)} if self.bias else {})


class _Search:
    """The state of the search: what has been given a role."""

    def __init__(self, blueprint: Blueprint, degree: int) -> None:
        self.blueprint, self.degree = blueprint, degree
        self.layers = {number: layer for number, op in enumerate(blueprint.operations) if (layer := self.layer(op, number))}
        self.found: dict[str, Role] = {}
        self.reasons: dict[str, str] = {}
        self.failures: dict[str, list[str]] = {}  # of trials as a column layer
        self.row_failures: dict[str, list[str]] = {}
        self.regions: list[Region] = []
        self.inside: set[int] = set()  # layers that stand in a region

    def layer(self, operation: Operation, number: int) -> _Layer | None:
        """The layer that an operation is, if any."""
        places = LAYERS.get(operation.name)
        if places is None:
            return None
        given = [*operation.arguments, *(value for _, value in operation.keywords if isinstance(value, Ref))]
        x, weight, bias = (given[place] if len(given) > place else None for place in places[:3])
        output_dim, transposed = places[3], None
        if isinstance(weight, Ref) and isinstance(weight.of, int) and weight.of in self.blueprint.maker:
            transposed = self.blueprint.maker[weight.of]
            maker = self.blueprint.operations[transposed]
            if maker.name not in TRANSPOSES or not maker.parameters:
                return None
            weight, output_dim = Ref(maker.parameters[0]), 1 - output_dim
        if not (isinstance(weight, Ref) and isinstance(weight.of, str)):
            return None
        shape = self.blueprint.parameter[weight.of].shape
        if len(shape) != 2 or self.blueprint.parameter[weight.of].buffer:
            return None
        bias_name = self.first(bias.of) if isinstance(bias, Ref) and isinstance(bias.of, str) else None
        source = x.of if isinstance(x, Ref) and isinstance(x.of, int) else None
        return _Layer(number, self.first(weight.of), bias_name, source, output_dim, shape[output_dim], transposed)

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
        if len(shape) > 2 or dim >= len(shape) or shape[dim] % self.degree:
            raise ConfigError(
                f"{name!r} of shape {tuple(shape)} cannot take the tensor role {kind!r} over {self.degree} ranks: "
                f"dimension {dim} must exist and be divisible by {self.degree}; leave it replicated or change the degree"
            )
        self.found[name] = Role(kind, Split(dim, (shape[dim],)))
        if layer and layer.bias and kind != "row":
            self.found.setdefault(layer.bias, Role(kind, Split(0, (shape[dim],))))

    # Regions

    def regions_of_all(self, kept: set[str]) -> None:
        """Find every region, from possible row layers in order."""
        for number, row in self.layers.items():
            if row.weight in kept or number in self.inside or row.input is None:
                continue
            columns = [layer for layer in self.feeding(row) if layer.weight not in kept]
            if columns:
                self.region(row, columns)

    def feeding(self, row: _Layer) -> list[_Layer]:
        """The layers whose outputs reach a layer's input without passing through another layer."""
        found, seen, stack = [], set(), [row.input]
        while stack:
            value = stack.pop()
            if value is None or value in seen or not self.blueprint.values[value].of_model:
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

    def region(self, row: _Layer, columns: list[_Layer]) -> None:
        """Accept the region that divides most: all of these columns, or without those that stand in its way."""
        waiting = [tuple((column, (column.outputs,)) for column in columns)]
        tried: set[Any] = set()
        best: tuple[int, Any] | None = None
        while waiting and len(tried) < TRIALS:
            chosen = waiting.pop(0)
            if not chosen or chosen in tried:
                continue
            tried.add(chosen)
            trial = _Trial(self, row, {column.number: (column, parts) for column, parts in chosen})
            try:
                row_parts = trial.run()
            except _Failed as failed:
                for name in failed.weights:
                    self.failures.setdefault(name, []).append(str(failed))
                self.row_failures.setdefault(row.weight, []).append(str(failed))
                waiting.append(tuple(pair for pair in chosen if pair[0].number not in failed.columns))
                if failed.parts:
                    waiting.append(tuple((c, failed.parts.get(c.number, parts)) for c, parts in chosen))
                continue
            size = sum(self.blueprint.parameter[column.weight].bytes for column, _ in chosen)
            if best is None or size > best[0]:
                best = (size, (row_parts, chosen, trial.visited))
            if len(chosen) == len(columns):
                break
        if best is not None:
            self.accept(row, *best[1])

    def accept(
        self, row: _Layer, row_parts: tuple[int, ...], columns: tuple[tuple[_Layer, tuple[int, ...]], ...], visited: Any
    ) -> None:
        """Give a region's parameters their roles."""
        for column, parts in columns:
            kind = "column" if len(parts) == 1 else "packed column"
            self.found |= {self.first(name): Role(kind, s) for name, s in column.splits("column", parts).items()}
            self.inside.add(column.number)
        self.found |= {name: Role("row", split) for name, split in row.splits("row", row_parts).items()}
        self.inside.add(row.number)
        self.regions.append(Region(tuple(c.weight for c, _ in columns), row.weight, tuple(visited)))

    def reason(self, name: str) -> str:
        """Why a parameter stays whole: numbers that do not divide before operations in the way."""
        failures = [*self.failures.get(name, ()), *self.row_failures.get(name, ())]
        numbers = sorted((failure for failure in failures if "cannot be divided" in failure), key=len)
        known = [self.reasons[name]] if name in self.reasons else []
        return next(iter([*known, *numbers, *failures]), "it is the weight of no layer that can be divided")

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
            if size % self.degree:
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
            if maker is None or self.blueprint.operations[maker].name not in ("view", "reshape", "to", "long", "masked_fill", "new_zeros"):
                return False
            reads = self.blueprint.operations[maker].reads
            if not reads:
                return False
            value = reads[0]
        return True

    def is_head(self, layer: _Layer) -> bool:
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


HEAD_PASSES = frozenset("float to getitem view reshape contiguous add mul div tanh transpose flatten squeeze".split())


class _Failed(Exception):  # noqa: N818  (an answer of a trial)
    """A region cannot be as tried. ``columns``: those in the way; ``parts``: a packing that may do."""

    def __init__(self, reason: str, columns: Iterable[int], parts: dict[int, tuple[int, ...]], weights: Iterable[str]):
        super().__init__(reason)
        self.columns, self.parts, self.weights = set(columns), parts, list(weights)


class _Trial:
    """One region carried through the rules, from its columns to its row."""

    def __init__(self, search: _Search, row: _Layer, columns: dict[int, tuple[_Layer, tuple[int, ...]]]) -> None:
        self.search, self.blueprint, self.row, self.columns = search, search.blueprint, row, columns
        self.splits: dict[int, Split] = {}  # of values
        self.origin: dict[int, frozenset[int]] = {}  # the columns that a value comes from
        self.weights: dict[str, Split] = {}
        for layer, parts in columns.values():
            self.weights |= layer.splits("column", parts)
        self.visited: list[int] = []
        self.transposes = {c.transposed: number for number, (c, _) in columns.items() if c.transposed is not None}

    def run(self) -> tuple[int, ...]:
        """The parts of the row's inputs. Raises _Failed."""
        for number, (layer, parts) in self.columns.items():
            if not fits(parts, self.search.degree):
                raise self.failed(f"{' + '.join(map(str, parts))} outputs cannot be divided among {self.search.degree}", {number})
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
            each = given if isinstance(given, tuple) and not isinstance(given, Split) else (given,) * len(operation.gives)
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

    def end(self) -> tuple[int, ...]:
        """At the row layer: its input must be split along its last dimension."""
        split = self.splits.get(self.row.input) if self.row.input is not None else None
        shape = self.blueprint.values[self.row.input].shape if self.row.input is not None else ()
        if split is None or split.dim != len(shape) - 1:
            raise self.failed(f"what reaches {self.row.weight} is not split along its last dimension", set(self.columns))
        return split.parts

    def outcome(self, operation: Operation, number: int, origin: frozenset[int]) -> Outcome:
        """An operation by the rules; where it must gather, the region cannot be."""
        where = f"{operation.name} in {operation.module or 'the model'}"
        if number in self.search.layers and number not in self.columns:
            layer = self.search.layers[number]
            split = self.splits.get(layer.input) if layer.input is not None else None
            raise self.failed(f"its output is read by {layer.weight} too ({split})", origin)
        call = Call(
            operation.name, self.seen(operation.arguments),
            {key: self.seen(value) for key, value in operation.keywords}, self.search.degree, operation.in_place,
        )  # fmt: skip
        try:
            outcome = rule(call)
        except Refusal as refusal:
            raise self.failed(f"{where}: {refusal}", origin, self.packings(refusal, origin, operation)) from None
        for tensor, target in zip(call.tensors, outcome.targets, strict=True):
            if tensor.split is not None and tensor.split != target:
                raise self.failed(f"{where}: {tensor.split} meets {target}", origin)
        if outcome.partial:
            raise self.failed(f"{where}: a sum over the split dimension", origin)
        return outcome

    def seen(self, value: Any) -> Any:
        """An operation's argument as the rules see it."""
        if isinstance(value, Ref):
            if isinstance(value.of, int):
                return Seen(self.blueprint.values[value.of].shape, self.splits.get(value.of))
            return Seen(self.blueprint.parameter[value.of].shape, self.weights.get(value.of))
        return tuple(self.seen(part) for part in value) if isinstance(value, tuple) else value

    def packings(self, refusal: Refusal, origin: frozenset[int], operation: Operation) -> dict[int, tuple[int, ...]]:
        """Other parts for the one column that an operation refuses."""
        if len(origin) != 1:
            return {}
        (number,) = origin
        layer, parts = self.columns[number]
        hint = refusal.parts or self.leading(operation)
        if hint is None or sum(hint) == 0 or layer.outputs % sum(hint):
            return {}
        scale = layer.outputs // sum(hint)
        return {number: tuple(part * scale for part in hint)}

    def leading(self, operation: Operation) -> tuple[int, ...] | None:
        """Single entries taken of a split dimension: as many parts as it has entries."""
        for ref in refs(operation.arguments):
            if isinstance(ref.of, int) and (split := self.splits.get(ref.of)):
                return (1,) * split.size
        return None

    def failed(self, reason: str, columns: Iterable[int], parts: dict[int, tuple[int, ...]] | None = None) -> _Failed:
        return _Failed(reason, columns, parts or {}, [self.columns[n][0].weight for n in columns])
