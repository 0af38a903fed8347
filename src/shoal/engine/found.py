"""Which checkpoint all ranks begin from: the newest that is good on every rank, each disk read through once."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.checkpoint.layout import MANIFEST, file_checksum
from shoal.checkpoint.reader import Found, candidates, problem_of, read_manifest
from shoal.core.errors import CheckpointError


def newest_everywhere(folder: Path) -> tuple[Found | None, list[Found]]:
    """The newest checkpoint that is good on every rank, and the newer ones skipped; the same on all.

    ``folder`` holds checkpoints or is one. Ranks that see one and the same manifest share a disk: the first of them
    verifies every byte, the others take its word. Collective; a process without a process group looks alone.
    """
    skipped = []
    for step, name in _told(_listed(folder))[0]:
        path = folder / name
        problem = _problem_anywhere(path, step)
        if problem is None:
            return Found(step, path, None), skipped
        skipped.append(Found(step, path, problem))
    return None, skipped


def first_differing(paths: Sequence[Path]) -> int | None:
    """Collective. The first rank for which some of these files hold other bytes than for rank 0; None where none does.

    Files on one disk are one file; where ranks have several disks, one rank of each reads through its own.
    """
    marks = _told([_where(path) for path in paths])
    rank = dist.get_rank() if dist.is_initialized() else 0
    reads = marks.count(marks[0]) < len(marks) and marks.index(marks[rank]) == rank
    sums = _told([_checksum(path) for path in paths] if reads else None)
    return next((rank for rank, found in enumerate(sums) if found not in (None, sums[0])), None)


def _listed(folder: Path) -> list[tuple[int, str]]:
    """(step, name in ``folder``) of what may be a checkpoint, newest first."""
    if not (folder / MANIFEST).exists():
        return [(step, path.name) for step, path in candidates(folder)]
    try:
        return [(read_manifest(folder)["step"], ".")]
    except CheckpointError:
        return [(0, ".")]  # what is wrong with it is said where all look


def _problem_anywhere(path: Path, step: int) -> str | None:
    """Collective. What is wrong with a checkpoint on the first rank that finds something; None where nothing is."""
    marks = _told(_mark(path))
    rank = dist.get_rank() if dist.is_initialized() else 0
    reads = marks.index(marks[rank]) == rank
    problems = _told(problem_of(path, step, verify=True) if reads else None)
    for other, (problem, mark) in enumerate(zip(problems, marks, strict=True)):
        if problem is None and mark[-1] != marks[0][-1]:
            problem = f"its {MANIFEST} is another than rank 0's"
        if problem is not None:
            return problem if other == 0 else f"on rank {other}: {problem}"
    return None


def _mark(path: Path) -> tuple[Any, ...]:
    """Where this rank's manifest lies, and its checksum last."""
    where = _where(path / MANIFEST)
    return (*where, _checksum(path / MANIFEST)) if where else (None,)


def _where(path: Path) -> tuple[Any, ...]:
    """Which file this rank sees there: equal for ranks that see the same one. Nothing where there is none."""
    try:
        facts = os.stat(path)
    except OSError:
        return ()
    return socket.gethostname(), facts.st_dev, facts.st_ino


def _checksum(path: Path) -> Any:
    try:
        return file_checksum(path)
    except OSError:
        return None


def _told(value: Any) -> list[Any]:
    """Every rank's value."""
    if not dist.is_initialized():
        return [value]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every
