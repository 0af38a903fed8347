"""What a step frees is there for the next one: no page is faulted in twice."""

import ctypes
import resource

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import Rows, job, sgd, start
from torch import nn

from shoal import Loss
from shoal.core.heap import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, keep_freed

ROWS = [(torch.rand(256), torch.rand(256)) for _ in range(512)]


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def squares(output, targets):
    return Loss((output - targets).square().sum(), len(targets))


def large_step():
    """Four tensors of 4 MiB at once."""
    tensors = [torch.ones(2**20) for _ in range(4)]
    del tensors


def hand_back():
    """Have the allocator do what it does in a new process, whatever was freed in this one."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_TRIM_THRESHOLD, 128 * 1024) and libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)


def usual(counts):
    """The median of the later half: a heap may still grow at first."""
    return sorted(counts[len(counts) // 2 :])[len(counts) // 4]


def faults_of_steps(keep):
    hand_back()
    kept = keep_freed() if keep else None
    counts = []
    for _ in range(16):
        before = faults()
        large_step()
        counts.append(faults() - before)
    return kept, usual(counts)


@pytest.mark.ranks
def test_pages_that_a_step_freed_are_not_faulted_in_again(monkeypatch):
    for name in ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    kept, again = run_ranks(lambda rank: faults_of_steps(True), 1)[0]
    assert kept and again < 100
    assert run_ranks(lambda rank: faults_of_steps(False), 1)[0][1] > 400  # of 4,096 pages: what it is for


@pytest.mark.unit
def test_an_allocator_set_up_by_the_environment_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not keep_freed()


@pytest.mark.ranks
def test_a_run_keeps_what_its_steps_free(tmp_path):
    def deep():
        return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())))

    def rank(_):
        hand_back()
        run = start(
            job(model=deep, data=Rows(ROWS), loss=squares, optimizer=sgd(0.1)),
            tmp_path,
            steps=8,
            epochs=8,
            global_batch=64,
        )
        counts = []
        for window in run.windows():
            before = faults()
            run.step(window)
            counts.append(faults() - before)
        run.close()
        return counts

    counts = run_ranks(rank, 1)[0]
    assert usual(counts) < 200, counts  # its activations alone are 2,000 pages
