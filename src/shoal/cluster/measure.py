"""Measures the machines of the process group that is there. Of ``cluster`` only this, bench.py and
operations.py import torch.

Compute and memory are measured with every rank busy, since ranks of one machine share its memory, caches and power.
A collective is measured in all groups of its size at once, as a training step runs it.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.cluster import machine
from shoal.cluster.bench import LINKS, SMALL, STREAMS, Bench, Tell
from shoal.cluster.facts import Cluster, Device, Stream
from shoal.cluster.fit import half_and_rates
from shoal.cluster.grid import Grid
from shoal.core.errors import ConfigError


def measure(place: torch.device, local_rank: int, grid: Grid, folder: str | Path, tell: Tell) -> Cluster:
    """The cluster of the world's machines; the same value on every rank. Collective.

    ``local_rank``: this rank's number on its machine. ``folder``: on the disk that checkpoints go to. ``tell`` gets the
    part done, 0 to 1, and what is next, on every rank. Raises ConfigError: uneven machines, a folder that takes no
    file.
    """
    per_node, nodes = _machines(local_rank)
    bench = Bench(place, grid, tell, local_rank, per_node)
    reserved = machine.resident_bytes()
    device = _device(bench)
    part = LINKS / max(1, (per_node > 1) + (nodes > 1))
    inside = bench.link("inside", range(2, per_node + 1), 1, part) if per_node > 1 else None
    between = bench.link("between", range(2, nodes + 1), per_node, part) if nodes > 1 else None
    widest = between or inside
    if widest is not None:
        device["overlap_slowdown"] = bench.overlap(widest)
    memory = machine.memory_bytes() // per_node
    if place.type == "cuda":
        memory, reserved = _gpu_memory(place)
    disk = bench.disk(Path(folder), per_node)
    how = _how(place, per_node, nodes)
    device |= {"memory_bytes": int(bench.smallest(memory)), "reserved_bytes": int(bench.largest(reserved))}
    values: dict[str, Any] = {
        "name": f"measured: {nodes} x {per_node} {device['name']}",
        "device": Device(**device),
        "devices_per_node": per_node,
        "nodes": nodes,
        "inside": inside,
        "between": between,
        "disk_bytes_per_s": disk,
        "sources": dict.fromkeys(("device", "inside", "between", "disk_bytes_per_s"), how),
    }
    values["sources"] = {part: how for part in ("device", "inside", "between", "disk_bytes_per_s") if values[part]}
    tell(1.0, "done")
    made = Cluster(**values)
    made.check("measured")
    return made


def _device(bench: Bench) -> dict[str, Any]:
    """All of a device but its memory and what a collective beside it costs."""
    grid, place = bench.grid, bench.place
    bench.crowd(bench.next(SMALL, "turns on a core"))
    launch = bench.launch(bench.next(SMALL, "launches"))
    streams = []
    for nbytes in grid.stream_bytes:
        budget_s = bench.next(STREAMS / len(grid.stream_bytes), f"memory, {nbytes / 2**20:.2g} MiB")
        streams.append(Stream(bytes=nbytes, seconds=bench.stream(nbytes, budget_s, fresh=True)))
    whole = grid.stream_bytes[-1]
    bandwidth = whole / bench.stream(whole, bench.next(SMALL, "memory, in place"), fresh=False)
    products = bench.products()
    half, rates, _ = half_and_rates(products, 5 * launch)
    peaks = {
        name: max(rate, max(p.flops_per_s for p in products if p.precision == name)) for name, rate in rates.items()
    }
    main = grid.main_precision
    attentions = bench.attentions(main)
    optimizer = bench.optimizer(bench.next(SMALL, "optimizer"))
    return {
        "name": torch.cuda.get_device_name(place) if place.type == "cuda" else machine.processor(),
        "kernels": "cuda-flash" if place.type == "cuda" else "cpu",
        "flops_per_s": peaks,
        "matmul_share": min(1.0, rates[main] / peaks[main]),
        "matmul_half": half,
        "attention_share": min(1.0, max(one.flops_per_s for one in attentions if not one.causal) / peaks[main]),
        "memory_bytes_per_s": bandwidth,
        "memory_share": min(1.0, whole / streams[-1].seconds / bandwidth),
        "launch_s": launch,
        "host_bytes_per_s": bench.host(whole, bench.next(SMALL, "copies to the host")),
        "optimizer_bytes_per_s": optimizer,
        "sharing": bench.sharing(bench.next(SMALL, "products alone")) if place.type == "cpu" else 1.0,
        "products": products,
        "attentions": attentions,
        "functions": bench.functions(),
        "streams": tuple(streams),
    }


def _machines(local_rank: int) -> tuple[int, int]:
    """Ranks on each machine, and machines. Collective. Raises ConfigError where machines differ."""
    world = dist.get_world_size()
    found = torch.zeros(world, dtype=torch.int64)
    found[dist.get_rank()] = local_rank
    dist.all_reduce(found)
    counts = machine.counts(found.tolist())
    if len(set(counts)) != 1:
        raise ConfigError(f"the machines have {', '.join(map(str, counts))} ranks; start equally many on each")
    return counts[0], len(counts)


def _gpu_memory(place: torch.device) -> tuple[int, int]:
    """A GPU's bytes, and what context and communicators hold of them."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(place)
    return total, max(0, total - free - torch.cuda.memory_reserved(place))


def _how(place: torch.device, per_node: int, nodes: int) -> str:
    threads = "" if place.type == "cuda" else f" of {torch.get_num_threads()} thread(s)"
    world = f"{nodes} x {per_node} workers{threads}"
    return f"shoal measure, {date.today()}: {world}, {dist.get_backend()}, torch {torch.__version__}"
