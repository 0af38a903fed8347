"""Seconds of a collective from latency and bandwidth, and which links an axis of the mesh spans.

Ring: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md (S bytes, n ranks: all-gather and
reduce-scatter (n-1)/n S, all-reduce twice that); double binary tree: log2(n) hops each way,
https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shoal.cluster.facts import Cluster, Fit, Link
from shoal.core.errors import ConfigError
from shoal.plan.mesh import AXES, Mesh

#: Times (n-1)/n of the buffer that a ring sends.
_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}


def seconds(collective: str, ranks: int, nbytes: float, link: Link) -> float:
    """Seconds of one collective on a buffer of ``nbytes`` (whole, as every rank sees it) among ``ranks``."""
    if ranks <= 1:
        return 0.0
    fit = _nearest(collective, ranks, link)
    if fit is not None:
        return _carried(fit, ranks, nbytes)
    rate = link.bytes_per_s * link.share
    if collective in ("p2p", "broadcast"):
        hops = 1 if collective == "p2p" else math.ceil(math.log2(ranks))
        return link.base_s + hops * link.latency_s + nbytes / rate
    if collective == "all_to_all":  # no ring: every pair sends at once
        return link.base_s + link.latency_s + (1 - 1 / ranks) * nbytes / rate
    rounds = _ROUNDS[collective]
    ring = link.base_s + rounds * (ranks - 1) * (link.latency_s + nbytes / ranks / rate)
    if collective != "all_reduce":
        return ring
    tree = link.base_s + 2 * math.ceil(math.log2(ranks)) * link.latency_s + 2 * nbytes / rate
    return min(ring, tree)


def sent_bytes(collective: str, ranks: int, nbytes: float) -> float:
    """Bytes that each of ``ranks`` sends in a ring, of a collective on a buffer of ``nbytes``."""
    return _ROUNDS[collective] * (ranks - 1) / ranks * nbytes


def _nearest(collective: str, ranks: int, link: Link) -> Fit | None:
    """What was measured in the nearest group size."""
    known = [fit for fit in link.fits if fit.collective == collective]
    return min(known, key=lambda fit: (abs(math.log(fit.ranks / ranks)), fit.ranks), default=None)


def _carried(fit: Fit, ranks: int, nbytes: float) -> float:
    """Seconds of what was measured, carried over to ``ranks`` by the ring's steps and volume."""
    if fit.ranks == ranks or fit.collective in ("p2p", "broadcast"):
        return fit.seconds(nbytes)
    steps = (ranks - 1) / (fit.ranks - 1)
    return fit.seconds(nbytes * steps * fit.ranks / ranks) + (steps - 1) * fit.seconds(0)


class Span(NamedTuple):
    """A group's place: ``inside`` ranks in each of ``across`` nodes."""

    inside: int
    across: int
    near: Link | None
    far: Link | None

    @property
    def ranks(self) -> int:
        """Of the whole group."""
        return self.inside * self.across

    def seconds(self, collective: str, nbytes: float, copies: int = 1) -> float:
        """Seconds of one collective in the group.

        Where it spans both levels, one ring or tree goes through all ranks: a piece passes one hop from each node to
        the next and the others inside nodes, as NCCL's own tuning counts
        (https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc), and the slower of a device's own link and its
        node's cards (one part of them for each device) sets the rate. In an all-to-all a row for ``copies`` places
        goes once to each node and once to each rank, as DeepEP sends (https://github.com/deepseek-ai/DeepEP), and is
        handed on there.
        """
        if self.ranks == 1:
            return 0.0
        if collective == "all_to_all" and self.across == 1:
            nbytes *= places(self.ranks, copies) / copies
        if self.across == 1:
            return seconds(collective, self.inside, nbytes, _needed(self.near, "inside"))
        far = _needed(self.far, "between")
        if self.inside == 1 or collective == "p2p":
            return seconds(collective, self.ranks, nbytes, far)
        if whole := _world(collective, self.ranks, far):
            return whole.seconds(nbytes)
        near, wide = _needed(self.near, "inside"), far.bytes_per_s * far.share
        if collective == "all_to_all":
            away = nbytes / copies * places(self.across, copies) * (1 - 1 / self.across)
            within = nbytes / copies * places(self.ranks, copies)
            inside = seconds(collective, self.inside, within, near)
            return max(far.base_s + (self.across - 1) * far.latency_s + away / wide, inside)
        rate = min(near.bytes_per_s * near.share, self.inside * wide)
        around = self.across * far.latency_s + (self.ranks - 1 - self.across) * near.latency_s
        ring = _ROUNDS[collective] * (around + nbytes * (1 - 1 / self.ranks) / rate)
        if collective != "all_reduce":
            return far.base_s + ring
        hops = 2 * (math.ceil(math.log2(self.across)) * far.latency_s + (self.inside - 1) * near.latency_s)
        return far.base_s + min(ring, hops + 2 * nbytes / rate)


def bucketed(where: Span, collective: str, nbytes: float, bucket: float) -> float:
    """Seconds of reducing or gathering ``nbytes`` in equal calls of about ``bucket`` bytes each; of nothing, none."""
    if not nbytes:
        return 0.0
    calls = max(1, round(nbytes / bucket)) if bucket else 1
    return calls * where.seconds(collective, nbytes / calls)


def exposed(sending: float, computing: float, slowdown: float, tail: float = 0.0, overlaps: bool = True) -> float:
    """Seconds that a collective of ``sending`` seconds adds beside ``computing``: what is longer, the ``tail`` that
    only starts when all is computed, and what computing loses while both run (factor ``slowdown``)."""
    if not overlaps:
        return sending
    hidden = min(max(0.0, sending - tail), computing)
    return sending - hidden + hidden * (slowdown - 1)


def places(count: int, copies: int) -> float:
    """How many of ``count`` places ``copies`` rows sent at random reach: count (1 - (1 - 1 / count)^copies)."""
    return count * (1 - (1 - 1 / count) ** copies)


def _world(collective: str, ranks: int, far: Link) -> Fit | None:
    """The fit of all ranks of several nodes as one group, where it was measured and ``ranks`` are all."""
    if not far.fits or max(fit.ranks for fit in far.fits) != ranks:
        return None
    return next((fit for fit in far.fits if (fit.collective, fit.ranks) == (collective, ranks)), None)


def _needed(link: Link | None, where: str) -> Link:
    if link is None:
        raise ConfigError(
            f"the cluster names no link {where} nodes, and a group of the mesh needs one; add [{where}] to the cluster"
        )
    return link


def over(cluster: Cluster, axis: str, mesh: Mesh, degree: int | None = None) -> Span:
    """Which links the groups of ``axis`` span; ranks are counted along tensor first. ``degree``: in place of the
    mesh's, for groups within an axis (experts, within the data ranks)."""
    position = AXES.index(axis)
    stride = math.prod(mesh.degrees[name] for name in AXES[position + 1 :])
    ranks = mesh.degrees[axis] if degree is None else degree
    return span(cluster, stride, ranks)


def span(cluster: Cluster, stride: int, ranks: int) -> Span:
    """A group of ``ranks``, ``stride`` ranks from one to the next."""
    inside = max(1, min(ranks, cluster.devices_per_node // stride))
    across = math.ceil(ranks / inside)
    return Span(inside, across, cluster.inside, cluster.between)
