"""What other devices' kernels keep for backward, read and write, where it is not what this machine's do. No torch.

A blueprint is traced on CPU kernels. On CUDA three functions keep something else (torch 2.13,
tools/autograd/derivatives.yaml and the kernels it names):

| function | CPU, as traced | CUDA |
|---|---|---|
| scaled_dot_product_attention, flash | inputs, output, logsumexp; with dropout the probabilities | inputs, output, a float32 logsumexp per query |
| the same, math | | inputs, the probabilities of every query and key in the compute dtype; the output, by what reads it |
| rms_norm | its parts, one by one | input and one float32 per row |
| dropout | a mask as wide as the values | a mask of one byte each |

All else (layer and batch norm, activations, products, losses) keeps the same. The same three start other kernels: each
is one that reads its tensors and writes its result, and in backward reads what it kept and the result's gradient and
writes theirs. Fused attention's backward is three (a sum, the products, a change of dtype), a norm's two (one for its
weights). Attention that is not fused also writes, scales, masks and normalises the scores, and reads them: five times
over forward, seven back.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable

from shoal.blueprint.divided import tensors_of
from shoal.blueprint.facts import Blueprint, Kept, Operation, Storage, Timeline, Touch, refs

#: Times that scores are read or written, forward and backward, where attention is not fused.
_SCORES = (5, 7)

Sets = Callable[[Operation, Blueprint], tuple[Kept, ...]]
#: What is read and written, and kernels of the forward and of the backward.
Works = Callable[[Operation, Blueprint], tuple[tuple[Touch, ...], int, int]]


def on(kernels: str, blueprint: Blueprint) -> Blueprint:
    """The blueprint with the kept and moved bytes of ``kernels`` (cpu, cuda-flash, cuda-math)."""
    table = TABLES[kernels]
    if not table:
        return blueprint
    every = [*blueprint.operations, *blueprint.loss]
    changed = {n: table[op.name](op, blueprint) for n, op in enumerate(every) if op.name in table and op.kept}
    return _moved_otherwise(kept_otherwise(blueprint, changed), TOUCHES[kernels])


def _moved_otherwise(blueprint: Blueprint, table: dict[str, Works]) -> Blueprint:
    """The blueprint with what the kernels of some functions, by name, read and write."""

    def changed(op: Operation) -> Operation:
        if op.name not in table or not op.launches:
            return op
        touches, launches, back_launches = table[op.name](op, blueprint)
        if not op.back_launches:  # no backward, or none was traced
            touches = tuple(touch._replace(backward=0, product_backward=0) for touch in touches)
        return op._replace(touches=touches, launches=launches, back_launches=back_launches * bool(op.back_launches))

    operations, loss = (tuple(map(changed, of)) for of in (blueprint.operations, blueprint.loss))
    return blueprint.model_copy(update={"operations": operations, "loss": loss})


def kept_otherwise(blueprint: Blueprint, changed: dict[int, tuple[Kept, ...]]) -> Blueprint:
    """The blueprint with what some operations (of the loss too) keep as given, by number."""
    every, cut = [*blueprint.operations, *blueprint.loss], len(blueprint.operations)
    made = [
        op._replace(kept=changed[n], kept_bytes=sum(kept.bytes for kept in changed[n])) if n in changed else op
        for n, op in enumerate(every)
    ]
    return blueprint.model_copy(
        update={
            "operations": tuple(made[:cut]), "loss": tuple(made[cut:]),
            "timeline": _timeline(blueprint.timeline, changed) if blueprint.timeline else None,
        }
    )  # fmt: skip


def _timeline(timeline: Timeline, changed: dict[int, tuple[Kept, ...]]) -> Timeline:
    """Intermediates that are kept otherwise, from the operation's end to where the traced ones were freed."""
    end = timeline.forward[-1]
    freed: dict[int, int] = {}
    storages: list[Storage] = []
    for storage in timeline.storages:
        own = storage.operation in changed and storage.born <= end and storage.kept
        if own:
            freed[storage.operation] = max(freed.get(storage.operation, 0), storage.freed)
        if not (own and storage.of is None):
            storages.append(storage)
    latest = max((storage.freed for storage in timeline.storages), default=end)
    for number, kept in changed.items():
        born = timeline.forward[number]
        last = freed.get(number, latest)
        storages += [Storage(k.bytes, k.numel, born, last, born, number, None, True) for k in kept if k.of is None]
    return timeline._replace(storages=tuple(storages))


def _values(operation: Operation) -> tuple[Kept, ...]:
    return tuple(kept for kept in operation.kept if kept.of is not None)


def _shape(operation: Operation, blueprint: Blueprint, place: int) -> tuple[int, ...]:
    value = [ref.of for ref in refs(operation.arguments)][place]
    return blueprint.values[value].shape if isinstance(value, int) else blueprint.parameter[value].shape


