"""What the hardware is: a device, links by level, nodes x devices. A value, from a preset, a file or a measurement."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, Field

from shoal.core import toml
from shoal.core.errors import ConfigError, nearest
from shoal.core.settings import Settings

#: What a collective does with a buffer; ``p2p``: one rank sends to one other.
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]
#: Whose kernels run: they decide what autograd keeps for backward.
Kernels = Literal["cpu", "cuda-flash", "cuda-math"]
#: Precisions that a rate may be given for.
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
#: Attention's backward over its forward: four products for two, and fused kernels work the scores out again. Measured
#: on a processor, whose fused backward takes 2.1 forwards.
ATTENTION_BACKWARD: dict[str, float] = {"cpu": 2.0, "cuda-flash": 2.5, "cuda-math": 2.0}


class Facts(Settings):
    """A record whose numbers are all finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class Product(Facts):
    """A measured matrix product (m, k) x (k, n), with every worker of the machine at it."""

    precision: str = Field(description="fp64, fp32, bf16, fp16")
    m: int = Field(ge=1, description="rows of the left matrix: positions")
    k: int = Field(ge=1, description="what is summed over")
    n: int = Field(ge=1, description="columns of the right matrix")
    seconds: float = Field(gt=0, description="of one product")

    @property
    def flops_per_s(self) -> float:
        """2 m k n over its time."""
        return 2 * self.m * self.k * self.n / self.seconds


class Attention(Product):
    """Measured attention: m queries of all heads, k wide, over n keys. ``seconds``: of half its forward, so that a
    product's FLOPs stand for it, counted in full."""

    causal: bool = Field(default=True, description="positions look back alone")


class Stream(Facts):
    """A measured element-wise operation that reads and writes ``bytes``, with every worker of the machine at it."""

    bytes: float = Field(gt=0, description="read and written")
    seconds: float = Field(gt=0, description="of one operation")


class Function(Facts):
    """A measured element-wise function whose arithmetic may take longer than its memory traffic."""

    name: str = Field(description="as a trace has it, for example gelu")
    bytes: float = Field(gt=0, description="read and written by the forward")
    forward_s: float = Field(gt=0, description="of one forward")
    backward_s: float = Field(ge=0, description="of its backward")


class Device(Facts):
    """One device. Rates are per second; shares are of the peak, attainable by the best kernels."""

    name: str = Field(description="as its maker calls it")
    kernels: Kernels = Field(default="cuda-flash", description="whose kernels run")
    memory_bytes: int = Field(gt=0, description="capacity")
    reserved_bytes: int = Field(default=0, ge=0, description="taken before the first tensor: context, communicators")
    flops_per_s: dict[str, float] = Field(description=f"dense matrix peak by precision: {', '.join(PRECISIONS)}")
    matmul_share: float = Field(gt=0, le=1, description="share of the peak that a large matrix product reaches")
    matmul_half: float = Field(default=0, ge=0, description="length of a dimension that halves a product's share")
    matmul_wave: float = Field(
        default=0,
        ge=0,
        description="numbers of a product that all multiprocessors make at once, a tile each; 0: unknown",
    )
    attention_share: float = Field(gt=0, le=1, description="share of the peak that fused attention reaches")
    memory_bytes_per_s: float = Field(gt=0, description="memory bandwidth")
    memory_share: float = Field(gt=0, le=1, description="share of it that element-wise kernels reach")
    launch_s: float = Field(ge=0, description="host time to start one kernel; no kernel takes less")
    host_bytes_per_s: float = Field(default=25e9, gt=0, description="to and from the host's memory, one direction")
    overlap_slowdown: float = Field(
        default=1.0, ge=1, description="factor on compute while a collective runs beside it"
    )
    sharing: float = Field(
        default=1.0, ge=1, description="ranks that take turns on one processor: so much faster is one while others wait"
    )
    optimizer_bytes_per_s: float | None = Field(
        default=None, gt=0, description="bytes that a fused AdamW reads and writes; None: as element-wise kernels"
    )
    products: tuple[Product, ...] = Field(default=(), description="measured matrix products, by shape and precision")
    attentions: tuple[Attention, ...] = Field(default=(), description="measured attention, causal and not")
    streams: tuple[Stream, ...] = Field(default=(), description="measured element-wise operations, by size")
    functions: tuple[Function, ...] = Field(default=(), description="measured element-wise functions, by name")


def _mean(points: list[tuple[float, float]]) -> float:
    return sum(seconds for _, seconds in points) / len(points)


