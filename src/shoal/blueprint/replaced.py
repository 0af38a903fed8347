"""What a tensor rank keeps for backward where it runs another function, or where a copy is none on its part. No torch.

A blueprint's kept bytes are those of whole functions. parallel/tensor runs others in place of some:

| in place of | it keeps |
|---|---|
| embedding in a table of which it has some rows | places in its rows, and which of them are its own |
| cross_entropy, nll_loss over some of the classes | exponentials of its logits (not of log-probabilities), a few numbers a row |
| multi_head_attention_forward | copies of inputs that are not contiguous, queries, keys, values, output, a logsumexp per query; with dropout probabilities, mask and their product |

Where positions are shared out, a layer at which a region begins keeps the whole of them, gathered for it alone. What is
whole on every rank an operation may take its part of, and keep that. And a reshape that copies the whole may be a view
on a part: one key-value head repeated for all queries is.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable

from shoal.blueprint.divided import Divided, Local, tensors_of
from shoal.blueprint.facts import Blueprint, Kept, Operation, Storage
from shoal.blueprint.split import local_strides, viewable

#: Operations that copy only where they cannot give a view.
RESHAPES = ("reshape", "flatten", "contiguous", "reshape_as", "unflatten")


def replaced(blueprint: Blueprint, local: Divided) -> dict[int, tuple[Kept, ...]]:
    """By number, what operations keep in whose place others run; a storage that is no value has this rank's bytes."""
    every = [*blueprint.operations, *blueprint.loss]
    storages, found = _Storages(blueprint), dict[int, tuple[Kept, ...]]()
    seen: set[int] = set()
    for number, (op, own) in enumerate(zip(every, local.operations, strict=True)):
        sources = {value: storages.source(value) for value in own.entered}
        if own.how in INSTEAD and op.kept:
            found[number] = INSTEAD[own.how](op, own, blueprint)
        elif sources and any(blueprint.parameter[name].trains for name in op.parameters):
            kept = _gathered(op, sources, seen, blueprint)
            if kept != op.kept:
                found[number] = kept
        seen.update(sources.values())
    return found


def _gathered(op: Operation, sources: dict[int, int], seen: set[int], blueprint: Blueprint) -> tuple[Kept, ...]:
    """What a layer keeps for which positions are gathered: their whole again where another layer keeps it as well, and
    in place of a copy."""
    kept = list(op.kept)
    for value, source in sources.items():
        size, nbytes = math.prod(blueprint.values[value].shape), blueprint.values[value].bytes
        copies = [each for each in kept if each.of is None and each.numel == size]
        if (copies or source in seen) and not any(each.of == source for each in kept):
            kept = [each for each in kept if each not in copies]
            kept.append(copies[0] if copies else Kept(None, nbytes, size))
    return tuple(kept)


def shares(blueprint: Blueprint, local: Divided) -> dict[int, float]:
    """Which part of a value is kept, where it is not the part that this rank has: all of what is gathered, and of what
    is whole the part that each operation of one kind takes for itself."""
    storages, found = _Storages(blueprint), dict[int, float]()
    for op, own in zip(blueprint.operations, local.operations, strict=False):
        kept = {each.of for each in op.kept}
        for ref, shape in zip(tensors_of(op), own.taken, strict=True):
            if isinstance(ref.of, int) and ref.of in kept and ref.of not in local.splits:
                part = math.prod(shape) / max(math.prod(blueprint.values[ref.of].shape), 1)
                readers = (blueprint.operations[reader].name for reader in blueprint.readers.get(ref.of, ()))
                copies = sum(name == op.name for name in readers) if blueprint.values[ref.of].of_model else 0
                found[ref.of] = part * copies if part < 1 and copies else 1.0  # without a gradient a part is a view
        views = storages.own.isdisjoint(op.gives)  # of what is gathered
        found.update(dict.fromkeys((storages.source(value) for value in own.gathered if views), 1.0))
    found.update(dict.fromkeys((storages.source(value) for value in local.gathered), 1.0))
    return found


def moved(blueprint: Blueprint, local: Divided) -> tuple[Storage, ...]:
    """What the tensor group's collectives hold for a moment beside what they take and give, in this rank's bytes: the
    ranks' parts one after the other, a copy of a gradient to be summed, a whole gradient for as long as it is read."""
    found = list[Storage]()
    timeline = blueprint.timeline
    if timeline is None:
        return ()
    spans = dict[int, tuple[int, int]]()
    latest = max(storage.freed for storage in timeline.storages)
    for (first, number), (after, _) in zip(timeline.backward, [*timeline.backward[1:], (latest + 1, -1)], strict=True):
        spans[number] = (spans.get(number, (first, 0))[0], after - 1)
    for number, own in enumerate(local.operations):
        first, last = spans.get(number, (latest, latest))
        end, before = timeline.forward[number], timeline.forward[max(number - 1, 0)]
        held = {
            ("all_gather", "forward"): [(before, before)], ("reduce_scatter", "forward"): [(end, end)] * 2,
            ("all_gather", "backward"): [(first, last), (first, first)], ("reduce_scatter", "backward"): [(last, last)],
            ("all_reduce", "backward"): [(last, last)],
        }  # fmt: skip
        for move in own.moves:
            for born, freed in held.get((move.collective, move.phase), []) if move.of_input else []:
                found.append(Storage(move.bytes, 0, born, freed, born, number, None, False))
    return tuple(found)


