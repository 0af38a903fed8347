"""Checkpoints while training goes on: begun at a step's end, agreed on through the steps' own all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shoal.checkpoint.writer import Writer
from shoal.core.errors import CheckpointError, RankMismatch
from shoal.engine.state import all_pieces, collect

if TYPE_CHECKING:
    from shoal.engine.run import Run


SIGNALS = ("written", "failed", "save_calls")


class Saver:
    """Drives a Writer on every rank. A rank's failure, or a save called on some ranks only, reaches all of them.

    ``save`` sends nothing itself unless an earlier save is still open: what ranks must know of each other travels
    with the next step's all-reduce, where a save that some ranks did not call is seen and named.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.last_step: int | None = None  # the step of the last save begun
        self._calls = 0
        self._open = False  # begun, and not yet known to be written on all ranks; the same on all ranks

    def signals(self) -> dict[str, float]:
        """What this rank tells the others with each step."""
        written = self._open and self.writer.poll()[0]
        failed = self.writer.error() is not None
        return dict(zip(SIGNALS, (float(written), float(failed), float(self._calls)), strict=True))

    def heard(self, run: Run, signals: dict[str, float]) -> None:
        """The sums over ranks. Raises CheckpointError or RankMismatch on all ranks together."""
        if signals["save_calls"] != self._calls * run.ranks:
            raise RankMismatch(
                f"run.save() was called on some ranks only: {signals['save_calls']:.0f} calls over {run.ranks} ranks "
                f"since the start, {self._calls} of them on rank {run.rank}; call run.save() on every rank, "
                "each writes its part"
            )
        if signals["failed"]:
            self._fail(run)
        if self._open and signals["written"] == run.ranks:
            self._open = False
            self.writer.commit()

    def _fail(self, run: Run) -> None:
        error = self.writer.error()
        told: list[str | None] = [None] * run.ranks
        dist.all_gather_object(told, str(error) if error else None)
        self.writer.abandon()
        self._open = False
        raise CheckpointError("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text))

    def reserve(self, run: Run) -> None:
        """Allocate the buffers of coming saves, once the optimizer has its state."""
        self.writer.reserve(all_pieces(run))

    def save(self, run: Run) -> None:
        """Copy the local state and let it be written in the background; an earlier save ends first."""
        if self._open:
            self.drain(run)
        self._calls += 1
        finite = run.all_finite()
        pieces, values = collect(run, finite)
        self.writer.begin(run.step_count, pieces, values)
        self._open = True
        self.last_step = run.step_count
        run.record.row("checkpoint", step=run.step_count, finite=finite)

    def drain(self, run: Run) -> None:
        """Collective. Wait until the save in flight is committed. Raises CheckpointError on all ranks."""
        for _ in range(2):  # the shards, then the manifest
            self.writer.wait()
            total = torch.tensor(list(self.signals().values()), dtype=torch.float64).to(run.device)
            dist.all_reduce(total)
            self.heard(run, dict(zip(SIGNALS, total.tolist(), strict=True)))
