"""Two recordings held against each other: DESIGN's measure, tolerances, and the first thing that differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from shoal.verify.causes import Found, cause, common_cause, largest_difference, loss_cause, nearest_cause
from shoal.verify.recording import Copy, Recording, Step

FLOOR = 1e-3  # of the largest tensor of a kind: smaller ones are measured against this
FP64 = 1e-9  # what float64 may differ by
MULTIPLE = 6  # where rounding is measured: how much of what it does is allowed
#: By how much of themselves weights are moved to see what rounding does: no less would move any.
UNITS = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}
KINDS = ("gradient", "weight", "buffer", "optimizer")

Errors = dict[tuple[int, str], float]


class Difference(NamedTuple):
    """Something that differs: where, by how much, how much would be rounding, and why."""

    step: int
    what: str
    module: str
    error: float
    tolerance: float
    why: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}"


@dataclass
class Comparison:
    """How far two runs are apart. ``first``: the first difference, ``tensor``: the first tensor that differs."""

    errors: Errors = field(default_factory=dict)
    first: Difference | None = None
    tensor: Difference | None = None

    def largest(self, *kinds: str) -> float:
        """The largest error of these kinds over all steps."""
        return max((error for (_, name), error in self.errors.items() if name.startswith(kinds)), default=0.0)


class Tolerance:
    """What may differ, by step and name: one number, or a multiple of what a rounding of the weights changed."""

    def __init__(self, limit: float, perturbed: Errors | None = None) -> None:
        self.limit, self.perturbed = limit, perturbed or {}
        kinds: dict[tuple[int, str], list[float]] = {}
        for (step, name), error in self.perturbed.items():
            kinds.setdefault((step, _kind(name)), []).append(error)
        self.typical = {key: median(errors) for key, errors in kinds.items()}

    def of(self, step: int, name: str) -> float:
        """The largest error that counts as rounding."""
        key = (step, _kind(name))
        own = self.perturbed.get((step, name), 0.0)
        return max(self.limit, MULTIPLE * own, MULTIPLE * self.typical.get(key, 0.0))


def _kind(name: str) -> str:
    return name.split("/", 1)[0] if not name.startswith("optimizer/") else "/".join(name.split("/")[:2])


def compare(reference: Recording, other: Recording, tolerance: Tolerance) -> Comparison:
    """Hold ``other`` against the one-device run, step by step."""
    found = Comparison()
    for mine, theirs in zip(reference.steps, other.steps, strict=False):
        for difference in _step(reference, mine, theirs, tolerance, found.errors):
            found.first = found.first or difference
            if found.tensor is None and difference.module:
                found.tensor = difference
    if len(reference.steps) != len(other.steps) and found.first is None:
        steps = len(other.steps)
        found.first = Difference(steps + 1, "number of steps", "", math.inf, 0.0, _count(reference, other))
    return found


def _count(reference: Recording, other: Recording) -> str:
    return f"it took {len(other.steps)} steps, one device {len(reference.steps)}"


def _step(reference: Recording, mine: Step, theirs: Step, tolerance: Tolerance, errors: Errors) -> Iterator[Difference]:
    """The differences of a step in the order of cause: samples, losses, gradients, norm, weights, optimizer."""
    number = mine.number
    if why := theirs.torn_ids() or loss_cause(mine, theirs, ids=True):
        yield Difference(number, "sample ids", "", math.inf, 0.0, why)
    for key in ("loss", "grad_norm"):
        errors[number, key] = relative(mine.first[key], theirs.first[key])
    micro_error = max((relative(a.loss, b.loss) for a, b in zip(mine.micros, theirs.micros, strict=False)), default=0.0)
    limit = tolerance.of(number, "loss")
    if (error := max(errors[number, "loss"], micro_error)) > limit:
        yield Difference(number, "loss", "", error, limit, loss_cause(mine, theirs, ids=False, limit=limit) or "")
    if mine.first["applied"] != theirs.first["applied"]:
        why = f"the step was {'applied' if theirs.first['applied'] else 'skipped'}, on one device it was not so"
        yield Difference(number, "loss", "", math.inf, 0.0, f"{why} ({mine.first['reason'] or theirs.first['reason']})")
    if relative(mine.first["lr"], theirs.first["lr"]) > FP64:
        why = f"it is {theirs.first['lr']:.6g}, on one device {mine.first['lr']:.6g}"
        yield Difference(number, "learning rate", "", relative(mine.first["lr"], theirs.first["lr"]), FP64, why)
    for kind in KINDS:
        yield from _tensors(reference, mine, theirs, kind, tolerance, errors)
        norm = errors[number, "grad_norm"]
        if kind == "gradient" and norm > tolerance.of(number, "grad_norm"):
            pair = mine.first["grad_norm"], theirs.first["grad_norm"]
            why = f"it is {pair[1]:.6g}, on one device {pair[0]:.6g}: gradients are left out of it or counted twice"
            yield Difference(number, "gradient norm", "", norm, tolerance.of(number, "grad_norm"), why)


def _tensors(
    reference: Recording, mine: Step, theirs: Step, kind: str, tolerance: Tolerance, errors: Errors
) -> Iterator[Difference]:
    """The tensors of a kind that differ, in the model's order; the first one's cause is worked out."""
    order = {name: place for place, name in enumerate(reference.modules)}
    both = {name for name in [*mine.names, *theirs.names] if name.startswith(f"{kind}/")}
    names = sorted(both, key=lambda name: (_key(name), order.get(_own(name), len(order)), name))
    sizes = _sizes(mine, names)
    found: list[Found] = []
    for name in names:
        if name not in theirs.names or name not in mine.names:
            where = "under the layout" if name not in theirs.names else "on one device"
            found.append(Found(name, math.inf, f"there is none {where}"))
            continue
        whole = mine.copies(name)[0].value
        scale = max(sizes[name], FLOOR * max(sizes[n] for n in sizes if _key(n) == _key(name))) or 1.0
        copies = theirs.copies(name)
        error = _error(whole, copies, scale)
        errors[mine.number, name] = error
        limit = tolerance.of(mine.number, name)
        if error > limit:
            found.append(cause(name, whole, copies, (error, scale, limit), theirs))
    if not found:
        return
    telling = [name for name in names if sizes.get(name, 0.0) > FLOOR * max(sizes.values())]
    why = common_cause(found, telling, mine, theirs) if kind == "gradient" else None
    if why is None and kind == "gradient" and not found[0].telling and (hint := nearest_cause(found)):
        why = f"{found[0].why}; {hint}"
    for number, one in enumerate(found):
        yield Difference(
            mine.number, _what(one.name), _module(reference, one.name), one.error,
            tolerance.of(mine.number, one.name), (why or one.why) if number == 0 else one.why,
        )  # fmt: skip


def _sizes(step: Step, names: list[str]) -> dict[str, float]:
    return {name: _largest(step.copies(name)[0].value) for name in names if name in step.names}


def _largest(value: np.ndarray) -> float:
    return float(np.abs(value.astype(np.float64)).max()) if value.size else 0.0


def _error(whole: np.ndarray, copies: list[Copy], scale: float) -> float:
    """The largest difference of any rank's region over ``scale``; infinite where the shape differs or a part lacks."""
    covered = np.zeros(whole.shape, dtype=bool)
    worst = 0.0
    for copy in copies:
        if copy.shape != whole.shape:
            return math.inf
        covered[copy.place] = True
        worst = max(worst, largest_difference(whole[copy.place], copy.value))
    return worst / scale if covered.all() else math.inf


def relative(a: float, b: float) -> float:
    """|a - b| / |a|."""
    away = largest_difference(np.array(a), np.array(b))
    return away / abs(a) if away and a and math.isfinite(a) else away


def _own(name: str) -> str:
    """The model's own name of what a recorded tensor belongs to."""
    return name.split("/", 2)[2] if name.startswith("optimizer/") else name.split("/", 1)[1]


def _key(name: str) -> str:
    """What tensors are measured together: gradients, weights, one key of the optimizer."""
    return name[: -len(_own(name))]


def _what(name: str) -> str:
    kind, own = _key(name).rstrip("/"), _own(name)
    return f"{kind.replace('optimizer/', 'optimizer state ')} of {own!r}"


def _module(reference: Recording, name: str) -> str:
    own = _own(name)
    return f"module {own.rpartition('.')[0] or '(the model)'!r} ({reference.modules.get(own, '?')})"
