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
from shoal.blueprint.positions import Positions, needed_positions
from shoal.blueprint.roles import Roles
from shoal.blueprint.rules import rule
from shoal.blueprint.split import Refusal, Seen, Split, local_shape, local_size


class Move(NamedTuple):
    """A collective of the tensor group. ``bytes``: of the whole buffer; ``of_input``: they grow with the samples."""

    collective: Literal["all_reduce", "all_gather", "reduce_scatter"]
    phase: Literal["forward", "backward"]
    bytes: int
    of_input: bool


class Local(NamedTuple):
    """An operation on one rank. ``taken``, ``given``: shapes of the tensors among its arguments, and of its results.
    ``divided``: it works on parts; ``how``: what runs in its place. ``gathered``: values that it copies whole;
    ``entered``: of which it gathers the positions, as a region begins."""

    taken: tuple[tuple[int, ...], ...]
    given: tuple[tuple[int, ...], ...]
    divided: bool
    moves: tuple[Move, ...]
    gathered: frozenset[int]
    how: str = ""
    entered: tuple[int, ...] = ()


class Divided(NamedTuple):
    """A rank's share of a blueprint: operations and then those of the loss; ``splits``: of values. ``gathered``: values
    of which regions take a whole copy, which is what is kept."""

    operations: tuple[Local, ...]
    splits: dict[int, Split]
    degree: int
    gathered: frozenset[int] = frozenset()

    def share(self, value: int) -> float:
        """Which part of a value this rank holds."""
        split = self.splits.get(value)
        return 1.0 if split is None or value in self.gathered else local_size(split, self.degree, 0) / split.size


def divided(blueprint: Blueprint, roles: Roles | None, sequence_parallel: bool = False) -> Divided:
    """Every operation as one rank runs it; without roles as one device does. ``sequence_parallel``: between regions a
    rank has its positions, wherever positions.py finds that they can be shared out. Raises ConfigError where they
    cannot anywhere."""
    if roles is None:
        every = [*blueprint.operations, *blueprint.loss]
        return Divided(tuple(_whole(blueprint, operation) for operation in every), {}, 1)
    shared = needed_positions(blueprint, roles).layers if sequence_parallel else {}
    return _Replay(blueprint, roles, shared).run()


def input_values(blueprint: Blueprint) -> frozenset[int]:
    """The values that grow with the samples: the inputs, the targets, what is made of them, and what is made for as
    many samples without them (masks)."""
    found = {*blueprint.inputs, *blueprint.targets}
    for operation in (*blueprint.operations, *blueprint.loss):
        found.update(value for value in operation.gives if _for_samples(blueprint, value))
        if found.intersection(operation.reads):
            found.update(operation.gives)
    return frozenset(found)


def _for_samples(blueprint: Blueprint, value: int) -> bool:
    """Whether a value that depends on no parameter has a first dimension of the samples (of one none is told)."""
    of = blueprint.values[value]
    return not of.of_model and len(of.shape) > 1 and of.shape[0] == blueprint.samples > 1


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

    def __init__(self, blueprint: Blueprint, roles: Roles, shared: dict[str, Positions]) -> None:
        self.blueprint, self.degree, self.shared = blueprint, roles.degree, shared
        self.positional: set[int] = set()
        self.of_input = input_values(blueprint)
        self.weights = {
            name: role.split for first, role in roles.role.items() for name in (first, *blueprint.parameter[first].ties)
        }
        self.splits: dict[int, Split] = {}
        self.entered: int | None = None
        self.copied: set[int] = set()
        self.moves: list[Move] = []
        self.gathered: set[int] = set()
        self.begun: list[int] = []  # values of which the operation at hand gathers the positions

    def run(self) -> Divided:
        found = [self.operation(operation) for operation in self.blueprint.operations]
        left = [value for value in self.blueprint.outputs if value in self.splits and not self.logits(value)]
        self.moves, self.gathered = [], set()
        for value in left:
            self.gather(value)
            del self.splits[value]  # the loss finds it whole
        if left and found:
            moves, gathered = (*found[-1].moves, *self.moves), found[-1].gathered | self.gathered
            found[-1] = found[-1]._replace(moves=moves, gathered=gathered)
        found += [self.operation(operation) for operation in self.blueprint.loss]
        return Divided(tuple(found), self.splits, self.degree, frozenset(self.copied.union(left)))

    def logits(self, value: int) -> bool:
        """What is split along its last dimension leaves the model as it is: a loss need not gather it."""
        return self.splits[value].dim == len(self.blueprint.values[value].shape) - 1

    def operation(self, operation: Operation) -> Local:
        self.moves, self.gathered, self.begun = [], set(), []
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
        given: Any = outcome.outputs if outcome else None
        positions = self.positions(operation, outcome)
        if positions is not None:
            given = positions
        each = given if isinstance(given, tuple) and not isinstance(given, Split) else (given,) * len(operation.gives)
        for value, split in zip(operation.gives, each, strict=True):
            if split is not None:
                self.splits[value] = split
                kept = (r.of for r, s, t in zip(tensors, before, targets, strict=True) if s is not None and s == t)
                if positions is not None or self.positional.intersection(kept):
                    self.positional.add(value)
        return Local(
            tuple(self.local(_shape(self.blueprint, ref), split) for ref, split in zip(tensors, targets, strict=True)),
            tuple(
                self.local(self.blueprint.values[value].shape, split)
                for value, split in zip(operation.gives, each, strict=True)
            ),
            outcome is not None, tuple(self.moves), frozenset(self.gathered), outcome.how if outcome else "",
            tuple(self.begun),
        )  # fmt: skip

    def positions(self, operation: Operation, outcome: Outcome | None) -> Split | None:
        """How the positions of a row layer's (or table's) output lie, where they are shared out."""
        if outcome is None or not (outcome.partial or outcome.how == "heads"):
            return None
        names = (self.blueprint.parameter[name].name for name in operation.parameters)
        found = next((self.shared[name] for name in names if name in self.shared), None)
        return found.split(self.blueprint.values[operation.gives[0]].shape, self.degree) if found else None

    def local(self, shape: tuple[int, ...], split: Split | None) -> tuple[int, ...]:
        return local_shape(shape, split, self.degree, 0)  # the first rank has most

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
            if now is not None and now != target and ref.of in self.positional:
                self.enter_positions(ref.of)
                continue
            if now is not None and now != target:
                self.gather(ref.of)
            if now is None or now != target:
                self.enter(ref)
        if self.positions(operation, outcome) is not None:
            self.move("reduce_scatter", "forward", operation.gives[:1])
            self.move("all_gather", "backward", operation.gives[:1])
            self.entered = None
        elif outcome.partial or outcome.how == "heads":
            self.move("all_reduce", "forward", operation.gives[:1])
            self.entered = None

    def enter_positions(self, value: int | str) -> None:
        """Positions become whole at the beginning of a region, once for readers in a row."""
        if isinstance(value, int) and self.entered != value:
            self.entered = value
            self.copied.add(value)
            self.begun.append(value)
            self.move("all_gather", "forward", [value])
            self.move("reduce_scatter", "backward", [value])

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
