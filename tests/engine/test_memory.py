"""Saving and loading take the memory of a share, not of the whole state on every rank."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.harness import run_ranks
from tests.small_jobs import Rows, job, sgd, start
from torch import nn

from shoal import Loss
from shoal.checkpoint.reader import Reader
from shoal.engine.found import newest_everywhere
from shoal.engine.state import restore
from shoal.engine.weights import load_weights

pytestmark = pytest.mark.ranks

RANKS, LAYERS, TENSOR_MIB = 4, 16, 4  # a model of 64 MiB; with momentum its state is 128
SLACK_MIB = 8  # the interpreter's own


def resident_mib() -> float:
    """Memory of this process that is its own: not the page cache's, not inherited by the fork and untouched."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth_mib(work) -> float:
    """How far this process grew at most while ``work()`` ran, looked at every millisecond by a thread."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else memory freed before would be taken again, and not be seen
    begin = peak = resident_mib()
    ended = threading.Event()

    def look() -> None:
        nonlocal peak
        while not ended.is_set():
            peak = max(peak, resident_mib())
            time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return max(peak, resident_mib()) - begin


def big():
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)])


def run_in(out):
    made = job(
        model=big, data=Rows([(torch.ones(1024), 0)] * 8), loss=lambda output, y: Loss(output.square().sum(), len(y)),
        optimizer=sgd(1e-9, momentum=0.9),
    )  # fmt: skip
    return start(made, out, steps=1, global_batch=RANKS)


def test_a_rank_holds_its_share_in_a_save_and_one_tensor_in_a_load(tmp_path):
    """Each rank held the full state: the host's memory went times the number of ranks.

    https://github.com/pytorch/pytorch/issues/149640 https://github.com/Lightning-AI/pytorch-lightning/pull/19870
    https://github.com/facebookresearch/fairscale/issues/844
    """

    def body(rank):
        run = run_in(tmp_path / "run")
        for window in run.windows():
            run.step(window)
        found = {"save": growth_mib(run.save)}
        run.close()
        del run, window
        fresh = run_in(tmp_path / "fresh")
        path = tmp_path / "run" / "checkpoints"
        found["verify"] = growth_mib(lambda: newest_everywhere(path))
        found["load"] = growth_mib(lambda: restore(fresh, Reader(path / "step-1")))
        if rank == 0:
            save_file(fresh.model.state_dict(), tmp_path / "weights.safetensors")
        torch.distributed.barrier()
        found["weights"] = growth_mib(lambda: load_weights(fresh.model, tmp_path / "weights.safetensors"))
        return found

    model_mib = LAYERS * TENSOR_MIB
    most = {
        "save": 2 * model_mib / RANKS + TENSOR_MIB,
        "verify": TENSOR_MIB,
        "load": model_mib + TENSOR_MIB,  # momentum, which the run keeps
        "weights": TENSOR_MIB,
    }
    for rank, found in enumerate(run_ranks(body, RANKS, timeout_s=120)):
        assert all(found[name] < most[name] + SLACK_MIB for name in most), (rank, found, most)
        assert found["save"] > 0.8 * 2 * model_mib / RANKS, "what is copied is seen"
