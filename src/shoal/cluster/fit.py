"""Lines and shares fitted to measured points. Errors count by ratio, so that microseconds weigh as much as seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from shoal.cluster.facts import Product

#: Lengths tried for ``matmul_half``.
HALVES = (0.0, *(1.25**step for step in range(34)))
_ROUNDS = 100
_OUTLIER = 0.2
_PRIOR = 1e-3
_BEYOND = 1.5  # a fitted rate is at most so many times the best one seen


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency in seconds and bytes per second of time = latency + bytes / rate, fitted to log time.

    ``points``: (bytes, seconds), two or more sizes. Gauss-Newton on the logarithms of both, so that both stay positive;
    a point that is off by more than ``_OUTLIER`` counts by its distance, not by its square (Huber,
    https://doi.org/10.1214/aoms/1177703732). What the points leave open stays near the smallest's time and the
    largest's rate.
    """
    points = sorted(points)
    start = math.log(points[0][1]), math.log(points[-1][0] / points[-1][1])
    found = list(start)
    for _ in range(_ROUNDS):
        latency, rate = math.exp(found[0]), math.exp(found[1])
        a11 = a22 = _PRIOR
        a12, b1, b2 = 0.0, _PRIOR * (start[0] - found[0]), _PRIOR * (start[1] - found[1])
        for nbytes, seconds in points:
            predicted = latency + nbytes / rate
            left = math.log(seconds / predicted)
            weight = min(1.0, _OUTLIER / abs(left)) if left else 1.0
            by_latency, by_rate = latency / predicted, -nbytes / rate / predicted
            a11, a12, a22 = a11 + weight * by_latency**2, a12 + weight * by_latency * by_rate, a22 + weight * by_rate**2
            b1, b2 = b1 + weight * by_latency * left, b2 + weight * by_rate * left
        det = a11 * a22 - a12 * a12
        steps = (b1 * a22 - b2 * a12) / det, (a11 * b2 - a12 * b1) / det
        found = [value + max(-1.0, min(1.0, step)) for value, step in zip(found, steps, strict=True)]
        if max(map(abs, steps)) < 1e-9:
            break
    return math.exp(found[0]), math.exp(found[1])


def line_error(points: Sequence[tuple[float, float]], latency_s: float, bytes_per_s: float) -> float:
    """The median of |predicted / measured - 1|."""
    return median(abs((latency_s + nbytes / bytes_per_s) / seconds - 1) for nbytes, seconds in points)


def reach(product: Product, half: float) -> float:
    """The part of the largest products' rate that a product of this shape reaches."""
    return math.prod(size / (size + half) for size in (product.m, product.k, product.n))


def half_and_rates(products: Sequence[Product], least_s: float) -> tuple[float, dict[str, float], float]:
    """``matmul_half``, the largest products' FLOP/s by precision, and the median error of the times that they give.

    Of each precision only products of ``least_s`` and more count, where there are any: shorter ones are launches.
    """
    long = {product.precision for product in products if product.seconds >= least_s}
    known = [product for product in products if product.seconds >= least_s or product.precision not in long]

    def rates(half: float) -> dict[str, float]:
        found = {}
        for precision in dict.fromkeys(product.precision for product in known):
            mine = [p.flops_per_s / reach(p, half) for p in known if p.precision == precision]
            found[precision] = math.exp(sum(map(math.log, mine)) / len(mine))
        return found

    def errors(half: float) -> list[float]:
        of = rates(half)
        return [abs(math.log(p.flops_per_s / (of[p.precision] * reach(p, half)))) for p in known]

    best = {name: max(p.flops_per_s for p in known if p.precision == name) for name in rates(0.0)}
    near = [one for one in HALVES if all(rate <= _BEYOND * best[name] for name, rate in rates(one).items())]
    half = min(near, key=lambda one: sum(errors(one)))
    return half, rates(half), math.expm1(median(errors(half)))