@lru_cache(1024)
def _rising(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """The points, so that more bytes never take less: what falls is pooled (isotonic regression, Barlow et al. 1972,
    "Statistical inference under order restrictions")."""
    pools: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        pools.append([point])
        while len(pools) > 1 and _mean(pools[-2]) >= _mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [(nbytes, _mean(pool)) for pool in pools for nbytes, _ in pool]


class Fit(Facts):
    """A measured collective of the whole buffer among ``ranks`` ranks: the line latency_s + bytes / bytes_per_s, and
    the points that it was fitted to, which go before it: caches, page faults and a link's bursts are in them."""

    collective: Collective = Field(description="which")
    ranks: int = Field(ge=2, description="group size")
    latency_s: float = Field(ge=0, description="at no bytes")
    bytes_per_s: float = Field(gt=0, description="buffer bytes per second at large sizes")
    points: tuple[tuple[float, float], ...] = Field(default=(), description="bytes and seconds that it was fitted to")

    def seconds(self, nbytes: float) -> float:
        """Of a buffer of ``nbytes``: between measured sizes in proportion, beyond them at the rate from the smallest to
        the largest; by the line where nothing else is known."""
        known = _rising(self.points)
        if len(known) < 2:
            return self.latency_s + nbytes / self.bytes_per_s
        if nbytes <= known[0][0]:
            return known[0][1]
        place = min(bisect_left(known, (nbytes, 0.0)), len(known) - 1)
        below, above = (known[0], known[-1]) if nbytes > known[-1][0] else known[place - 1 : place + 1]
        slope = (above[1] - below[1]) / (above[0] - below[0])
        return above[1] + (nbytes - above[0]) * slope


class Link(Facts):
    """What connects devices at one level. A ring's time follows from latency and bandwidth; ``fits`` are measured."""

    name: str = Field(default="", description="for example NVLink 4 or InfiniBand NDR")
    bytes_per_s: float = Field(gt=0, description="one direction, per device, nominal")
    share: float = Field(default=1.0, gt=0, le=1, description="share of it that large collectives reach")
    base_s: float = Field(default=0, ge=0, description="to start a collective")
    latency_s: float = Field(default=0, ge=0, description="per hop")
    fits: tuple[Fit, ...] = Field(default=(), description="measured collectives, which go before the ring's formula")


class Cluster(Facts):
    """``nodes`` nodes of ``devices_per_node`` devices; ranks fill a node before the next."""

    name: str = Field(description="preset or what was measured")
    device: Device = Field(description="each device")
    devices_per_node: int = Field(ge=1, description="devices in a node")
    nodes: int = Field(default=1, ge=1, description="nodes")
    inside: Link | None = Field(default=None, description="between devices of a node")
    between: Link | None = Field(default=None, description="between nodes")
    disk_bytes_per_s: float | None = Field(default=None, gt=0, description="checkpoints, per node")
    sources: dict[str, str] = Field(default={}, description="where each constant is from, by its path in this record")

    @property
    def world(self) -> int:
        """All devices."""
        return self.nodes * self.devices_per_node

    def resized(self, world: int) -> Self:
        """This cluster with ``world`` devices: part of a node, or whole nodes. Raises ConfigError."""
        if world < 1:
            raise ConfigError(f"{self.name}: asked for {world} devices; 1 or more")
        inside = min(world, self.devices_per_node)
        if world % inside:
            below = world // inside * inside
            raise ConfigError(
                f"{self.name}: asked for {world} devices, and a node has {inside}; ask for whole nodes: {below} or "
                f"{below + inside}"
            )
        made = self.model_copy(update={"devices_per_node": inside, "nodes": world // inside})
        made.check(f"{self.name} with {world} devices")
        return made

    def contradictions(self) -> list[str]:
        """A link that is needed and not there; a device that is full before the first tensor."""
        found = []
        for name, count, needed in (
            ("inside", self.devices_per_node, self.devices_per_node > 1),
            ("between", self.nodes, self.nodes > 1),
        ):
            if needed and getattr(self, name) is None:
                what = "devices in a node" if name == "inside" else "nodes"
                found.append(
                    f"{count} {what} and no link between them; add a table [{name}] with bytes_per_s, one direction, "
                    f"per device"
                )
        if self.device.reserved_bytes >= self.device.memory_bytes:
            found.append(
                f"device.reserved_bytes = {self.device.reserved_bytes} leaves nothing of device.memory_bytes = "
                f"{self.device.memory_bytes}; give a smaller one"
            )
        if not self.device.flops_per_s:
            found.append("device.flops_per_s is empty; give the matrix peak of a precision, for example fp32 = 1e12")
        found += [
            f"device.flops_per_s.{precision} = {rate:g} is no rate; give the matrix peak, or leave {precision} out"
            for precision, rate in self.device.flops_per_s.items()
            if rate <= 0
        ]
        return found + self._precisions()

    def _precisions(self) -> list[str]:
        """Names that no precision has; measured products without their precision's peak."""
        peaks = self.device.flops_per_s
        found = [
            f"device.flops_per_s.{name}: no precision {name!r}; {nearest(name, PRECISIONS)}"
            for name in peaks
            if name not in PRECISIONS
        ]
        for kind in ("products", "attentions"):
            for number, each in enumerate(getattr(self.device, kind)):
                if each.precision not in PRECISIONS:
                    near = nearest(each.precision, PRECISIONS)
                    found.append(f"device.{kind}.{number}.precision: no precision {each.precision!r}; {near}")
                elif each.precision not in peaks:
                    found.append(
                        f"device.{kind}.{number}.precision = {each.precision}, and device.flops_per_s has no "
                        f"{each.precision}; give its matrix peak, or leave the measured product out"
                    )
        return found

    def to_toml(self) -> str:
        """The whole record as TOML."""
        return toml.to_toml(self.model_dump())

    def write(self, path: str | Path) -> None:
        """Save it as TOML. Raises ConfigError."""
        toml.write_text(path, self.to_toml())

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The cluster in a file. Raises ConfigError."""
        return cls.parse(toml.from_toml(toml.read_text(path, "a cluster"), str(path)), str(path))
