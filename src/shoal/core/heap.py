"""Memory that a step frees stays with the process: a CPU step that hands it back faults every page in again."""

from __future__ import annotations

import ctypes
import os

#: glibc's names (malloc.h): free memory at the heap's end beyond the first goes back to the system, -1: never; blocks
#: from the second on are mapped one by one, and unmapped when freed: 32 MiB is the most that glibc takes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_ON_HEAP = 32 * 2**20


def keep_freed() -> bool:
    """Have glibc's allocator keep what is freed, for tensors of up to 32 MiB, from now on; whether it does.

    Steps of small models are 5 to 13 % faster (docs/log.md); the most memory at once is the same. Left alone: another
    C library, and an allocator that the environment sets up already (``MALLOC_...`` or ``GLIBC_TUNABLES``).
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, -1)) and bool(mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP))
