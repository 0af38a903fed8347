"""What a rehearsal found of each rank, beside what was predicted, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from shoal.cluster.facts import Device
from shoal.plan.explain import aligned, count
from shoal.plan.mesh import AXES, Mesh
from shoal.plan.plan import Plan
from shoal.plan.ranks import Coordinates, group
from shoal.verify.foretold import Foretold
from shoal.verify.rehearsed import CATEGORIES, Collective, Sums


class Exchange(NamedTuple):
    """Collectives of one kind in one group in one phase of a step. ``axes``: the mesh axes that the group's ranks
    differ along, joined by x; ``tied`` for holders of a tied weight. ``bytes``: of the whole buffers, all calls."""

    kind: str
    axes: str
    ranks: int
    phase: str
    count: int
    bytes: int


class Counted(NamedTuple):
    """Of one step: the most bytes at once, the phase in which that is, these bytes by category, collectives, FLOPs."""

    peak_bytes: int
    phase: str
    memory: Mapping[str, int]
    collectives: Sequence[Exchange]
    flops: int


class Rehearsed(NamedTuple):
    """One rank's step and what was predicted of it; None: nothing."""

    rank: int
    at: Coordinates
    counted: Counted
    said: Foretold | None
    notes: tuple[str, ...]

    @property
    def memory_error(self) -> float | None:
        """Predicted peak over the counted one, less 1."""
        return self.said and self.said.memory.total_bytes / self.counted.peak_bytes - 1

    def traffic(self, axis: str) -> int:
        """Bytes of a step's collectives over one axis during forward and backward, or summing gradients after it."""
        return sum(e.bytes for e in self.counted.collectives if e.axes == axis)


class Rehearsal(NamedTuple):
    """The ranks that were rehearsed. ``correction``: bytes that ``device``'s kernels hold beyond this machine's at the
    peak, by pipeline coordinate."""

    plan: Plan
    ranks: tuple[Rehearsed, ...]
    device: Device | None
    correction: Sequence[float] | None
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The printed page."""
        told = [f"{self.plan.mesh}: {self.plan.mesh.size:,} ranks, {len(self.ranks)} of them rehearsed here", ""]
        for each in self.ranks:
            told += [*_rank_lines(each, self), ""]
        told.append(
            "Counted with the CPU's kernels, whose operations are not fused: what a device's own fused kernels do not "
            "keep for backward, it does not need."
        )
        told += [f"note: {note}" for note in dict.fromkeys(note for each in self.ranks for note in each.notes)]
        return told + [f"Not known: {note}." for note in self.notes]

    def print(self) -> None:
        """Print the page."""
        print("\n".join(self.lines()), flush=True)

    def as_json(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {
            "plan": self.plan.model_dump(mode="json"),
            "world": self.plan.mesh.size,
            "ranks": [
                {
                    "rank": each.rank, "at": each.at._asdict(), "peak_bytes": each.counted.peak_bytes,
                    "phase": each.counted.phase, "memory": dict(each.counted.memory), "flops": each.counted.flops,
                    "collectives": [exchange._asdict() for exchange in each.counted.collectives],
                    "predicted": each.said and {
                        "memory": {**each.said.memory._asdict(), "total_bytes": each.said.memory.total_bytes},
                        "flops": each.said.flops, "traffic": each.said.traffic,
                    },
                    "notes": list(each.notes),
                    "correction_bytes": self.correction[each.at.pipeline] if self.correction else None,
                }
                for each in self.ranks
            ],
            "notes": list(self.notes),
        }  # fmt: skip


def size(nbytes: float) -> str:
    """Bytes with the unit that suits them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes:,.0f} B"


def _rank_lines(each: Rehearsed, whole: Rehearsal) -> list[str]:
    counted, said = each.counted, each.said
    place = ", ".join(
        f"{axis} {value}" for axis, value in each.at._asdict().items() if getattr(whole.plan.mesh, axis) > 1
    )
    told = [f"rank {each.rank}{f' ({place})' if place else ''}"]
    parts = ", ".join(f"{name} {size(counted.memory[name])}" for name in CATEGORIES if counted.memory.get(name))
    told.append(f"  peak {size(counted.peak_bytes)}, in {counted.phase}: {parts}")
    if said is not None and each.memory_error is not None:
        told.append(f"  predicted {size(said.memory.total_bytes)} ({each.memory_error:+.1%}), in {said.memory.moment}")
    if whole.device is not None:
        more = whole.correction[each.at.pipeline] if whole.correction else 0.0
        needed = counted.peak_bytes + more + whole.device.reserved_bytes
        fits = "fits" if needed <= whole.device.memory_bytes else "does not fit"
        told.append(
            f"  on {whole.device.name}: {size(needed)} with {size(whole.device.reserved_bytes)} reserved and "
            f"{more:+,.0f} bytes for its kernels; {fits} {size(whole.device.memory_bytes)}"
        )
    flops = _beside(count(said.flops), said.flops, counted.flops) if said else ""
    told.append(f"  {count(counted.flops)} FLOPs{flops}")
    rows = [("  collective", "axes", "ranks", "phase", "calls", "bytes")]
    rows += [(f"  {e.kind}", e.axes, f"{e.ranks}", e.phase, f"{e.count:,}", size(e.bytes)) for e in counted.collectives]
    told += aligned(rows)
    for axis, nbytes in (said.traffic if said else {}).items():
        found = each.traffic(axis)
        told.append(f"  over {axis}: {size(found)}" + _beside(size(nbytes), nbytes, found))
    return told


def _beside(text: str, said: float, found: float) -> str:
    return f", predicted {text}" + (f" ({said / found - 1:+.1%})" if found else "")


def named(found: Mapping[Collective, Sums], mesh: Mesh, rank: int) -> list[Exchange]:
    """Each group by the mesh axes that it lies along, fewest first."""
    wide = [axis for axis in AXES if getattr(mesh, axis) > 1]
    names: dict[tuple[int, ...], str] = {(rank,): "one rank"}
    for length in range(1, len(wide) + 1):
        for axes in combinations(wide, length):
            names.setdefault(tuple(group(mesh, axes, rank)), " x ".join(axes))
    return [
        Exchange(
            key.kind, names.get(tuple(sorted(key.ranks)), "tied"), len(key.ranks), key.phase, sums.count, sums.bytes
        )
        for key, sums in found.items()
    ]
