"""What a model is, for a plan: its parameters' names and shapes, short enough to be read and compared line by line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from shoal.core.errors import ConfigError

SHOWN = 3  # lines of a difference that are told
_FLOATS = ("float32", "float64")  # in which weights are kept: which of them is the precision's affair


class Parameter(NamedTuple):
    """A parameter: its name in the plain model, its shape, its dtype (``float32``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def fingerprint(parameters: Iterable[Parameter]) -> tuple[str, ...]:
    """A line for each parameter, one for those of repeated blocks that differ in the block's number only, such as
    ``blocks.{0-7}.norm.weight 64``. Dtypes are told where they are not a float's."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for parameter in parameters:
        before, number, after = _split(parameter.name)
        told = "x".join(map(str, parameter.shape)) or "scalar"
        told += "" if parameter.dtype in _FLOATS else f" {parameter.dtype}"
        found.setdefault((before, after, told), []).extend([] if number is None else [number])
    return tuple(
        f"{before}{_ranges(numbers) if numbers else ''}{after} {told}"
        for (before, after, told), numbers in found.items()
    )


def check_model(wanted: Sequence[str], model: Sequence[str], where: str) -> None:
    """Raises ConfigError where a plan's model is not ``model``, naming the first lines that differ."""
    gone = [line for line in wanted if line not in model]
    new = [line for line in model if line not in wanted]
    if gone or new:
        raise ConfigError(
            f"{where} is for another model: it has {_told(gone)} where this model has {_told(new)}; make a plan for "
            "this model, change the job's fields, or leave model out of the plan"
        )


def _told(lines: list[str]) -> str:
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return (", ".join(map(repr, lines[:SHOWN])) or "nothing") + more


def _split(name: str) -> tuple[str, int | None, str]:
    """What stands before and after the first number among a name's parts."""
    parts = name.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return name, None, ""
    return "".join(part + "." for part in parts[:at]), int(parts[at]), "".join("." + part for part in parts[at + 1 :])


def _ranges(numbers: list[int]) -> str:
    """``3`` for one number, ``{0-7}`` or ``{0,2-5}`` for several."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return "{" + ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ends) + "}"
