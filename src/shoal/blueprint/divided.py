"""What one rank of a tensor group has of every value and sends at every operation, by the rules that run it. No torch.

``parallel/tensor/part.py`` does at run time what is followed here: an operation works on parts where a rule says how,
its whole inputs then send their gradient's sum in backward, partial results are summed in forward, and what no rule
allows is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from shoal.blueprint.calls import Call, Outcome
from shoal.blueprint.facts import Blueprint, Operation, Ref, refs
from shoal.blueprint.roles import Roles
from shoal.blueprint.rules import rule
from shoal.blueprint.split import Refusal, Seen, Split, local_shape


class Move(NamedTuple):
    """A collective of the tensor group. ``bytes``: of the whole buffer; ``of_input``: they grow with the samples."""

    collective: Literal["all_reduce", "all_gather"]
    phase: Literal["forward", "backward"]
    bytes: int
    of_input: bool


class Local(NamedTuple):
    """An operation on one rank. ``taken``, ``given``: shapes of the tensors among its arguments, and of its results.
    ``divided``: it works on parts. ``gathered``: values of which it makes a whole copy."""

    taken: tuple[tuple[int, ...], ...]
    given: tuple[tuple[int, ...], ...]
    divided: bool
    moves: tuple[Move, ...]
    gathered: frozenset[int]


class Divided(NamedTuple):
    """A rank's share of a blueprint: operations and then those of the loss; ``splits``: of values."""

    operations: tuple[Local, ...]
    splits: dict[int, Split]
    degree: int

    def share(self, value: int) -> float:
        """Which part of a value this rank holds."""
        return 1 / self.degree if value in self.splits else 1.0


def divided(blueprint: Blueprint, roles: Roles | None) -> Divided:
    """Every operation as one rank runs it; without roles as one device does."""
    if roles is None:
        every = [*blueprint.operations, *blueprint.loss]
        return Divided(tuple(_whole(blueprint, operation) for operation in every), {}, 1)
    return _Replay(blueprint, roles).run()


def input_values(blueprint: Blueprint) -> frozenset[int]:
    """The values that depend on the samples: the inputs, the targets, and what is made of them."""
    found = {*blueprint.inputs, *blueprint.targets}
    for operation in (*blueprint.operations, *blueprint.loss):
        if found.intersection(operation.reads):
            found.update(operation.gives)
    return frozenset(found)


def _shape(blueprint: Blueprint, ref: Ref) -> tuple[int, ...]:
    return blueprint.values[ref.of].shape if isinstance(ref.of, int) else blueprint.parameter[ref.of].shape


def tensors_of(operation: Operation) -> list[Ref]:
    """Every tensor among an operation's arguments, in order."""
    return [*refs(operation.arguments), *refs(tuple(value for _, value in operation.keywords))]


def _whole(blueprint: Blueprint, operation: Operation) -> Local:
    taken = tuple(_shape(blueprint, ref) for ref in tensors_of(operation))
    return Local(taken, tuple(blueprint.values[value].shape for value in operation.gives), False, (), frozenset())


