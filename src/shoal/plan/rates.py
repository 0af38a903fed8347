"""What a device reaches on an operation: from its measured operations where it has them, else from its constants."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from shoal.cluster.facts import Device, Product
from shoal.plan.profile import Op

#: Measured products that one is interpolated between.
NEIGHBOURS = 4


def product_flops_per_s(device: Device, precision: str, m: float, k: float, n: float) -> float:
    """Rate of an (m, k) x (k, n) product.

    Measured products of the precision: the mean of the logarithms of the nearest rates, weighted by the squared inverse
    of their distance in (log m, log k, log n). Else the peak's share, and of it size / (size + half) of each size.
    Rows and columns lose by tiles and waves that are not full, whatever the precision; along k a tile's start and its
    result's way out take the same time at any rate, so that k's half grows with the precision's peak over bf16's.
    """
    measured = [one for one in device.products if one.precision == precision]
    if measured:
        return _between(measured, m, k, n)
    peak = device.flops_per_s[precision]
    half = device.matmul_half
    long = half * max(1.0, peak / device.flops_per_s.get("bf16", peak))
    reached = math.prod(size / (size + lost) for size, lost in ((m, half), (k, long), (n, half)) if size + lost)
    return peak * device.matmul_share * reached


def attention_flops_per_s(device: Device, precision: str, m: float, k: float, n: float, causal: bool = False) -> float:
    """Rate of attention of m queries of all heads, k wide, over n keys, counted in full: as of products, of measured
    ones that look back alone or do not, as it does; else the peak's share, twice where kernels leave out the half that
    a causal mask hides."""
    measured = [one for one in device.attentions if one.precision == precision]
    alike = [one for one in measured if one.causal == causal] or measured
    if alike:
        return _between(alike, m, k, n)
    skips = causal and device.kernels == "cuda-flash"
    return device.flops_per_s[precision] * device.attention_share * (2 if skips else 1)


def _between(measured: Sequence[Product], m: float, k: float, n: float) -> float:
    near = sorted((_distance(one.m, one.k, one.n, m, k, n), one.flops_per_s) for one in measured)[:NEIGHBOURS]
    weights = [1 / (squared + 1e-6) for squared, _ in near]
    logs = sum(weight * math.log(rate) for weight, (_, rate) in zip(weights, near, strict=True))
    return math.exp(logs / sum(weights))


def _distance(m0: float, k0: float, n0: float, m: float, k: float, n: float) -> float:
    pairs = ((m0, m), (k0, k), (n0, n))
    return sum(math.log(known / max(1.0, asked)) ** 2 for known, asked in pairs)


def stream_seconds(device: Device, nbytes: float) -> float:
    """Seconds to read and write ``nbytes`` in all: between measured sizes in proportion, beyond at the last rate."""
    if nbytes <= 0:
        return 0.0
    streams = sorted(device.streams, key=lambda one: one.bytes)
    if not streams:
        return nbytes / (device.memory_bytes_per_s * device.memory_share)
    place = bisect_left([one.bytes for one in streams], nbytes)
    if place == len(streams):
        return streams[-1].seconds * nbytes / streams[-1].bytes
    if place == 0:
        return streams[0].seconds * nbytes / streams[0].bytes
    below, above = streams[place - 1], streams[place]
    part = (nbytes - below.bytes) / (above.bytes - below.bytes)
    return below.seconds + part * (above.seconds - below.seconds)


def op_seconds(op: Op, micro_batch: float, device: Device, precision: str) -> tuple[float, float]:
    """Seconds of an operation's forward and backward for ``micro_batch`` samples: the longer of arithmetic and memory
    traffic (roofline, Williams et al. 2009, https://doi.org/10.1145/1498765.1498785)."""
    moved_s = stream_seconds(device, op.moved_bytes * micro_batch + op.fixed_bytes)
    back_s = moved_s * op.backward
    if op.back_moved_bytes is not None:
        back_s = stream_seconds(device, op.back_moved_bytes * micro_batch + op.back_fixed_bytes)
    if op.kind == "memory":
        return _measured(op, micro_batch, device) or (moved_s, back_s)
    m = op.m * micro_batch
    if op.kind == "matmul":
        rate = product_flops_per_s(device, precision, m, op.k, op.n)
    else:
        rate = attention_flops_per_s(device, precision, m, op.k, op.n, op.causal)
    arithmetic_s = op.flops * micro_batch / rate
    return max(arithmetic_s, moved_s), max(arithmetic_s * op.backward, back_s)


def _measured(op: Op, micro_batch: float, device: Device) -> tuple[float, float] | None:
    """Forward and backward of the measured function of that name, where there is one, in proportion to what it takes
    and gives; a function whose gradient nobody needs has no backward."""
    function = next((one for one in device.functions if one.name == op.name), None)
    if function is None:
        return None
    calls = (op.moved_bytes if op.call_bytes is None else op.call_bytes) * micro_batch / function.bytes
    return calls * function.forward_s, calls * function.backward_s * bool(op.backward)
