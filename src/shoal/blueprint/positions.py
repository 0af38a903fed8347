"""Where the positions of a sequence can be shared out between tensor regions, from the blueprint alone. No torch.

What a row layer (or a divided token table) gives is a sum over the tensor ranks. Instead of the whole sum, a rank may
keep its positions of it: residual additions, norms and dropout then work on these, until a column layer gathers them
(Korthikanti et al., https://arxiv.org/abs/2205.05198, section 4.2.2). The rules (rules.py) carry the positions through
the whole model, as they will when it runs; where an operation cannot take them, this says which layers stay without.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from shoal.blueprint.calls import Call, Outcome
from shoal.blueprint.facts import Blueprint, Operation, Ref, refs
from shoal.blueprint.layers import LAYERS
from shoal.blueprint.roles import Roles
from shoal.blueprint.rules import rule
from shoal.blueprint.split import Refusal, Seen, Split
from shoal.core.errors import ConfigError

STEPS = 6  # operations looked through for the sequences in a layer's rows
FEW = 4  # a stream is read whole at most once in so many of its layers


class Positions(NamedTuple):
    """The positions in a layer's output of ``rank`` dimensions: dimension ``dim``; where ``length`` is given, its
    entries are sequences of that many positions, one after the other."""

    rank: int
    dim: int
    length: int | None = None

    def split(self, shape: tuple[int, ...], degree: int) -> Split | None:
        """How an output of ``shape`` is shared out; None where it has fewer positions than ranks, or is of another
        structure: then every rank keeps the whole."""
        if len(shape) != self.rank:
            return None
        length = self.length or shape[self.dim]
        if length < degree or shape[self.dim] % length:
            return None
        return Split(self.dim, (length,) * (shape[self.dim] // length))


class Shared(NamedTuple):
    """``layers``: by the first name of a row layer's (or table's) weight, where positions lie in what it gives.
    ``reasons``: for the others, why each gives the whole. ``gathers``: where else than at the beginning of a region
    positions are gathered."""

    layers: dict[str, Positions]
    reasons: dict[str, str]
    gathers: tuple[str, ...]


def shared_positions(blueprint: Blueprint, roles: Roles) -> Shared:
    """Which layers give positions only."""
    search = _Search(blueprint, roles)
    while True:
        walk = _Walk(search)
        if not search.drop(walk):
            break
    names = {search.sources[number] for number in search.active}
    layers = {search.sources[number]: positions for number, positions in search.active.items()}
    reasons = {name: reason for name, reason in search.reasons.items() if name not in names}
    return Shared(layers, reasons, tuple(dict.fromkeys(where for where, _, _ in walk.whole)))


def needed_positions(blueprint: Blueprint, roles: Roles) -> Shared:
    """The same where sequence parallelism was asked for. Raises ConfigError where no layer gives positions only."""
    shared = shared_positions(blueprint, roles)
    if not shared.layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(shared.reasons.items())[:3])
        raise ConfigError(
            f"sequence_parallel was asked for, but the positions of no layer's output can be shared out over "
            f"tensor={roles.degree} ({reasons}); set sequence_parallel = false"
        )
    return shared


class _Search:
    """``sources``: operations whose results are sums over the group, and the weight of each. ``active``: those that
    give positions."""

    def __init__(self, blueprint: Blueprint, roles: Roles) -> None:
        self.blueprint, self.degree = blueprint, roles.degree
        self.weights = {
            name: role.split for first, role in roles.role.items() for name in (first, *blueprint.parameter[first].ties)
        }
        self.sources = {region.end: region.row for region in roles.regions}
        for number, operation in enumerate(blueprint.operations):
            split = self.weights.get(operation.parameters[0]) if operation.parameters else None
            if operation.name == "embedding" and split is not None and split.dim == 0:
                self.sources[number] = blueprint.parameter[operation.parameters[0]].name
        self.reasons: dict[str, str] = {}
        self.active: dict[int, Positions] = {}
        for number, name in self.sources.items():
            found = self.positions(name, blueprint.operations[number].gives[0])
            if isinstance(found, Positions):
                self.active[number] = found
            else:
                self.reasons[name] = found
        self.same_for_shared_weights()

    def positions(self, name: str, value: int) -> Positions | str:
        """Where the positions lie in a layer's output, or why they cannot be shared out."""
        if len(self.blueprint.parameter[name].shape) != 2:
            return "its weight is not a matrix"
        shape = self.blueprint.values[value].shape
        if len(shape) > 2:
            lead = shape[:-1]
            dim = len(lead) - 1
            if lead[dim] == self.blueprint.samples:
                dim = max(range(len(lead)), key=lambda d: (lead[d] != self.blueprint.samples, lead[d], d))
            found = Positions(len(shape), dim)
        else:
            length = self.sequence(value) if len(shape) == 2 else None
            if length is None:
                return "no dimension of positions is known in its output"
            found = Positions(2, 0, length)
        length = found.length or shape[found.dim]
        return found if length >= self.degree else f"{length} positions cannot be shared out among {self.degree}"

    def sequence(self, value: int) -> int | None:
        """How long the sequences in a matrix's rows are, from the shape that it takes on a few operations later."""
        rows, width = self.blueprint.values[value].shape
        near = [value]
        for _ in range(STEPS):
            readers = {number for value in near for number in self.blueprint.readers.get(value, ())}
            near = [value for number in sorted(readers) for value in self.blueprint.operations[number].gives]
            for shape in (self.blueprint.values[value].shape for value in near):
                if len(shape) > 2 and shape[-1] == width and math.prod(shape[:-1]) == rows:
                    return shape[-2]
        return None

    def same_for_shared_weights(self) -> None:
        """A weight that several operations read gives positions in all of them or in none."""
        for name in {self.sources[number] for number in self.active}:
            numbers = [number for number, other in self.sources.items() if other == name]
            if len({self.active.get(number) for number in numbers}) > 1:
                self.remove(numbers, "it is read in several places, whose outputs differ in structure")

    def remove(self, numbers: Any, reason: str) -> None:
        """These layers give the whole."""
        for number in numbers:
            if self.active.pop(number, None) is not None:
                self.reasons.setdefault(self.sources[number], reason)

    def drop(self, walk: _Walk) -> bool:
        """Take out what a walk found in the way: a layer alone where its own output is, a whole stream of residual
        additions where too many operations read it whole. True where something was."""
        before = len(self.active)
        for where, origin, alone in walk.whole:
            if alone or len(origin) == 1:
                self.remove(origin, f"its output is read whole by {where}")
        if len(self.active) == before:
            for stream in walk.streams():
                reads = [where for where, origin, _ in walk.whole if origin & stream]
                if len(reads) * FEW > len(stream):
                    places = ", ".join(dict.fromkeys(reads))
                    self.remove(stream, f"its stream is read whole too often, {len(reads)} times, by {places}")
        self.same_for_shared_weights()
        return len(self.active) < before


