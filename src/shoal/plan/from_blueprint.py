"""A traced model becomes a profile: what one rank computes, keeps and sends, block by block. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal.blueprint.cut import carried_bytes, handed_on, owners, places
from shoal.blueprint.divided import Divided, Local, divided, input_values, tensors_of
from shoal.blueprint.facts import Blueprint, Kept, Operation, Storage, inside
from shoal.blueprint.gradients import learned
from shoal.blueprint.kernels import kept_otherwise, on
from shoal.blueprint.replaced import moved, replaced, shares, views
from shoal.blueprint.roles import Roles, roles
from shoal.blueprint.split import local_size
from shoal.cluster.facts import ATTENTION_BACKWARD
from shoal.core.errors import ConfigError
from shoal.plan.moments import holdings
from shoal.plan.profile import Block, Holding, Op, Profile, Traffic, Weight

#: Products: where their two factors stand among the tensors of a call, and whether the second lies transposed.
PRODUCTS = {
    "linear": (0, 1, True), "matmul": (0, 1, False), "mm": (0, 1, False), "bmm": (0, 1, False),
    "addmm": (1, 2, False), "baddbmm": (1, 2, False),
}  # fmt: skip
ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward")


def profile(
    blueprint: Blueprint,
    units: Sequence[str],
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    precision: str = "fp32",
    kernels: str = "cpu",
    name: str = "",
) -> Profile:
    """The profile of a model over ``tensor`` ranks. ``units``: paths of its units (pipeline/units.py).

    ``precision`` must be the one that the blueprint was traced in; ``kernels``: whose kept bytes to count
    (blueprint/kernels.py). Raises ConfigError where no weight, or no position, can be divided.
    """
    found = roles(blueprint, tensor) if tensor > 1 else None
    if found is not None and not any(role.split for role in found.role.values()):
        reasons = "; ".join(f"{weight}: {reason}" for weight, reason in list(found.reasons.items())[:3])
        raise ConfigError(f"tensor={tensor}, but no weight of the model can be divided ({reasons}); set tensor = 1")
    blueprint = on(kernels, blueprint)
    made = _Maker(blueprint, units, found, sequence_parallel, ATTENTION_BACKWARD[kernels])
    blocks = made.blocks()
    flops = sum(op.flops for op in (*blueprint.operations, *blueprint.loss)) / blueprint.samples
    return Profile(
        name=name, tokens=_tokens(blueprint), tensor=tensor, sequence_parallel=sequence_parallel,
        precision=precision, kernels=kernels, blocks=blocks, model_flops=flops,
        input_bytes=sum(blueprint.values[v].bytes for v in (*blueprint.inputs, *blueprint.targets))
        / blueprint.samples,
        notes=_notes(blueprint, found),
    )  # fmt: skip


def _tokens(blueprint: Blueprint) -> int:
    """Positions of a sample: the second dimension of the first input of integers, else 1."""
    first = next((blueprint.values[v] for v in blueprint.inputs if "int" in blueprint.values[v].dtype), None)
    return first.shape[1] if first is not None and len(first.shape) > 1 else 1


def _notes(blueprint: Blueprint, found: Roles | None) -> tuple[str, ...]:
    notes = []
    if blueprint.timeline is None:
        notes.append("the loss was not traced: what it and the backward hold in memory is not known")
    if found is not None:
        whole = [name for name, role in found.role.items() if role.split is None and name in found.reasons]
        if whole:
            notes.append(f"{len(whole)} weights stay whole on every tensor rank, for example {whole[0]}")
    return tuple(notes)


Pair = tuple[float, float]


class _Span(NamedTuple):
    path: str
    begin: int
    end: int


class _Maker:
    """What is known while a profile is made."""

    def __init__(
        self, blueprint: Blueprint, units: Sequence[str], found: Roles | None, sequence_parallel: bool,
        attention_backward: float,
    ) -> None:  # fmt: skip
        self.found, self.samples, self.attention_backward = found, blueprint.samples, attention_backward
        self.local: Divided = divided(blueprint, found, sequence_parallel)
        self.replaced = replaced(blueprint, self.local)
        self.views, self.shares = views(blueprint, self.local), shares(blueprint, self.local)
        self.blueprint = blueprint = kept_otherwise(blueprint, self.replaced) if self.replaced else blueprint
        self.operations: list[Operation] = [*blueprint.operations, *blueprint.loss]
        self.of_input = input_values(blueprint)
        self.learned = learned(blueprint)
        self.moved = moved(blueprint, self.local)
        self.left: dict[int, list[Kept]] = {}  # what each operation left for backward, as the timeline goes on
        self.spans = self.cut(units)
        self.listed = frozenset(unit for unit in units if _holder(unit) in blueprint.lists)
        self.repeated = _repeated(blueprint, self.listed)
        handed = handed_on(blueprint, units)
        grows = handed & self.of_input
        self.handed = blueprint.there(grows), blueprint.there(handed - grows)
        self.returned = blueprint.there(self.learned.intersection(blueprint.first_maker))
        self.lying = blueprint.there(set(self.local.splits).intersection(blueprint.first_maker))

    def cut(self, units: Sequence[str]) -> list[_Span]:
        """The blocks: from each unit's first operation to the next one's; the last has the loss."""
        paths = [place.unit for place in places(self.blueprint, units)] or [""]
        first: dict[str | None, int] = {}
        for number, path in enumerate(owners(self.blueprint, paths)):
            first.setdefault(path, number)
        starts = [first[path] for path in paths]
        ends = [*starts[1:], len(self.operations)]
        starts[0] = 0
        return [_Span(path, begin, end) for path, begin, end in zip(paths, starts, ends, strict=True)]

    def share(self, of: int | str | None) -> float:
        """Which part of a value, or of a parameter, this rank holds."""
        if isinstance(of, int):
            return self.shares.get(of, self.local.share(of))
        role = self.found.role.get(self.blueprint.parameter[of].name) if self.found and of else None  # buffers: none
        return local_size(role.split, self.local.degree, 0) / role.split.size if role and role.split else 1.0

    def kept(self, kept: Kept, operation: int, before: Sequence[Kept] = ()) -> Pair:
        """A storage that an operation's forward leaves for backward, as ``sized``; ``before``: those left before it."""
        of, nbytes, numel = kept
        if of is None and operation in self.replaced:
            return nbytes / self.samples, 0.0  # as this rank keeps it
        if isinstance(of, int) and of in self.views and nbytes == self.blueprint.values[of].bytes:
            source = self.views[of]
            if source is None:
                return 0.0, 0.0
            of, nbytes = source, self.blueprint.values[source].bytes
        nth = sum(each.of is None and each.numel == numel for each in before)
        return self.sized(Kept(of, nbytes, numel), operation, False, nth)

    def sized(self, kept: Kept, operation: int, backward: bool, nth: int = 0) -> Pair:
        """A storage of the traced micro-batch as (bytes per sample, fixed bytes) on this rank. ``operation``: whose
        forward or backward made it, or whose forward keeps it; as the ``nth`` of its size that is no value."""
        of, nbytes, numel = kept
        share, grows = self.share(of), isinstance(of, int) and of in self.of_input
        if of is None and operation < len(self.operations):
            share, grows = self.like(operation, numel, backward, nth)
        return (nbytes * share / self.samples, 0.0) if grows else (0.0, nbytes * share)

    def like(self, operation: int, numel: int, backward: bool, nth: int = 0) -> tuple[float, bool]:
        """(share, whether it grows with the samples) of an operation's intermediate: as that of the ``nth`` of its
        tensors of as many numbers, of what it takes (copies in forward, gradients in backward) before what it gives, in
        backward also of its weights; else as all of them."""
        op, local = self.operations[operation], self.local.operations[operation]
        alike = [
            (math.prod(shape) / max(numel, 1), value in self.of_input)
            for values, shapes in (([ref.of for ref in tensors_of(op)], local.taken), (op.gives, local.given))
            for value, shape in zip(values, shapes, strict=True)
            if isinstance(value, int) and math.prod(self.blueprint.values[value].shape) == numel
        ]
        if nth < len(alike):
            return alike[nth]
        for name in op.parameters if backward else ():
            if math.prod(self.blueprint.parameter[name].shape) == numel:
                return self.share(name), False
        values = (*op.gives, *op.reads)
        parts = [self.local.share(value) for value in values if value in self.local.splits and local.divided]
        return min(parts, default=1.0), bool(self.of_input.intersection(values))

    def storage(self, storage: Storage) -> Pair:
        assert self.blueprint.timeline is not None
        if storage.numel == 0:
            return storage.bytes / self.samples, 0.0  # of a collective, as this rank holds it
        backward = storage.born > self.blueprint.timeline.forward[-1]
        kept = Kept(storage.of, storage.bytes, storage.numel)
        if not storage.kept or backward:
            return self.sized(kept, storage.operation, backward)
        before = self.left.setdefault(storage.operation, [])
        before.append(kept)
        return self.kept(kept, storage.operation, before[:-1])

    def blocks(self) -> tuple[Block, ...]:
        held: list[Holding | None] = [None] * len(self.spans)
        if self.blueprint.timeline is not None:
            starts = [span.begin for span in self.spans]
            gradient = {p.name: self.bytes_of(p.name) for p in self.blueprint.parameters if p.trains}
            timeline = self.blueprint.timeline
            timeline = timeline._replace(storages=(*timeline.storages, *self.moved))
            found = holdings(timeline, starts, self.storage, gradient)
            held = [h._replace(between=self.between(span)) for h, span in zip(found, self.spans, strict=True)]
        weights = self.weights()
        made = []
        for number, span in enumerate(self.spans):
            carried = carried_bytes(self.blueprint, span.begin) if number else 0
            buffers = sum(p.bytes for p in self.blueprint.parameters if p.buffer and self.home(p.name) == number)
            made.append(Block(
                span.path, "", span.path in self.repeated, self.ops(span), self.traffic(span), weights[number],
                carried / self.samples, carried / self.samples, buffers, held[number], unit=span.path in self.listed,
                handed_bytes=self.handed_bytes(span.begin) if number else (0.0, 0.0),
                returned_bytes=self.returned[span.begin] / self.samples if number else 0.0,
                gathered_bytes=self.lying[span.begin] / self.samples if number else 0.0,
            ))  # fmt: skip
        kinds: dict[object, str] = {}
        for number, block in enumerate(made):
            key = (block.ops, block.traffic, tuple(w._replace(name="") for w in block.weights), block.repeated,
                   block.unit, block.carried_bytes, block.returned_bytes,
                   block.gathered_bytes)  # fmt: skip
            kind = self.blueprint.modules.get(block.path, "model")
            made[number] = block._replace(kind=kinds.setdefault(key, f"{kind} {len(kinds)}"))
        return tuple(made)

    def handed_bytes(self, at: int) -> Pair:
        """What crosses before an operation besides, as it needs no gradient."""
        grows, fixed = self.handed
        return grows[at] / self.samples, float(fixed[at])

    def between(self, span: _Span) -> float:
        """Bytes per sample of the gradients that weights' own wait for: of what operations give that read both a
        trained weight, or what is made of such alone (rows that are picked of it), and what comes in."""
        found, alone = set[int](), set[int]()
        for op in self.operations[span.begin : span.end]:
            trains = any(self.blueprint.parameter[name].trains for name in op.parameters)
            if trains or not alone.isdisjoint(op.reads):
                enters = self.learned.intersection(op.reads) - alone
                (found if enters else alone).update(op.gives)
        return sum(self.blueprint.values[v].bytes * self.local.share(v) for v in found) / self.samples

    def bytes_of(self, name: str) -> float:
        parameter = self.blueprint.parameter[name]
        return parameter.bytes * self.share(name)

    def home(self, name: str) -> int:
        """The block whose unit a parameter or buffer lies in; the first where it lies in none."""
        parameter = self.blueprint.parameter[name]
        names = (parameter.name, *parameter.ties)
        return next((n for n, s in enumerate(self.spans) if any(inside(own, s.path) for own in names)), 0)

    def weights(self) -> list[tuple[Weight, ...]]:
        """Each block's: those that its operations read, and the first block's those that none reads."""
        readers: dict[str, set[int]] = {}
        for number, span in enumerate(self.spans):
            for op in self.operations[span.begin : span.end]:
                for name in op.parameters:
                    readers.setdefault(self.blueprint.parameter[name].name, set()).add(number)
        found: list[list[Weight]] = [[] for _ in self.spans]
        for parameter in self.blueprint.parameters:
            if parameter.buffer:
                continue
            share = self.share(parameter.name)
            dim = self.found.role[parameter.name].split if self.found else None
            rows = parameter.shape[0] if parameter.shape else 0
            rows = local_size(dim, self.local.degree, 0) if dim is not None and dim.dim == 0 else rows
            at = readers.get(parameter.name) or {self.home(parameter.name)}
            weight = Weight(
                parameter.name, round(math.prod(parameter.shape) * share), rows, parameter.trains,
                self.local.degree if share == 1 else 1, False, parameter.name if len(at) > 1 else "",
            )  # fmt: skip
            for number in at:
                found[number].append(weight)
        return [tuple(of) for of in found]

    def traffic(self, span: _Span) -> tuple[Traffic, ...]:
        """What the tensor group sends. A block that runs again does so up to the last tensor that it keeps (torch's
        checkpoint stops there, before that operation's kernel): what comes after it is not sent again."""
        own = [n for n in range(span.begin, span.end) if inside(self.operations[n].module, span.path)]
        last = max((n for n in own if self.operations[n].kept or self.operations[n].parameters), default=-1)
        return tuple(
            Traffic(
                "tensor", move.collective, move.phase, move.bytes / self.samples * move.of_input,
                fixed_bytes=move.bytes * (not move.of_input),
                repeats=number < last or (number == last and move.collective == "all_gather"),
            )
            for number in range(span.begin, span.end)
            for move in self.local.operations[number].moves
            if move.phase == "forward" or self.learned.intersection(self.operations[number].gives)
        )  # fmt: skip

    def ops(self, span: _Span) -> tuple[Op, ...]:
        return tuple(
            op
            for number in range(span.begin, span.end)
            if self.operations[number].launches or self.operations[number].kept or self.operations[number].touches
            for op in self.op(number)
        )

    def op(self, number: int) -> Sequence[Op]:
        """An operation for one sample; of a product also the kernels beside it, which add to its time: casts, sums."""
        of, local = self.operations[number], self.local.operations[number]
        kept = [self.kept(each, number, of.kept[:at]) for at, each in enumerate(of.kept)]
        kind = "memory" if not of.flops else "attention" if of.name in ATTENTION else "matmul"
        m, k, n = self.shape(of, local)
        share = 1 / self.local.degree if local.divided else 1.0
        beside, own = self.moved_by(of, local)
        traced = self.blueprint.timeline is not None
        made = Op(
            of.name, kind, m / self.samples, k, n, of.flops * share / self.samples, *(own if of.flops else beside)[0],
            sum(each[0] for each in kept), self.backward(of), of.launches, sum(each[1] for each in kept),
            causal=kind == "attention" and _causal(of), back_launches=of.back_launches if traced else None,
            call_bytes=self.call_bytes(of, local),
        )  # fmt: skip
        if traced:
            moved, fixed = (own if of.flops else beside)[1]
            made = made._replace(back_moved_bytes=moved, back_fixed_bytes=fixed)
        if not of.flops or not any(map(sum, beside)):
            return (made,)
        (moved, fixed), (back_moved, back_fixed) = beside
        back = float(not self.learned.isdisjoint(of.gives))
        side = Op(of.name, "memory", 0, 0, 0, 0.0, moved, fixed, 0.0, back, 0.0)
        if traced:
            side = side._replace(back_moved_bytes=back_moved, back_fixed_bytes=back_fixed, back_launches=0.0)
        return made, side

    def moved_by(self, of: Operation, local: Local) -> tuple[tuple[Pair, Pair], tuple[Pair, Pair]]:
        """(Forward, backward) of kernels beside products, and of products, as (bytes per sample, fixed bytes)."""
        parts = self.parts(of, local) if self.local.degree > 1 else {}
        rest = min(parts.values(), default=1.0)  # of an intermediate
        grows = not self.of_input.isdisjoint((*of.reads, *of.gives))
        sums = [[0.0] * 4, [0.0] * 4]  # per sample, fixed
        for value, *counts in of.touches:
            share = rest if value is None else parts.get(value, 1.0)
            of_sample = grows if value is None else value in self.of_input
            mine = sums[not of_sample]
            for place, count in enumerate(counts):
                mine[place] += count * share
        each = [(sums[0][place] / self.samples, sums[1][place]) for place in range(4)]
        return (each[0], each[1]), (each[2], each[3])

    def parts(self, of: Operation, local: Local) -> dict[int | str, float]:
        """Which part of its tensors an operation reads or writes on this rank."""
        found: dict[int | str, float] = {}
        refs = [ref.of for ref in tensors_of(of)]
        for value, shape in (*zip(refs, local.taken, strict=True), *zip(of.gives, local.given, strict=True)):
            whole = self.blueprint.values[value] if isinstance(value, int) else self.blueprint.parameter[value]
            found.setdefault(value, math.prod(shape) / max(math.prod(whole.shape), 1))
        return found

    def call_bytes(self, of: Operation, local: Local) -> float:
        """Per sample, of its arguments and results, weights left out."""
        values = (*of.reads, *of.gives)
        moved = max(0.0, of.moved_bytes - sum(self.blueprint.parameter[name].bytes for name in of.parameters))
        if local.divided:
            whole = sum(self.blueprint.values[value].bytes for value in values)
            part = sum(self.blueprint.values[value].bytes * self.local.share(value) for value in values)
            moved *= part / whole if whole else 1.0
        return moved / self.samples

    def shape(self, of: Operation, local: Local) -> tuple[float, float, float]:
        """(m, k, n) of a product on this rank; of attention: heads x queries, width, keys. Others: results alone."""
        if of.name in PRODUCTS and len(local.taken) > PRODUCTS[of.name][1]:
            left, right, transposed = PRODUCTS[of.name]
            a, b = local.taken[left], local.taken[right]
            n = (b[-2] if transposed else b[-1]) if len(b) > 1 else 1
            return float(math.prod(a[:-1])), float(a[-1]), float(n)
        if of.name == "scaled_dot_product_attention" and len(local.taken) > 1:
            query, key = local.taken[:2]
            return float(math.prod(query[:-1])), float(query[-1]), float(key[-2])
        given = local.given[0] if local.given else ()
        m = float(math.prod(given[:-1])) if given else 1.0
        n = float(given[-1]) if given else 1.0
        return m, of.flops / max(2 * m * n, 1.0) if of.flops else 1.0, n

    def backward(self, of: Operation) -> float:
        """Backward FLOPs over forward FLOPs: one product for each input that needs a gradient; of fused attention also
        those of the scores again."""
        needs = bool(self.learned.intersection(of.reads))
        trains = any(self.blueprint.parameter[name].trains for name in of.parameters)
        if of.name == "scaled_dot_product_attention":
            return self.attention_backward * needs
        if of.name in ("linear", "addmm", "conv1d", "conv2d", "conv3d"):
            return float(needs + trains)
        return 2.0 if needs else float(trains)


def _causal(of: Operation) -> bool:
    """Whether attention was asked to look back alone; what an explicit mask hides is worked out all the same."""
    given = of.arguments[5] if len(of.arguments) > 5 else dict(of.keywords).get("is_causal")
    return of.name == "scaled_dot_product_attention" and given is True


def _repeated(blueprint: Blueprint, listed: frozenset[str]) -> frozenset[str]:
    """Of the units in lists those that are repeated blocks: of one class all, made of modules themselves
    (pipeline/units.py, block_paths)."""
    members: dict[str, list[str]] = {}
    for path in blueprint.modules:
        if path:
            members.setdefault(_holder(path), []).append(path)

    def blocks(own: list[str]) -> bool:
        return len(own) > 1 and len({blueprint.modules[path] for path in own}) == 1 and own[0] in members

    return frozenset(unit for unit in listed if blocks(members[_holder(unit)]))


def _holder(path: str) -> str:
    """The module that a path lies in."""
    return path.rpartition(".")[0]