class _Storages:
    """Which values have a storage of their own, and which are views of others."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        of = {storage.of for storage in blueprint.timeline.storages} if blueprint.timeline else set()
        self.own = frozenset(value for value in of if isinstance(value, int)).union(blueprint.inputs)

    def source(self, value: int) -> int:
        """The value in whose storage one lies; itself where storages are not known."""
        while self.own and value not in self.own and value in self.blueprint.maker:
            reads = self.blueprint.operations[self.blueprint.maker[value]].reads
            if not reads:
                break
            value = reads[0]
        return value


def views(blueprint: Blueprint, local: Divided) -> dict[int, int | None]:
    """Values that are copies on one device and views on this rank: of which value's storage; None where that storage
    is kept anyway, or by another such view."""
    storages = _Storages(blueprint)
    kept = {kept.of for op in blueprint.operations for kept in op.kept}
    found: dict[int, int | None] = {}
    for number, op in enumerate(blueprint.operations if local.degree > 1 else ()):
        if op.name not in RESHAPES or op.gives[0] not in kept or not _is_view(op, local, number, blueprint):
            continue
        source = storages.source(op.reads[0])
        found[op.gives[0]] = None if source in kept or source in blueprint.inputs else source
        kept.add(source)
    return found


def _is_view(op: Operation, local: Divided, number: int, blueprint: Blueprint) -> bool:
    here, source = local.operations[number], op.reads[0]
    strides = blueprint.values[source].strides
    if not strides or here.gathered:
        return False
    strides = local_strides(blueprint.values[source].shape, strides, local.splits.get(source), local.degree)
    after = here.given[0]
    return viewable(here.taken[0], strides, after) and (op.name != "contiguous" or _dense(after, strides))


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor lies in memory row by row."""
    wanted = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != wanted:
            return False
        wanted *= size
    return True


def _item(blueprint: Blueprint, value: int) -> int:
    """Bytes of a number."""
    found = blueprint.values[value]
    return found.bytes // max(math.prod(found.shape), 1)


def _embedding(op: Operation, local: Local, blueprint: Blueprint) -> tuple[Kept, ...]:
    ids = math.prod(local.taken[0])
    return (Kept(None, ids * _item(blueprint, op.reads[0]), ids), Kept(None, ids, ids))


def _loss(op: Operation, local: Local, blueprint: Blueprint) -> tuple[Kept, ...]:
    """Per row two places, whether the class is here, its weight and (of logits) the sum that the logarithm is of."""
    item = max(4, _item(blueprint, op.reads[0]))  # half precision is widened
    classes, rows = math.prod(local.taken[0]), math.prod(local.taken[1])
    logits = op.name == "cross_entropy"
    each = 8 + 8 + 1 + item * (1 + logits)
    return (*(Kept(None, classes * item, classes),) * logits, Kept(None, rows * each, rows))


def _heads(op: Operation, local: Local, blueprint: Blueprint) -> tuple[Kept, ...]:
    item, heads, drops = _item(blueprint, op.gives[0]), op.arguments[4], op.arguments[10]
    (length, batch, width), (others, *_) = local.taken[0], local.taken[1]
    own = local.taken[3][0] // 3  # of the packed projection's rows, as many of each
    here = own // (width // heads)
    inputs = dict.fromkeys(ref.of for ref in tensors_of(op)[:3] if isinstance(ref.of, int))
    seen = [blueprint.values[value] for value in inputs]
    copies = [math.prod(value.shape) for value in seen if value.strides and not _dense(value.shape, value.strides)]
    sizes = [*copies, length * batch * own, others * batch * own, others * batch * own, length * batch * own]
    if drops and dict(op.keywords).get("training", True):
        sizes += [batch * here * length * others] * 3
    rows = batch * here * length
    values = tuple(kept for kept in op.kept if kept.of is not None)
    return (*values, *(Kept(None, size * item, size) for size in sizes), Kept(None, rows * max(4, item), rows))


INSTEAD: dict[str, Callable[[Operation, Local, Blueprint], tuple[Kept, ...]]] = {
    "embedding": _embedding, "cross_entropy": _loss, "nll_loss": _loss, "heads": _heads,
}  # fmt: skip
