"""A barrier that names the ranks that did not come."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.core.errors import RankMismatch


def meet(where: str, timeout_s: float = 1800.0) -> None:
    """Collective. Wait for all ranks. Raises RankMismatch naming the missing ones, on every rank that came.

    A bare barrier tells at most that it timed out; each rank leaves word in the store before it waits.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()
    turn = store.add(f"shoal/meet/{where}/{rank}", 1)
    keys = [f"shoal/meet/{where}/{other}/{turn}" for other in range(ranks)]
    store.set(keys[rank], "here")
    try:
        dist.barrier(async_op=True).wait(timedelta(seconds=timeout_s))  # type: ignore[union-attr]
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {ranks}"
        raise RankMismatch(
            f"all ranks were to meet {where}, but {names} did not come in {timeout_s:g} s "
            f"({str(error).strip().splitlines()[0]}); look at what those ranks do before it: "
            "model(), data() and optimizer() must end on every rank"
        ) from error