def _inputs(operation: Operation, blueprint: Blueprint) -> tuple[Kept, ...]:
    """Queries, keys, values (and the output) as traced where a fused kernel ran; else with copies of two of them."""
    kept = _values(operation)
    if any(each.of in operation.gives for each in kept):
        return kept
    item = _item(operation, blueprint)
    sizes = [math.prod(_shape(operation, blueprint, place)) for place in range(2)]
    return (*kept, *(Kept(None, size * item, size) for size in sizes))


def _item(operation: Operation, blueprint: Blueprint) -> int:
    given = blueprint.values[operation.gives[0]]
    return given.bytes // max(math.prod(given.shape), 1)


def _flash(operation: Operation, blueprint: Blueprint) -> tuple[Kept, ...]:
    queries = math.prod(_shape(operation, blueprint, 0)[:-1])
    return (*_inputs(operation, blueprint), Kept(None, 4 * queries, queries))


def _math(operation: Operation, blueprint: Blueprint) -> tuple[Kept, ...]:
    pairs = math.prod(_shape(operation, blueprint, 0)[:-1]) * _shape(operation, blueprint, 1)[-2]
    return (*_inputs(operation, blueprint), Kept(None, pairs * _item(operation, blueprint), pairs))


def _rms_norm(operation: Operation, blueprint: Blueprint) -> tuple[Kept, ...]:
    shape = _shape(operation, blueprint, 0)
    rows, size = math.prod(shape[:-1]), math.prod(shape)
    given = _values(operation) or (Kept(None, size * _item(operation, blueprint), size),)
    return (*given, Kept(None, 4 * rows, rows))


def _dropout(operation: Operation, blueprint: Blueprint) -> tuple[Kept, ...]:
    return tuple(kept if kept.of is not None else Kept(None, kept.numel, kept.numel) for kept in operation.kept)


TABLES: dict[str, dict[str, Sets]] = {
    "cpu": {},
    "cuda-flash": {"scaled_dot_product_attention": _flash, "rms_norm": _rms_norm, "dropout": _dropout},
    "cuda-math": {"scaled_dot_product_attention": _math, "rms_norm": _rms_norm, "dropout": _dropout},
}


def _bytes(of: int | str, blueprint: Blueprint) -> int:
    return blueprint.values[of].bytes if isinstance(of, int) else blueprint.parameter[of].bytes


def _attention(operation: Operation, blueprint: Blueprint) -> tuple[tuple[Touch, ...], int, int]:
    """Fused: queries, keys, values (cast first where they are wider), the output; a mask is read by both."""
    given, item = operation.gives[0], _item(operation, blueprint)
    output = blueprint.values[given].bytes
    touches, casts = [Touch(given, 0, 0, output, 2 * output)], 0
    for place, ref in enumerate(tensors_of(operation)):
        nbytes = _bytes(ref.of, blueprint)
        if place > 2:
            touches.append(Touch(ref.of, 0, 0, nbytes, nbytes))
            continue
        size = math.prod(_shape(operation, blueprint, place))
        cast = nbytes + size * item if nbytes > size * item else 0
        casts += bool(cast)
        touches.append(Touch(ref.of, cast, cast, size * item, 2 * size * item))
    return tuple(touches), 1 + casts, 3 + casts


def _scores(operation: Operation, blueprint: Blueprint) -> tuple[tuple[Touch, ...], int, int]:
    touches, launches, _ = _attention(operation, blueprint)
    pairs = math.prod(_shape(operation, blueprint, 0)[:-1]) * _shape(operation, blueprint, 1)[-2]
    forward, backward = (times * pairs * _item(operation, blueprint) for times in _SCORES)
    casts = launches - 1
    return (*touches, Touch(None, 0, 0, forward, backward)), 5 + casts, 7 + casts


def _norm(operation: Operation, blueprint: Blueprint) -> tuple[tuple[Touch, ...], int, int]:
    output = blueprint.values[operation.gives[0]].bytes
    touches = [Touch(operation.gives[0], output, output, 0, 0)]
    for ref in tensors_of(operation):
        nbytes = _bytes(ref.of, blueprint)
        touches.append(Touch(ref.of, nbytes, 2 * nbytes, 0, 0))
    return tuple(touches), 1, 2


def _drop(operation: Operation, blueprint: Blueprint) -> tuple[tuple[Touch, ...], int, int]:
    given, taken = operation.gives[0], next(iter(refs(operation.arguments))).of
    masked = blueprint.values[given].bytes + math.prod(blueprint.values[given].shape)  # a byte for each of the mask
    nbytes = _bytes(taken, blueprint)
    return (Touch(given, masked, masked, 0, 0), Touch(taken, nbytes, nbytes, 0, 0)), 1, 1


TOUCHES: dict[str, dict[str, Works]] = {
    "cuda-flash": {"scaled_dot_product_attention": _attention, "rms_norm": _norm, "dropout": _drop},
    "cuda-math": {"scaled_dot_product_attention": _scores, "rms_norm": _norm, "dropout": _drop},
}
