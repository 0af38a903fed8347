"""What the probes of a run have written, put together again. numpy alone: this process may go on to fork workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open


class Copy(NamedTuple):
    """A region of a tensor as one rank holds it."""

    rank: int
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    value: np.ndarray

    @property
    def place(self) -> tuple[slice, ...]:
        """Where it lies in the whole."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.value.shape, strict=True))


class Micro(NamedTuple):
    """Micro-batch number ``number`` of all data ranks together."""

    number: int
    ids: tuple[int, ...]
    loss: float
    count: float


@dataclass
class Step:
    """One step of all ranks."""

    number: int
    ranks: dict[int, dict[str, Any]]  # what each rank told
    folder: Path

    @property
    def first(self) -> dict[str, Any]:
        """What rank 0 told: all ranks agree on loss and norm."""
        return self.ranks[min(self.ranks)]

    @cached_property
    def micros(self) -> list[Micro]:
        """The micro-batches in order; padding is left out."""
        found = []
        for number in range(max(len(told["ids"]) for told in self.ranks.values())):
            readers = {told["data_rank"]: told["ids"] for told in reversed(self.ranks.values())}
            ids = [i for rank in sorted(readers) if number < len(readers[rank]) for i in readers[rank][number]]
            parts = [
                micro
                for told in self.ranks.values()
                if told["at"]["tensor"] == 0
                for micro in told["micros"]
                if micro["number"] == number
            ]
            loss, count = (sum(part[key] for part in parts) for key in ("loss", "count"))
            found.append(Micro(number, tuple(ids), loss, count))
        return found

    def torn_ids(self) -> str | None:
        """Two ranks that should read the same samples and do not."""
        known: dict[int, tuple[int, Any]] = {}
        for rank, told in self.ranks.items():
            other, ids = known.setdefault(told["data_rank"], (rank, told["ids"]))
            if ids != told["ids"]:
                swapped = "swapped micro-batches: " if sorted(ids) == sorted(told["ids"]) else ""
                return f"{swapped}ranks {other} and {rank} work on the same samples, but take {ids} and {told['ids']}"
        return None

    @cached_property
    def names(self) -> dict[str, list[tuple[int, str]]]:
        """Each tensor's regions as (rank, key in its file)."""
        found: dict[str, list[tuple[int, str]]] = {}
        for rank, told in self.ranks.items():
            for key, fact in told["tensors"].items():
                found.setdefault(fact["name"], []).append((rank, key))
        return found

    def copies(self, name: str) -> list[Copy]:
        """A tensor's regions on all ranks, read from their files."""
        return list(self._read(name))

    def _read(self, name: str) -> Iterator[Copy]:
        for rank, key in self.names[name]:
            with safe_open(self.folder / f"step-{self.number}-rank-{rank}.safetensors", framework="numpy") as file:
                value = file.get_tensor(key)
            fact = self.ranks[rank]["tensors"][key]
            yield Copy(rank, tuple(fact["shape"]), tuple(fact["offsets"]), value)


class Recording:
    """A run under probes. ``told``: what rank 0 said at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: dict[str, Any] = json.loads((folder / "rank-0.json").read_text())
        self.by_rank = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
        #: The whole model's names in its order, with the class of the module that has each.
        self.modules = {entry["name"]: entry["module"] for entry in self.told["names"]}
        self.steps = [self._step(number) for number in range(1, self.told["steps"] + 1)]

    def _step(self, number: int) -> Step:
        paths = sorted(self.folder.glob(f"step-{number}-rank-*.json"), key=lambda path: int(path.stem.split("-")[-1]))
        told = {int(path.stem.split("-")[-1]): json.loads(path.read_text()) for path in paths}
        return Step(number, told, self.folder)

    def any(self, key: str) -> bool:
        """Whether some rank said so."""
        return any(told[key] for told in self.by_rank)


def split(recording: Recording, degrees: dict[str, int]) -> dict[str, float]:
    """For each axis with several ranks that may divide weights: the share of weight bytes really divided on it."""
    step = recording.steps[0]
    held: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, list[int]]] = {}
    for name in step.names:
        if name.startswith("weight/"):
            for copy in step.copies(name):
                key = (name, copy.offsets, copy.value.shape)
                held.setdefault(key, (copy.value.nbytes, []))[1].append(copy.rank)
    return {
        axis: _divided(held.values(), axis, degrees, step.ranks)
        for axis in ("pipeline", "shard", "tensor")
        if degrees[axis] > 1
    }


def _divided(regions: Any, axis: str, degrees: dict[str, int], ranks: dict[int, dict[str, Any]]) -> float:
    """Of the regions that ranks hold who differ along ``axis`` only: the bytes that not all of them hold."""
    divided = total = 0
    for size, holders in regions:
        groups: dict[tuple[int, ...], int] = {}
        for rank in holders:
            others = tuple(place for name, place in ranks[rank]["at"].items() if name != axis)
            groups[others] = groups.get(others, 0) + 1
        for count in groups.values():
            total += size
            divided += size * (count < degrees[axis])
    return divided / total if total else 0.0
