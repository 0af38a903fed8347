"""Why something differs: what the ratio of two tensors, the ranks' copies and the samples tell."""

from __future__ import annotations

import math
from itertools import groupby
from typing import NamedTuple

import numpy as np

from shoal.verify.recording import Copy, Step

LOOSE = 1e-6  # two ratios are the same within this


class Found(NamedTuple):
    """A tensor that differs. ``ratio``: what all its elements are of the reference, where it is one number.
    ``telling``: ``why`` names a cause, not only how it differs."""

    name: str
    error: float
    why: str
    ratio: float | None = None
    telling: bool = True


def cause(
    name: str, whole: np.ndarray, copies: list[Copy], measured: tuple[float, float, float], theirs: Step
) -> Found:
    """Why ``copies`` of the layout's step ``theirs`` are not ``whole``; ``measured``: error, scale, tolerance."""
    error, scale, limit = measured
    degrees = degrees_of(theirs)
    if copies[0].shape != whole.shape:
        return Found(name, error, f"it has shape {list(copies[0].shape)}, on one device {list(whole.shape)}")
    a = whole.astype(np.float64)
    near = min(0.1, max(LOOSE, 10 * limit))
    why, telling = _torn(a, copies, scale * near, theirs)
    if why:
        return Found(name, error, why, telling=telling)
    b, there = np.zeros_like(a), np.zeros(a.shape, dtype=bool)
    for copy in copies:
        b[copy.place], there[copy.place] = copy.value, True
    if not there.all():
        return Found(name, error, f"missing region: no rank holds {_box(~there)}")
    if not np.isfinite(b).all():
        return Found(name, error, f"{int((~np.isfinite(b)).sum())} of {b.size} elements are not finite")
    ratio = _ratio(a, b, scale * near)
    if ratio is not None:
        return Found(name, error, f"every element is {_ratio_text(ratio, degrees, near)}", ratio)
    return Found(name, error, _part(a, b, scale * limit, degrees), telling=False)


def _torn(a: np.ndarray, copies: list[Copy], near: float, theirs: Step) -> tuple[str, bool]:
    """Why ranks that hold the same region hold different values, and whether that is a cause; empty if they do not."""
    key = lambda copy: (copy.offsets, copy.value.shape)  # noqa: E731
    for _, group in groupby(sorted(copies, key=key), key=key):
        same = list(group)
        distinct: list[Copy] = []
        for copy in same:
            if all(largest_difference(copy.value, known.value) > near / 10 for known in distinct):
                distinct.append(copy)
        if len(distinct) == 1:
            continue
        wanted, ranks = a[same[0].place], ", ".join(str(copy.rank) for copy in distinct)
        right = [str(copy.rank) for copy in distinct if largest_difference(copy.value, wanted) <= near]
        if right:
            return f"ranks {ranks} hold different values, and rank {right[0]} holds the right one", True
        total = np.sum([copy.value.astype(np.float64) for copy in distinct], axis=0)
        if (_ratio(wanted, total, near) or 0.0) > near:
            places = [theirs.ranks[copy.rank]["at"] for copy in distinct]
            axes = " and ".join(axis for axis in places[0] if len({at[axis] for at in places}) > 1)
            return (
                f"not reduced: ranks {ranks} hold their own shares, whose sum is right; a sum over {axes or 'them'} "
                "is missing"
            ), True
        return f"ranks {ranks} hold different values: they were not updated alike", False
    return "", False


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """max|a - b|; what is not finite in both alike does not count, in one alone is infinitely far."""
    if not a.size:
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        away = np.where(same, 0.0, np.abs(a - b))
    return float(np.where(np.isnan(away), math.inf, away).max())


def _ratio(a: np.ndarray, b: np.ndarray, near: float) -> float | None:
    """The number r with b = r a, if there is one."""
    square = float((a * a).sum())
    if not square or not np.isfinite(b).all():
        return None
    ratio = float((a * b).sum()) / square
    return ratio if largest_difference(ratio * a, b) <= near * max(1.0, abs(ratio)) else None


def _ratio_text(ratio: float, degrees: dict[str, int], near: float = LOOSE) -> str:
    """What a ratio tells, e.g. ``2 x one device's: summed 2 times (replicate has 2 ranks)``."""
    if abs(ratio) < LOOSE:
        return "0: it was never worked out, or not handed on"
    if ratio < 0:
        return f"{ratio:.6g} x one device's: a sign is wrong"
    times = round(ratio) if ratio > 1 else round(1 / ratio)
    if times < 2 or abs((ratio if ratio > 1 else 1 / ratio) / times - 1) > min(0.05, 10 * near):
        return f"{ratio:.6g} x one device's: a factor of its own"
    ways = [f"{axis} has {degree} ranks" for axis, degree in degrees.items() if degree == times]
    where = f" ({', '.join(ways)})" if ways else ""
    if ratio > 1:
        return f"{times} x one device's: summed {times} times{where}"
    return f"1/{times} of one device's: divided by {times}, or one of {times} equal shares{where}"


