"""A cluster as text that a person reads: one page."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.cluster.facts import Cluster, Device, Link
from shoal.cluster.fit import line_error

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def page(cluster: Cluster) -> str:
    """Device, links and disk, with the error of each fit on the points that it was fitted to."""
    return "\n".join(_lines(cluster))


def quantity(value: float, unit: str) -> str:
    """Three digits and a prefix: ``quantity(2.5e9, "B/s")`` is ``2.5 GB/s``."""
    size, prefix = next((step for step in _STEPS if value >= step[0]), _STEPS[-1])
    return f"{value / size:.3g} {prefix}{unit}"


def duration(seconds: float) -> str:
    """Three digits in s, ms or us."""
    size, unit = next((step for step in ((1.0, "s"), (1e-3, "ms")) if seconds >= step[0]), (1e-6, "us"))
    return f"{seconds / size:.3g} {unit}"


def _lines(cluster: Cluster) -> Iterator[str]:
    yield f"{cluster.name}: {cluster.nodes} node(s) of {cluster.devices_per_node} device(s)"
    yield from _device(cluster.device)
    for name in ("inside", "between"):
        link = getattr(cluster, name)
        if link is not None:
            yield from _link(name, link)
    if cluster.disk_bytes_per_s is not None:
        yield f"disk        {quantity(cluster.disk_bytes_per_s, 'B/s')} a node, written and synced"
    for part in ("device", "inside", "between"):
        if part in cluster.sources:
            yield f"{part}: {cluster.sources[part]}"


def _device(device: Device) -> Iterator[str]:
    yield f"memory      {quantity(device.memory_bytes, 'B')} a device, {quantity(device.reserved_bytes, 'B')} taken"
    rates = ", ".join(f"{name} {quantity(rate, 'FLOP/s')}" for name, rate in device.flops_per_s.items())
    yield (
        f"products    {rates}; {device.matmul_share:.0%} reached by large ones, half by length "
        f"{device.matmul_half:.0f}; attention {device.attention_share:.0%}"
    )
    yield (
        f"bandwidth   {quantity(device.memory_bytes_per_s, 'B/s')}, {device.memory_share:.0%} reached; to the host "
        f"{quantity(device.host_bytes_per_s, 'B/s')}"
    )
    if device.optimizer_bytes_per_s is not None:
        yield f"optimizer   fused AdamW moves {quantity(device.optimizer_bytes_per_s, 'B/s')}"
    yield f"launch      {duration(device.launch_s)}; products beside a collective take {device.overlap_slowdown:.2f} x"


def _link(name: str, link: Link) -> Iterator[str]:
    rate = quantity(link.bytes_per_s * link.share, "B/s")
    yield f"{name:<11} {link.name}: {rate} a device, {duration(link.latency_s)} a hop"
    if link.fits:
        yield f"  {'collective':<16}{'ranks':>6}{'latency':>12}{'rate':>14}{'error of fit':>15}"
    for fit in link.fits:
        error = f"{line_error(fit.points, fit.latency_s, fit.bytes_per_s):.0%}" if fit.points else ""
        rate = quantity(fit.bytes_per_s, "B/s")
        yield f"  {fit.collective:<16}{fit.ranks:>6}{duration(fit.latency_s):>12}{rate:>14}{error:>15}"
