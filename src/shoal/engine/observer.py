"""Looking into a run from inside, for who holds it against another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shoal.job import Loss

if TYPE_CHECKING:
    from shoal.engine.forward import Pass
    from shoal.engine.run import Run
    from shoal.engine.step import StepReport, Verdict


class Observer(Protocol):
    """Sees every step of one rank and changes nothing. ``Hooks.observer``; a run without one does nothing more."""

    def takes(self, each: Pass) -> None:
        """A micro-batch begins its way through the model, padding too."""
        ...

    def micro_batch(self, each: Pass, loss: Loss) -> None:
        """A micro-batch's summed loss and its count (padding: 0), on ranks that work out a loss."""
        ...

    def gradients(self, run: Run, verdict: Verdict) -> None:
        """The parameters have the global batch's gradients; the optimizer takes them times ``verdict.factor``."""
        ...

    def stepped(self, run: Run, report: StepReport) -> None:
        """Weights and optimizer are as the step leaves them."""
        ...
