"""Times products, memory and collectives, each on this rank while the others of the group do the same."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
import torch.distributed as dist

from shoal.cluster import machine, operations
from shoal.cluster.facts import ATTENTION_BACKWARD, Attention, Collective, Fit, Function, Link, Product
from shoal.cluster.fit import line
from shoal.cluster.grid import Grid
from shoal.core.errors import ConfigError
from shoal.core.heap import keep_freed

#: All of them; point-to-point, the last, is for two.
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Bytes that AdamW reads and writes per float32 parameter: weight, two moments both ways; the gradient one way.
ADAMW_BYTES = 28
#: Parts of the budget: products, element-wise operations by size, functions, each of nine small ones, all links.
PRODUCTS, STREAMS, FUNCTIONS, SMALL, LINKS = 0.2, 0.05, 0.05, 0.03, 0.43
_SAMPLES = 5
_LAP_S = 2e-4  # a lap of many calls is at least so long, if the budget allows
_WORK = 256  # rows and columns of the product before a collective
_CROWDS = 3  # times that a crowd is tried
_LEAST_S = 1e-6  # of a collective

# The names since torch 2.13 and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Tell = Callable[[float, str], None]


class Bench:
    """Times calls on this rank's device while the other ranks do the same. Every method is collective."""

    def __init__(self, place: torch.device, grid: Grid, tell: Tell, number: int = 0, ranks: int = 1) -> None:
        """This is rank ``number`` of ``ranks`` that share the machine's cores."""
        self.place, self.grid, self._tell = place, grid, tell
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self._done, self._turns, self._crowding, self._all_work_s = 0.0, 1, 1.0, 0.0
        if place.type == "cpu":
            keep_freed()  # as a run does
            self._turns = math.ceil(ranks / len(os.sched_getaffinity(0)))
        self._turn = number % self._turns
        self._square = torch.randn(_WORK, _WORK, device=place)

    # -- time

    def crowd(self, budget_s: float) -> None:
        """See what it costs that ranks take turns on cores: how much later all end long work that they begin together
        than as many as there are cores."""
        if self._turns == 1:
            return
        call = self._largest_product()
        once = self._ended(call, 1)
        count = max(1, int(budget_s / (2 * _CROWDS * once)))
        tried = []
        for _ in range(_CROWDS):
            apart = sum(self._ended(call if self._turn == turn else None, count) for turn in range(self._turns))
            tried.append(self._ended(call, count) / (apart / self._turns))
        self._crowding = median(tried)

    def _largest_product(self) -> Callable[[], object]:
        return operations.product(self.place, DTYPES[self.grid.main_precision], self.grid.products[-1])

    def _ended(self, call: Callable[[], object] | None, count: int) -> float:
        """Seconds until the last rank has called so often."""
        self.largest(0.0)  # all begin together
        return self.largest(count * self._lap(call, count) if call else 0.0)

    def computing(self, call: Callable[[], object], budget_s: float) -> float:
        """Of one call, while every rank computes; their mean.

        Of ranks that share a core a short lap has it to itself or not at all. So they go by turns, as many at once as
        there are cores, and what all at once cost is seen apart (``crowd``).
        """
        found = 0.0
        for turn in range(self._turns):
            found += self.seconds(call if turn == self._turn else None, budget_s / self._turns)
            self.largest(0.0)  # the next turn's begin when all of this one have ended
        return self.mean(found) * self._crowding

    def seconds(self, call: Callable[[], object] | None, budget_s: float) -> float:
        """Of one call, on this rank: laps' median, as a step meets it.

        A rank without a call takes part and gets 0.
        """
        act = call or _nothing
        act()
        once = self.largest(self._lap(act, 1))
        count = max(1, min(int(_LAP_S / once), int(budget_s / (_SAMPLES + 1) / once)))
        once = self.largest(self._lap(act, count))
        samples = max(1, min(4 * _SAMPLES, int(budget_s / (once * count))))
        laps = [self._lap(act, count) for _ in range(samples)]
        return (median(laps) if self._turns == 1 else sum(laps) / samples) if call else 0.0

    def _lap(self, call: Callable[[], object], count: int) -> float:
        if self.place.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
            return max(start.elapsed_time(end) / 1e3 / count, 1e-9)
        start_s = time.perf_counter()
        for _ in range(count):
            call()
        return max((time.perf_counter() - start_s) / count, 1e-9)

    def mean(self, value: float) -> float:
        """Over all ranks."""
        return self._reduced(value, dist.ReduceOp.SUM) / self.world

    def largest(self, value: float) -> float:
        """Over all ranks."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def smallest(self, value: float) -> float:
        """Over all ranks."""
        return self._reduced(value, dist.ReduceOp.MIN)

    def _reduced(self, value: float, how: Any) -> float:
        if self.world == 1:
            return value
        number = torch.tensor(value, dtype=torch.float64)  # on the CPU: the world's gloo half
        dist.all_reduce(number, how)
        return float(number)

    def next(self, part: float, text: str) -> float:
        """Say what begins and count it as done afterwards; returns its seconds."""
        self._tell(self._done, text)
        self._done += part
        return part * self.grid.budget_s

    # -- one device

    def product(self, precision: str, shape: tuple[int, int, int], budget_s: float) -> Product:
        """A third of a linear layer's products, forward and backward, as torch calls them: x (m, k), w (n, k)."""
        m, k, n = shape
        call = operations.product(self.place, DTYPES[precision], shape)
        return Product(precision=precision, m=m, k=k, n=n, seconds=self.computing(call, budget_s) / 3)

    def products(self) -> tuple[Product, ...]:
        """Every shape in the main precision, and the corners in the others."""
        main = self.grid.main_precision
        cells = [(main, shape) for shape in self.grid.products]
        cells += [(precision, shape) for precision in self.grid.precisions for shape in self.grid.corners]
        found = []
        for precision, (m, k, n) in cells:
            budget_s = self.next(PRODUCTS / len(cells), f"products, {precision}: {m} x {k} x {n}")
            found.append(self.product(precision, (m, k, n), budget_s))
        return tuple(found)

    def stream(self, nbytes: int, budget_s: float, fresh: bool) -> float:
        """Seconds of a product of two vectors that moves ``nbytes``; ``fresh``: as in training."""
        return self.computing(operations.stream(self.place, nbytes, fresh), budget_s)

    def functions(self) -> tuple[Function, ...]:
        """Every element-wise function, forward and backward."""
        found = []
        for name in operations.FUNCTIONS:
            budget_s = self.next(FUNCTIONS / len(operations.FUNCTIONS), name)
            forward, both, nbytes = operations.function(self.place, name, self.grid.function)
            forward_s = self.computing(forward, budget_s / 2)
            backward_s = max(0.0, self.computing(both, budget_s / 2) - forward_s)
            found.append(Function(name=name, bytes=nbytes, forward_s=forward_s, backward_s=backward_s))
        return tuple(found)

    def launch(self, budget_s: float) -> float:
        """Seconds per kernel of a chain of blocks on a few numbers, forward and backward."""
        call, kernels = operations.chain(self.place)
        return self.computing(call, budget_s) / kernels

    def sharing(self, budget_s: float) -> float:
        """How many times faster a rank's products are while the others of the world wait, at least 1; of ranks that
        take turns on cores what crowding costs them, which is seen on longer work."""
        if self._turns > 1:
            return max(1.0, self._crowding)
        call = self._largest_product()
        together = self.computing(call, budget_s / 2)
        alone = self.largest(self.seconds(None if self.rank else call, budget_s / 2))
        return max(1.0, together / alone)

    def attentions(self, precision: str) -> tuple[Attention, ...]:
        """Attention by shape, causal and not: m queries of all heads, k wide, n keys. Its FLOPs are 4 m k n forward,
        counted in full, and ATTENTION_BACKWARD times that back."""
        found = []
        cells = [(causal, shape) for causal in (True, False) for shape in self.grid.attentions]
        forwards = 1 + ATTENTION_BACKWARD["cuda-flash" if self.place.type == "cuda" else "cpu"]
        for causal, (b, h, t, d) in cells:
            budget_s = self.next(SMALL / len(cells), f"attention, {t} positions of width {d}")
            call = operations.attention(self.place, DTYPES[precision], (b, h, t, d), causal)
            seconds = self.computing(call, budget_s) / forwards / 2
            found.append(Attention(precision=precision, m=b * h * t, k=d, n=t, seconds=seconds, causal=causal))
        return tuple(found)

    def optimizer(self, budget_s: float) -> float:
        """Bytes per second of a fused AdamW step on 16 tensors."""
        step, numel = operations.optimizer(self.place, self.grid.optimizer_numel)
        return numel * ADAMW_BYTES / self.computing(step, budget_s)

    def host(self, nbytes: int, budget_s: float) -> float:
        """Bytes per second from the device to the host's memory."""
        return nbytes / self.computing(operations.to_host(self.place, nbytes), budget_s)

    # -- links

    def link(self, where: str, sizes: range, stride: int, part: float) -> Link:
        """Every collective in groups of 2, 4, 8... and all of ``sizes``, ``stride`` ranks apart.

        Where groups between machines have one rank of several in each, the whole world is measured as one group too,
        and in it the first rank with the last alone.
        """
        counts = [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]
        plans = [(count, machine.groups(self.world, count, stride, sizes[-1])) for count in counts]
        if stride > 1:
            plans.append((self.world, [list(range(self.world))]))
        cells = len(plans) * len(COLLECTIVES) - sum(count != 2 for count, _ in plans) + (stride > 1)
        if self.place.type == "cpu":
            self._all_work_s = self.computing(self._work, part / cells * self.grid.budget_s)
        fits = []
        for count, ranks in plans:
            group, mine = _joined(ranks, self.rank)
            for kind in COLLECTIVES if count == 2 or (stride > 1 and count == self.world) else COLLECTIVES[:-1]:
                budget_s = self.next(part / cells, f"{kind} among {count}")
                fits.append(self.collective(kind, count, group, mine, budget_s))
        pair = next(fit for fit in fits if fit.collective == "p2p")
        return Link(
            name=f"{dist.get_backend()} {where} machines",
            bytes_per_s=pair.bytes_per_s,
            latency_s=pair.latency_s,
            fits=tuple(fits),
        )

    def collective(self, kind: Collective, count: int, group: Any, mine: list[int], budget_s: float) -> Fit:
        """One collective over the sizes that the budget allows, fitted."""
        grid = self.grid
        work_s = self._work_before(self._takes_part(kind, mine), 0.02 * budget_s)

        def timed(nbytes: int, budget_s: float) -> float:
            ways = 2 if kind == "p2p" else 1
            return self.largest(self._met(self._call(kind, group, mine, nbytes), work_s, budget_s)) / ways

        probe = min(256 * 2**10, grid.largest_bytes)
        rate = probe / timed(probe, 0.02 * budget_s)
        # Sizes a factor of 4 apart cost 4/3 of the largest; each is run thrice to warm up and pace, thrice to measure.
        last = min(grid.largest_bytes, max(probe, int(rate * budget_s / 8)))
        points = []
        for step in range(grid.sizes):
            nbytes = round(grid.smallest_bytes * (last / grid.smallest_bytes) ** (step / (grid.sizes - 1)))
            nbytes = max(nbytes // (4 * count), 1) * 4 * count
            points.append((float(nbytes), timed(nbytes, max(3 * nbytes / rate, 0.03 * budget_s))))
        latency, rate = line(points)
        return Fit(collective=kind, ranks=count, latency_s=latency, bytes_per_s=rate, points=tuple(points))

    def _work(self) -> object:
        """What a processor computes before a collective, as in a step: the threads that move data fall asleep."""
        return self._square @ self._square

    def _work_before(self, mine: bool, budget_s: float) -> float:
        """Seconds of it, among those ranks that take part; 0 on a GPU, whose streams need none."""
        if self._all_work_s == 0 or self.smallest(float(mine)):
            return self._all_work_s
        return self.seconds(self._work if mine else None, budget_s)

    def _met(self, call: Callable[[], object] | None, work_s: float, budget_s: float) -> float:
        """Of a collective as a step meets it, after work of ``work_s``."""
        if not work_s or call is None:
            return self.seconds(call, budget_s)

        def both() -> None:
            self._work()
            call()

        return max(_LEAST_S, self.seconds(both, budget_s) - work_s)

    def _takes_part(self, kind: str, mine: list[int]) -> bool:
        return bool(mine) and (kind != "p2p" or self.rank in (mine[0], mine[-1]))

    def _call(self, kind: str, group: Any, mine: list[int], nbytes: int) -> Callable[[], object] | None:
        """The collective on a buffer of ``nbytes``, whole, as every rank sees it; None where this rank has no part."""
        if not self._takes_part(kind, mine):
            return None
        whole = torch.zeros(nbytes // 4, device=self.place)
        part = torch.zeros(nbytes // 4 // len(mine), device=self.place)
        if kind == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        if kind == "all_gather":
            return lambda: _all_gather(whole, part, group=group)
        if kind == "reduce_scatter":
            return lambda: _reduce_scatter(part, whole, group=group)
        if kind == "all_to_all":
            other = torch.zeros_like(whole)
            return lambda: dist.all_to_all_single(other, whole, group=group)
        if kind == "broadcast":
            return lambda: dist.broadcast(whole, mine[0], group=group)
        return lambda: self._there_and_back(whole, group, mine)

    def _there_and_back(self, whole: torch.Tensor, group: Any, mine: list[int]) -> None:
        """To the other rank and back again: one way would end for the sender before it has arrived."""
        first, second = mine[0], mine[-1]
        if self.rank == first:
            dist.send(whole, second, group=group)
            dist.recv(whole, second, group=group)
        else:
            dist.recv(whole, first, group=group)
            dist.send(whole, first, group=group)

    def overlap(self, link: Link) -> float:
        """The factor by which products are slower while an all-reduce of the whole world runs, at least 1.

        ``link``: the widest, whose rate says how large a buffer keeps it busy for long enough.
        """
        budget_s = self.next(SMALL, "products beside a collective")
        rate = next(fit.bytes_per_s for fit in reversed(link.fits) if fit.collective == "all_reduce")
        nbytes = min(self.grid.largest_bytes, int(rate * budget_s / 16))
        whole = torch.zeros(max(nbytes // 4, 1), device=self.place)
        moving = self.largest(self.seconds(lambda: dist.all_reduce(whole), budget_s / 4))
        size = 4096 if self.place.type == "cuda" else 256
        x = torch.randn(size, size, device=self.place, dtype=DTYPES[self.grid.main_precision])
        alone = self.largest(self.seconds(lambda: x @ x, budget_s / 4))
        count = max(1, int(0.6 * moving / alone))

        def beside() -> float:
            work = dist.all_reduce(whole, async_op=True)
            seconds = self._lap(lambda: x @ x, count)
            if work is not None:
                work.wait()
            return seconds

        return max(1.0, self.mean(median([beside() for _ in range(_SAMPLES)])) / alone)

    def disk(self, folder: Path, per_node: int) -> float:
        """Bytes per second that a machine writes and syncs, all its ranks together; the slowest machine's."""
        self.next(SMALL, f"writing to {folder}")
        mine = self.grid.disk_bytes // per_node
        data = os.urandom(mine)
        self.largest(0.0)  # all begin together
        fault, own_s = machine.write_synced(folder, data)
        seconds = self.largest(own_s)
        if self.largest(float(bool(fault))):
            raise ConfigError(fault or f"{folder} takes no file on another machine; name another folder")
        return mine * per_node / seconds


def _joined(ranks: Sequence[list[int]], rank: int) -> tuple[Any, list[int]]:
    """Make all groups; this rank's, and its ranks, or nothing."""
    made = [(dist.new_group(one), one) for one in ranks]
    return next(((group, one) for group, one in made if rank in one), (None, []))


def _nothing() -> None:
    return None
