"""Where to cut a model into stages: the costliest as cheap as can be under each stage's memory, then even.

Dynamic programs over blocks, a whole row at a time: D(k, i) = min over j of max(D(k-1, j), cost(j..i)), forbidden where
stage k cannot hold blocks j..i; then, of all cuts that reach that bound, the least sum of squares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ROUNDING = 1 + 1e-9  # of sums


def spans(costs: Sequence[float] | np.ndarray) -> np.ndarray:
    """(blocks + 1, blocks + 1): the cost of blocks j up to i at [j, i], infinite where there are none."""
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    table = sums[None, :] - sums[:, None]
    table[np.tril_indices(len(sums))] = np.inf
    return table


def bottlenecks(costs: Sequence[float] | np.ndarray, most: int) -> np.ndarray:
    """The costliest stage's least cost for 1 to ``most`` stages, infinite where there are fewer blocks."""
    table = spans(costs)
    row = np.full(len(table), np.inf)
    row[0] = 0.0
    found = np.full(most, np.inf)
    for stage in range(min(most, len(costs))):
        row = np.maximum(row[:, None], table).min(axis=0)
        found[stage] = row[-1]
    return found


def cut(
    costs: Sequence[float] | np.ndarray, stages: int, needs: Sequence[np.ndarray] = (), room: Sequence[float] = ()
) -> tuple[int, ...] | None:
    """The first block of every stage; None where no cut has its stages within their ``room``.

    ``needs``: for every stage the bytes that blocks j up to i take there, at [j, i]; none: memory does not bind.
    """
    table = spans(costs)
    tables = [table] * stages
    if needs:
        tables = [np.where(need > limit, np.inf, table) for need, limit in zip(needs, room, strict=True)]
    first = np.full(len(table), np.inf)
    first[0] = 0.0
    row = first
    for table in tables:
        row = np.maximum(row[:, None], table).min(axis=0)
    bound = row[-1] * _ROUNDING
    if not np.isfinite(bound):
        return None
    row, begins = first, []
    for table in tables:
        squares = row[:, None] + np.where(table > bound, np.inf, table) ** 2
        begin = squares.argmin(axis=0)
        row = squares[begin, np.arange(len(first))]
        begins.append(begin)
    starts, end = [], len(first) - 1
    for begin in reversed(begins):
        end = int(begin[end])
        starts.append(end)
    return tuple(reversed(starts))
