"""What a device reaches on an operation: from its measured operations where it has them, else from its constants."""

from __future__ import annotations

import math
from bisect import bisect_left

from shoal.cluster.facts import Device, Product
from shoal.plan.profile import Op

#: Measured products that one is interpolated between.
NEIGHBOURS = 4
#: Of a wave of tiles, what is lost at the end of a product: half of one where the last wave is as often nearly full as
#: nearly empty, and half of that where libraries take smaller tiles for it. 0.25 fits MPT's steps on A100 and H100 best
#: of 0.25, 0.5 and 1.
LOST_WAVES = 0.25


def product_flops_per_s(device: Device, precision: str, m: float, k: float, n: float) -> float:
    """Rate of an (m, k) x (k, n) product.

    Measured products of the precision: the mean of the logarithms of the nearest rates, weighted by the squared inverse
    of their distance in (log m, log k, log n). Else the peak's share, and of it k / (k + half): a tile's start and its
    result's way out take the same time at any rate, so that the half grows with the precision's peak over bf16's.
    Rows and columns together lose by a last wave of tiles that is not full
    (https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/); where a wave's size is not
    known, each by the same half.
    """
    measured = [one for one in device.products if one.precision == precision]
    if measured:
        return _between(measured, m, k, n)
    peak = device.flops_per_s[precision]
    half = device.matmul_half
    long = half * max(1.0, peak / device.flops_per_s.get("bf16", peak))
    parts = ((m * n, LOST_WAVES * device.matmul_wave),) if device.matmul_wave else ((m, half), (n, half))
    return (
        peak
        * device.matmul_share
        * math.prod(size / (size + lost) for size, lost in ((k, long), *parts) if size + lost)
    )


def attention_flops_per_s(device: Device, precision: str, m: float, k: float, n: float) -> float:
    """Rate of attention of m queries of all heads, k wide, over n keys, counted in full: as of products, else the
    peak's share."""
    measured = [one for one in device.attentions if one.precision == precision]
    return _between(measured, m, k, n) if measured else device.flops_per_s[precision] * device.attention_share


def _between(measured: list[Product], m: float, k: float, n: float) -> float:
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
    moved = stream_seconds(device, op.moved_bytes * micro_batch + op.fixed_bytes)
    if op.joins:
        return 0.0, moved * op.backward
    if op.kind == "memory":
        return _elementwise(op, moved, micro_batch, device)
    if op.kind == "matmul":
        rate = product_flops_per_s(device, precision, op.m * micro_batch, op.k, op.n)
    else:
        rate = attention_flops_per_s(device, precision, op.m * micro_batch, op.k, op.n)
    longest = max(op.flops * micro_batch / rate, moved)
    return longest, longest * op.backward


def _elementwise(op: Op, moved_s: float, micro_batch: float, device: Device) -> tuple[float, float]:
    """Forward and backward at the rates of the measured function of that name, where there is one; a function whose
    gradient nobody needs has none."""
    measured = next((one for one in device.functions if one.name == op.name), None)
    if measured is None:
        return moved_s, moved_s * op.backward
    calls = op.moved_bytes * micro_batch / measured.bytes
    return calls * measured.forward_s, calls * measured.backward_s * bool(op.backward)
