"""Where rows go besides the event files: console, TensorBoard, and whatever a package registers as a sink."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

from shoal.core.errors import ConfigError, nearest

GROUP = "shoal.sinks"
BUILT_IN = (
    EntryPoint("console", "shoal.monitor.console:Console", GROUP),
    EntryPoint("tensorboard", "shoal.monitor.tensorboard:TensorBoard", GROUP),
)


@runtime_checkable
class Sink(Protocol):
    """Takes the rows of rank 0. Made without arguments; everything it needs is in the record."""

    def start(self, record: dict[str, Any]) -> None:
        """Called once before the first row. ``record`` has at least

        - ``out``: the run folder, a string
        - ``step``: optimizer steps already done (0, or where the run resumes)
        - ``steps``: the step at which the run ends, None if only the data knows
        """
        ...

    def row(self, row: dict[str, Any]) -> None:
        """One row as written to the event file (see ``shoal.monitor.events``)."""
        ...

    def close(self) -> None:
        """Called once after the last row, also when training failed."""
        ...


class Sinks:
    """Several sinks as one. A sink that raises is closed and left out; ``problems`` says so."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)
        self.problems: list[str] = []

    def start(self, record: dict[str, Any]) -> None:
        """Start each sink with a copy of ``record``."""
        self._each("start", record)

    def row(self, row: dict[str, Any]) -> None:
        """Give each sink a copy of ``row``."""
        self._each("row", row)

    def close(self) -> None:
        """Close each sink."""
        self._each("close")
        self._sinks = []

    def _each(self, method: str, *values: dict[str, Any]) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(*[dict(value) for value in values])
            except Exception as error:
                self._leave_out(sink, method, error)

    def _leave_out(self, sink: Sink, method: str, error: Exception) -> None:
        self._sinks.remove(sink)
        self.problems.append(
            f"sink {type(sink).__name__} raised {type(error).__name__} in {method}: {error}; "
            "it gets no more rows, training goes on"
        )
        if method != "close":
            with contextlib.suppress(Exception):  # already reported
                sink.close()


def load_sinks(names: Sequence[str]) -> list[Sink]:
    """The sinks of these names, built in or registered under the entry point group ``shoal.sinks``.

    Raises ConfigError for a name that nobody registered, and for one whose package cannot be imported.
    """
    known = {point.name: point for point in (*entry_points(group=GROUP), *BUILT_IN)}
    return [_load(name, known) for name in names]


def _load(name: str, known: dict[str, EntryPoint]) -> Sink:
    if name not in known:
        raise ConfigError(f"no sink is called {name!r}; {nearest(name, known)}")
    try:
        sink = known[name].load()()
    except ImportError as error:
        raise ConfigError(
            f"sink {name!r} ({known[name].value}) cannot be imported: {error}; install its package, or leave it out"
        ) from error
    if not isinstance(sink, Sink):
        raise ConfigError(
            f"sink {name!r} ({known[name].value}) made a {type(sink).__name__} without start, row and close; "
            "register a class that has them"
        )
    return sink
