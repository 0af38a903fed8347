"""Several ranks in one test: forked gloo processes that meet through a file, without ports of our choosing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: once here instead of in every forked child
import torch.distributed as dist

torch.set_num_threads(1)  # a forked child of a process whose thread pool ran would wait for threads it lacks

GRACE_S = 3.0  # what the others get, once one rank failed, to fail by themselves


class RankFailed(AssertionError):
    """A rank raised, died, or did not end in time; the text is the first failing rank's traceback."""


def run_ranks(fn: Callable[[int], Any], ranks: int, timeout_s: float = 60.0) -> list[Any]:
    """Run ``fn(rank)`` in ``ranks`` processes of one gloo group; returns what each rank returned, by rank."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_child, args=(fn, rank, ranks, Path(folder), timeout_s), daemon=True)
            for rank in range(ranks)
        ]
        gc.freeze()  # a rank that collected what all share would copy it
        for process in processes:
            process.start()
        gc.unfreeze()
        late = _wait(processes, time.monotonic() + timeout_s)
        failures = sorted(Path(folder).glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            rank = failures[0].name.removeprefix("failed-")
            raise RankFailed(f"rank {rank} of {ranks} failed first:\n{failures[0].read_text()}")
        if late:
            raise RankFailed(f"ranks {late} of {ranks} did not end in {timeout_s} s")
        dead = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
        if dead:
            raise RankFailed(f"ranks died without a traceback, exit codes {dead}")
        return [pickle.loads((Path(folder) / f"value-{rank}").read_bytes()) for rank in range(ranks)]


def _wait(processes: list[Any], deadline: float) -> list[int]:
    """Until all ended; those still there at the deadline are killed and named."""
    while alive := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        left = deadline - time.monotonic()
        if left <= 0 or not wait([process.sentinel for process in alive], left):
            break
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for process in processes:
        if process.exitcode is None:
            process.kill()
        process.join()
    return late


def _child(fn: Callable[[int], Any], rank: int, ranks: int, folder: Path, timeout_s: float) -> None:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'meet'}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        value = fn(rank)
        (folder / f"value-{rank}").write_bytes(pickle.dumps(value))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        partial = folder / f"writing-{rank}"
        partial.write_text(traceback.format_exc())
        partial.rename(folder / f"failed-{rank}")
        os._exit(1)
    os._exit(0)
