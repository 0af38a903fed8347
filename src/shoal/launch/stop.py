"""The request to stop: save at the end of this step, then end."""

from __future__ import annotations

import signal


class StopRequest:
    """Set by SIGTERM or SIGINT; looked at by the engine once a step."""

    def __init__(self) -> None:
        self.requested = False
        self.signal_number: int | None = None

    def __call__(self) -> bool:
        """Whether a stop was asked for; so that the object itself can be handed to the engine."""
        return self.requested

    def listen(self, *, ignore_interrupt: bool = False) -> None:
        """Take SIGTERM, and SIGINT unless a launcher forwards it, as a request to stop. Main thread only."""
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignore_interrupt else self._interrupt)

    def _ask(self, number: int, frame: object) -> None:
        self.requested, self.signal_number = True, number

    def _interrupt(self, number: int, frame: object) -> None:
        if self.requested:  # asked twice: end at once
            raise KeyboardInterrupt
        self._ask(number, frame)


STOP = StopRequest()
"""This process's stop request."""