def _part(a: np.ndarray, b: np.ndarray, near: float, degrees: dict[str, int]) -> str:
    """Which elements differ, and whether those have a ratio."""
    wrong = np.abs(a - b) > near
    share = wrong.mean()
    if share > 0.9:
        return f"{share:.0%} of the elements differ, in no simple ratio: another value was worked out"
    ratio = _ratio(a[wrong], b[wrong], LOOSE * float(np.abs(a).max()))
    inside = f", which are {_ratio_text(ratio, degrees)}" if ratio is not None else ""
    return f"only part of the elements differ: {int(wrong.sum())} of {a.size}, within {_box(wrong)}{inside}"


def _box(wrong: np.ndarray) -> str:
    """The smallest box around what is true, as slices."""
    places = np.nonzero(wrong)
    return "[" + ", ".join(f"{int(place.min())}:{int(place.max()) + 1}" for place in places) + "]"


def nearest_cause(found: list[Found]) -> str | None:
    """What the last gradient with a cause tells: backward comes from the end, so that a fault shows there first and in
    what lies before it only as other values. None where there is none."""
    last = next((one for one in reversed(found) if one.telling), None)
    return (
        None if last is None else f"nearest to where backward goes wrong, {last.name.partition('/')[2]!r}: {last.why}"
    )


def common_cause(found: list[Found], names: list[str], mine: Step, theirs: Step) -> str | None:
    """What one ratio over all gradients tells; None where there is no such. ``names``: those well above zero."""
    ratios = [one.ratio for one in found if one.ratio is not None]
    if len(names) < 2 or len(ratios) < len(names) or max(ratios) - min(ratios) > LOOSE * 10 * abs(ratios[0]):
        return None
    ratio = ratios[0]
    norm, loss = (theirs.first[key] / (mine.first[key] or 1.0) for key in ("grad_norm", "loss"))
    if not math.isclose(norm, ratio, rel_tol=LOOSE * 10):
        return (
            f"wrong divisor: every gradient is {ratio:.6g} x one device's, their norm as reported {norm:.6g} x; the "
            "factor that the optimizer takes them with is another one"
        )
    if math.isclose(loss, ratio, rel_tol=LOOSE * 10):
        return f"wrong divisor: the loss, every gradient and their norm are {ratio:.6g} x one device's"
    return f"every gradient is {_ratio_text(ratio, degrees_of(theirs))}"


def degrees_of(step: Step) -> dict[str, int]:
    """How many places each axis has."""
    axes: dict[str, int] = {}
    for told in step.ranks.values():
        for axis, place in told["at"].items():
            axes[axis] = max(axes.get(axis, 1), place + 1)
    return axes


def loss_cause(mine: Step, theirs: Step, ids: bool, limit: float = 0.0) -> str | None:
    """What differs in the samples of a step's micro-batches (``ids``), or in their losses; None where nothing does."""
    wanted = [sorted(micro.ids) for micro in mine.micros if micro.ids]
    given = [sorted(micro.ids) for micro in theirs.micros if micro.ids]
    if ids:
        if wanted == given:
            return None
        if sorted(wanted) == sorted(given):
            moved = next(number for number, pair in enumerate(zip(wanted, given, strict=True)) if pair[0] != pair[1])
            there = wanted.index(given[moved])
            return f"swapped micro-batches: number {moved} of the layout is number {there} of one device"
        if sorted(sum(wanted, [])) == sorted(sum(given, [])):
            return f"swapped micro-batches: they are made up of {given}, on one device of {wanted}"
        return f"other samples were read: {given} where one device reads {wanted}"
    losses = [micro.loss for micro in mine.micros if micro.ids]
    others = [micro.loss for micro in theirs.micros if micro.ids]
    counts = [micro.count for micro in mine.micros], [micro.count for micro in theirs.micros]
    if sum(counts[0]) != sum(counts[1]):
        return f"the counts differ: {sum(counts[1]):g} items, on one device {sum(counts[0]):g}"
    near = max(LOOSE, 10 * limit)
    if len(losses) == len(others) and np.allclose(losses, others, rtol=near):
        pair = theirs.first["loss"], mine.first["loss"]
        return (
            f"wrong divisor: each micro-batch's loss is right, the step's is {pair[0]:.6g}, on one device {pair[1]:.6g}"
        )
    if len(losses) > 1 and len(losses) == len(others) and np.allclose(sorted(losses), sorted(others), rtol=near):
        return "swapped micro-batches: their losses are one device's in another order"
    if len(losses) > 1 and math.isclose(sum(losses), sum(others), rel_tol=near):
        return "micro-batches mixed: each one's loss differs, their sum does not"
    start = "the forward computes something else" if mine.number == 1 else "the weights differed before, or the forward"
    return f"{start}: losses of the micro-batches are {_list(others)}, on one device {_list(losses)}"


def _list(values: list[float]) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values[:4])
    return f"[{shown}{', ...' if len(values) > 4 else ''}]"
