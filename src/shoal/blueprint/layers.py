"""Which operations have a weight that can be divided, and how their operand is made of a parameter. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from shoal.blueprint.facts import Blueprint, Operation, Ref, refs
from shoal.blueprint.split import Split

#: Operations with a weight: where it may stand, where a bias does, and the operand's dimension of outputs.
PRODUCTS: dict[str, tuple[tuple[int, int | None, int], ...]] = {
    "linear": ((1, 2, -2),), "addmm": ((2, 0, -1),),
    **dict.fromkeys(("matmul", "mm", "bmm"), ((1, None, -1), (0, None, -2))),
}  # fmt: skip
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")

#: All of them: regions begin and end at these.
LAYERS = frozenset((*PRODUCTS, *CONVOLUTIONS, "einsum"))

TRANSPOSES = ("T", "t", "mT", "transpose")
CASTS = ("to", "type_as", "float", "double", "half", "bfloat16", "contiguous")


class Layer(NamedTuple):
    """An operation with a weight.

    ``inputs``: the values beside it. ``outputs``: entries of the parameter's dimension ``output_dim``, which are the
    operation's outputs. ``operand``: what stands in the operation, whose dimensions are the parameter's ``dims``;
    ``first``: the operation with which making it of the parameter begins, where it is not the parameter itself.
    """

    number: int
    weight: str
    bias: str | None
    inputs: tuple[int, ...]
    outputs: int
    output_dim: int
    operand: int | str
    dims: tuple[int, ...]
    first: int | None

    def columns(self, split: Split) -> dict[str, Split]:
        """The splits of its parameters where its outputs are split so."""
        return {self.weight: split.on(self.output_dim)} | ({self.bias: split.on(0)} if self.bias else {})


class _Source(NamedTuple):
    """The parameter that an operand is made of."""

    parameter: str
    dims: tuple[int, ...]
    first: int | None


def layers(blueprint: Blueprint) -> dict[int, Layer]:
    """The layers among the operations, by number."""
    found = {number: _layer(blueprint, number, of) for number, of in enumerate(blueprint.operations)}
    return {number: layer for number, layer in found.items() if layer is not None}


def _layer(blueprint: Blueprint, number: int, operation: Operation) -> Layer | None:
    given = [*operation.arguments, *(value for _, value in operation.keywords if isinstance(value, Ref))]
    for weight, bias, output_dim in _places(operation, given):
        source = _source(blueprint, weight) if isinstance(weight, Ref) else None
        if not isinstance(weight, Ref) or source is None or len(source.dims) < 2:
            continue
        if weight is given[0] and len(source.dims) < 3:
            continue  # one matrix on the left: its outputs are no features
        return Layer(
            number, source.parameter,
            blueprint.parameter[bias.of].name if isinstance(bias, Ref) and isinstance(bias.of, str) else None,
            tuple(ref.of for ref in refs(tuple(given)) if isinstance(ref.of, int) and ref is not weight),
            blueprint.parameter[source.parameter].shape[source.dims[output_dim]],
            source.dims[output_dim], weight.of, source.dims, source.first,
        )  # fmt: skip
    return None


def _places(operation: Operation, given: list[Any]) -> Iterator[tuple[Any, Any, int]]:
    """What may be the weight, its bias, and the weight's dimension of outputs."""
    if operation.name == "einsum":
        yield from _factors(given)
        return
    for weight, bias, dim in PRODUCTS.get(operation.name, ((1, 2, 0),)):
        if weight < len(given):
            yield given[weight], given[bias] if bias is not None and bias < len(given) else None, dim


def _factors(given: list[Any]) -> Iterator[tuple[Ref, None, int]]:
    """An einsum's factors that have a letter of the output for themselves, the last of such letters."""
    equation, operands = given[0], list(refs(tuple(given[1:])))
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return
    inputs, _, output = equation.replace(" ", "").partition("->")
    every = inputs.split(",")
    for at, (letters, operand) in enumerate(zip(every, operands, strict=False)):
        others = "".join(every[:at] + every[at + 1 :])
        own = [letter for letter in letters if letter in output and letter not in others]
        if own:
            yield operand, None, letters.index(own[-1])


def _source(blueprint: Blueprint, operand: Ref) -> _Source | None:
    """The parameter of which an operand is the transpose, a cast or picked entries; None where it is anything else."""
    orders, first = [], None
    while isinstance(operand.of, int):
        first = blueprint.maker.get(operand.of)
        maker = blueprint.operations[first] if first is not None else None
        before = maker.arguments[0] if maker and maker.arguments else None
        if maker is None or not isinstance(before, Ref):
            return None
        shape = _shape(blueprint, before)
        order = _order(blueprint, maker, len(shape))
        if order is None:
            return None
        orders.append(order)
        operand = before
    parameter = blueprint.parameter[operand.of]
    if parameter.buffer:
        return None
    dims = tuple(range(len(orders[0]))) if orders else tuple(range(len(parameter.shape)))
    for order in orders:
        dims = tuple(order[dim] for dim in dims)
    return _Source(parameter.name, dims, first)


def _shape(blueprint: Blueprint, ref: Ref) -> tuple[int, ...]:
    return blueprint.values[ref.of].shape if isinstance(ref.of, int) else blueprint.parameter[ref.of].shape


def _order(blueprint: Blueprint, operation: Operation, rank: int) -> tuple[int, ...] | None:
    """For each dimension of what an operation gives, that of its argument; None where it changes more than that."""
    order, name, more = list(range(rank)), operation.name, operation.arguments[1:]
    if operation.in_place:
        return None
    if name in CASTS:
        return tuple(order)
    if name in ("mT", "t") or (name == "T" and rank == 2):
        order[-1], order[-2] = order[-2], order[-1]
    elif name == "transpose" and len(more) == 2:
        order[more[0]], order[more[1]] = order[more[1]], order[more[0]]
    elif name == "getitem" and rank > 2 and isinstance(more[0], int):
        order.pop(0)
    elif not (name == "getitem" and rank > 2 and isinstance(more[0], Ref) and len(_shape(blueprint, more[0])) == 1):
        return None
    return tuple(order)