class _Walk:
    """The whole model's operations with some layers giving positions. ``whole``: what must gather positions where no
    region begins: the operation, the layers that these come from, and whether they cannot be told apart from others."""

    def __init__(self, search: _Search) -> None:
        self.search, self.blueprint = search, search.blueprint
        self.splits: dict[int, Split] = {}
        self.origin: dict[int, frozenset[int]] = {}  # of values of which a rank has positions: the layers they are from
        self.whole: list[tuple[str, frozenset[int], bool]] = []
        for number, operation in enumerate(self.blueprint.operations):
            self.run(number, operation)

    def run(self, number: int, operation: Operation) -> None:
        """One operation by the rules, as it will run."""
        arguments = (operation.arguments, tuple(value for _, value in operation.keywords))
        call = Call(
            operation.name, self.seen(operation.arguments),
            {key: self.seen(value) for key, value in operation.keywords}, self.search.degree, operation.in_place,
        )  # fmt: skip
        if not any(tensor.split for tensor in call.tensors):
            return
        origins = [
            self.origin.get(ref.of, frozenset()) if isinstance(ref.of, int) else frozenset() for ref in refs(arguments)
        ]
        where = f"{operation.name} in {operation.module or 'the model'}"
        try:
            outcome = rule(call)
        except Refusal:
            self.gather(where, origins)
            return
        begins = not outcome.partial and operation.name in LAYERS or outcome.how == "heads"
        kept: frozenset[int] = frozenset()
        for tensor, target, origin in zip(call.tensors, outcome.targets, origins, strict=True):
            if not origin:
                continue
            if tensor.split == target:
                kept |= origin
            elif not (begins and target is None):
                self.gather(where, [origin], among=[other for other in origins if other and other is not origin])
        self.give(number, operation, outcome, kept)

    def give(self, number: int, operation: Operation, outcome: Outcome, kept: frozenset[int]) -> None:
        """Note how an operation's results lie."""
        given: Any = outcome.outputs
        if number in self.search.active and (outcome.partial or outcome.how == "heads"):
            shape = self.blueprint.values[operation.gives[0]].shape
            given, kept = self.search.active[number].split(shape, self.search.degree), frozenset({number})
            operation = operation._replace(gives=operation.gives[:1])
        each = given if isinstance(given, tuple) and not isinstance(given, Split) else (given,) * len(operation.gives)
        for value, split in zip(operation.gives, each, strict=True):
            if split is not None:
                self.splits[value] = split
                if kept:
                    self.origin[value] = kept

    def gather(self, where: str, origins: list[frozenset[int]], among: Any = ()) -> None:
        """Positions must become whole here; of two streams in one operation, the smaller one goes."""
        origin = frozenset().union(*origins)
        if origin:
            smallest = min([origin, *among], key=len)
            self.whole.append((where, smallest, bool(among)))

    def streams(self) -> list[frozenset[int]]:
        """Layers whose outputs are added up."""
        found: list[frozenset[int]] = []
        for origin in set(self.origin.values()):
            meeting = [stream for stream in found if stream & origin]
            found = [stream for stream in found if stream not in meeting] + [origin.union(*meeting)]
        return found

    def seen(self, value: Any) -> Any:
        """An operation's argument as the rules see it."""
        if isinstance(value, Ref):
            if isinstance(value.of, int):
                return Seen(self.blueprint.values[value.of].shape, self.splits.get(value.of))
            return Seen(self.blueprint.parameter[value.of].shape, self.search.weights.get(value.of))
        return tuple(self.seen(part) for part in value) if isinstance(value, tuple) else value