class _Replay:
    """The walk over the operations. ``entered``: the last whole value whose gradient is summed already."""

    def __init__(self, blueprint: Blueprint, roles: Roles) -> None:
        self.blueprint, self.degree = blueprint, roles.degree
        self.of_input = input_values(blueprint)
        self.weights = {
            name: role.split for first, role in roles.role.items() for name in (first, *blueprint.parameter[first].ties)
        }
        self.splits: dict[int, Split] = {}
        self.entered: int | None = None
        self.moves: list[Move] = []
        self.gathered: set[int] = set()

    def run(self) -> Divided:
        found = [self.operation(operation) for operation in self.blueprint.operations]
        left = [value for value in self.blueprint.outputs if value in self.splits]
        for value in left:
            self.gather(value)
        if left and found:
            found[-1] = found[-1]._replace(
                moves=(*found[-1].moves, *self.moves), gathered=found[-1].gathered | self.gathered
            )
        kept = dict(self.splits)
        for value in left:
            del self.splits[value]
        found += [self.operation(operation) for operation in self.blueprint.loss]
        return Divided(tuple(found), kept, self.degree)

    def operation(self, operation: Operation) -> Local:
        self.moves, self.gathered = [], set()
        tensors = tensors_of(operation)
        before = [self.split(ref) for ref in tensors]
        outcome = self.outcome(operation) if any(split is not None for split in before) else None
        targets: list[Split | None] = [None] * len(tensors)
        if outcome is not None:
            targets = list(outcome.targets)
            self.lay(operation, tensors, outcome)
        elif any(before):
            for ref, split in zip(tensors, before, strict=True):
                if split is not None:
                    self.gather(ref.of)
        given = outcome.outputs if outcome else None
        each = given if isinstance(given, tuple) and not isinstance(given, Split) else (given,) * len(operation.gives)
        for value, split in zip(operation.gives, each, strict=True):
            if split is not None:
                self.splits[value] = split
        return Local(
            tuple(self.local(_shape(self.blueprint, ref), split) for ref, split in zip(tensors, targets, strict=True)),
            tuple(
                self.local(self.blueprint.values[value].shape, split)
                for value, split in zip(operation.gives, each, strict=True)
            ),
            outcome is not None, tuple(self.moves), frozenset(self.gathered),
        )  # fmt: skip

    def local(self, shape: tuple[int, ...], split: Split | None) -> tuple[int, ...]:
        return local_shape(shape, split, self.degree)

    def split(self, ref: Ref) -> Split | None:
        return self.splits.get(ref.of) if isinstance(ref.of, int) else self.weights.get(ref.of)

    def seen(self, value: Any) -> Any:
        """An operation's argument as the rules see it."""
        if isinstance(value, Ref):
            return Seen(_shape(self.blueprint, value), self.split(value))
        return tuple(self.seen(part) for part in value) if isinstance(value, tuple) else value

    def outcome(self, operation: Operation) -> Outcome | None:
        keywords = {key: self.seen(value) for key, value in operation.keywords}
        call = Call(operation.name, self.seen(operation.arguments), keywords, self.degree, operation.in_place)
        try:
            return rule(call)
        except Refusal:
            return None

    def lay(self, operation: Operation, tensors: list[Ref], outcome: Outcome) -> None:
        """What the operation's tensors send before it, and its result after it."""
        for at, (ref, target) in enumerate(zip(tensors, outcome.targets, strict=True)):
            if outcome.how == "row" and target is None:
                continue  # the bias, which every rank adds alike
            if outcome.how == "heads" and at > 2:
                continue
            now = self.split(ref)
            if now is not None and now != target:
                self.gather(ref.of)
            if now is None or now != target:
                self.enter(ref)
        if outcome.partial or outcome.how == "heads":
            self.move("all_reduce", "forward", operation.gives[:1])
            self.entered = None

    def enter(self, ref: Ref) -> None:
        """A whole tensor that every rank uses differently: its gradient is summed, once for readers in a row."""
        if isinstance(ref.of, str):
            parameter = self.blueprint.parameter[ref.of]
            if parameter.trains:
                self.moves.append(Move("all_reduce", "backward", parameter.bytes, False))
        elif self.blueprint.values[ref.of].of_model and self.entered != ref.of:
            self.entered = ref.of
            self.move("all_reduce", "backward", [ref.of])

    def gather(self, value: int | str) -> None:
        if isinstance(value, int):
            self.gathered.add(value)
            self.move("all_gather", "forward", [value])
        else:
            self.moves.append(Move("all_gather", "forward", self.blueprint.parameter[value].bytes, False))

    def move(self, collective: Any, phase: Any, values: Sequence[int]) -> None:
        for value in values:
            found = self.blueprint.values[value]
            self.moves.append(Move(collective, phase, found.bytes, value in self.of_input))
