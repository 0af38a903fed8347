"""Where to cut a model into stages: the costliest as cheap as can be under each stage's memory, then even.

Dynamic programs over blocks, a whole row at a time: D(k, i) = min over j of max(D(k-1, j), cost(j..i)), forbidden where
stage k cannot hold blocks j..i; then, of all cuts that reach that bound, the least sum of squares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.plan.candidate import Candidate, Memory
from shoal.plan.flight import in_flight
from shoal.plan.profile import Profile
from shoal.plan.ranks import stage_rank
from shoal.plan.space import Core

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


def needs(
    profile: Profile, core: Core, made: Candidate, held: list[Memory], kept: np.ndarray, usable: np.ndarray
) -> tuple[list[np.ndarray], list[float]]:
    """For every stage the bytes that blocks take there, as far as they grow with blocks, and the room for them.

    State goes with weights, as it does on the rank now; activations with ``kept`` bytes times the chunks in flight;
    all else stays as it is.
    """
    numels = np.array([sum(weight.numel for weight in block.weights) for block in profile.blocks], float)
    ends = [*made.starts[1:], len(numels)]
    place = [stage_rank(core.schedule or "", stage, core.pipeline, core.chunks) for stage in range(core.stages)]
    needs, room = [], []
    for rank in place:
        mine = [slice(b, e) for at, b, e in zip(place, made.starts, ends, strict=True) if at == rank]
        states = held[rank].weights + held[rank].gradients + held[rank].optimizer
        per_weight = states / max(sum(numels[part].sum() for part in mine), 1.0)
        flights = sum(in_flight(core.schedule, core.pipeline, core.chunks, core.accumulation, rank)) / core.chunks
        grows = states + flights * sum(kept[part].sum() for part in mine)
        needs.append(spans(numels * per_weight + kept * flights))
        room.append((usable[rank] - (held[rank].total_bytes - grows)) / core.chunks)
    return needs, room
