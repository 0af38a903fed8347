"""A barrier that names the ranks that did not come."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.core.errors import RankMismatch


def leave_word(store: Any, where: str, rank: int, ranks: int) -> list[str]:
    """Say in ``store`` that this rank has come to ``where``; returns the keys of all ranks' word."""
    turn = store.add(f"shoal/{where}/{rank}", 1)
    keys = [f"shoal/{where}/{other}/{turn}" for other in range(ranks)]
    store.set(keys[rank], "here")
    return keys


def missing(store: Any, keys: list[str]) -> str:
    """The ranks that have left no word, as ``ranks 1, 3 of 4``; empty where all have."""
    late = [rank for rank, key in enumerate(keys) if not store.check([key])]
    return f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} of {len(keys)}" if late else ""


def meet(where: str, timeout_s: float = 1800.0) -> None:
    """Collective. Wait for all ranks. Raises RankMismatch naming the missing ones, on every rank that came.

    A bare barrier tells at most that it timed out, so each rank leaves word in the store before it waits.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    keys = leave_word(store, f"meet {where}", dist.get_rank(), dist.get_world_size())
    try:
        dist.barrier(async_op=True).wait(timedelta(seconds=timeout_s))  # type: ignore[union-attr]
    except RuntimeError as error:
        late = missing(store, keys)
        if not late:
            raise
        raise RankMismatch(
            f"all ranks were to meet {where}, but {late} did not come in {timeout_s:g} s "
            f"({str(error).strip().splitlines()[0]}); look at what those ranks do before it: "
            "model(), data() and optimizer() must end on every rank"
        ) from error
