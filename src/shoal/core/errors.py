"""Every error that Shoal raises. A message says what was asked, what was found and what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ShoalError(Exception):
    """Base of all errors that Shoal raises on purpose."""


class ConfigError(ShoalError):
    """A setting, a field or a job file cannot be used as given."""


class DataError(ShoalError):
    """A data set cannot serve the batches that were asked for."""


class CheckpointError(ShoalError):
    """A checkpoint cannot be written, found or loaded."""


class ModelError(ShoalError):
    """The model is not the same on all ranks, or has a part that cannot be trained exactly."""


class NumericsError(ShoalError):
    """A loss, a count or a gradient is not what the numerics contract allows."""


class LaunchError(ShoalError):
    """Workers cannot be started, or the world they should join is not there."""


class WorkerFailure(ShoalError):
    """A worker process failed; the text ends with the traceback of the rank that failed first."""


class RankMismatch(ShoalError):
    """A collective call was made on some ranks only."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint like ``; did you mean 'width'?`` for a mistyped name, or the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known names: {', '.join(names) if names else '(none)'}"
