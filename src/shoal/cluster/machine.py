"""What a machine says of itself, and which of its ranks measure together."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from pathlib import Path


def processor() -> str:
    """The processor's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes() -> int:
    """What this process may use, all of the machine's or its control group's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
    return total


def resident_bytes() -> int:
    """What this process holds of it."""
    return os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])


def write_synced(folder: Path, data: bytes) -> tuple[str, float]:
    """Write and sync a file that is gone afterwards; why that was not possible, or nothing, and the seconds."""
    start_s = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return (
            f"{folder} takes no file to measure the disk with: {error.strerror}; name another folder",
            time.perf_counter() - start_s,
        )
    return "", time.perf_counter() - start_s


def groups(world: int, count: int, stride: int, extent: int) -> list[list[int]]:
    """Disjoint groups of ``count`` ranks, ``stride`` apart, within rows of ``extent`` such ranks.

    4 ranks on each of 2 machines: stride 1, extent 4 gives groups inside machines; stride 4, extent 2 between them.
    """
    found = []
    for block in range(0, world, stride * extent):
        for first in range(block, block + stride):
            row = list(range(first, block + stride * extent, stride))
            found += [row[at : at + count] for at in range(0, extent - count + 1, count)]
    return found


def counts(local_ranks: list[int]) -> list[int]:
    """Ranks on each machine, of all ranks' numbers on theirs; a machine begins at 0."""
    starts = [rank for rank, local in enumerate(local_ranks) if local == 0]
    return [end - start for start, end in zip(starts, [*starts[1:], len(local_ranks)], strict=True)]
