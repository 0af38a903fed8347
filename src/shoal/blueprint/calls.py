"""What rules take and give: a call of a torch function on tensors of which some are split, and how it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.blueprint.split import Seen, Split, operands

Outputs = Split | None | tuple[Split | None, ...]


class Call(NamedTuple):
    """A call of a torch function: tensors as Seen, all else as plain values (as Operation's arguments). ``rank``: whose
    part it runs on; where results lie does not depend on it."""

    name: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    degree: int
    in_place: bool = False
    rank: int = 0

    def get(self, position: int, keyword: str, default: Any = None) -> Any:
        """An argument by position or name."""
        return self.args[position] if len(self.args) > position else self.keywords.get(keyword, default)

    @property
    def tensors(self) -> list[Seen]:
        """All tensors among the arguments, in order."""
        return operands((self.args, tuple(self.keywords.values())))


class Outcome(NamedTuple):
    """How a call runs. ``outputs``: the results' splits (one for all, or one each). ``targets``: how each tensor among
    the arguments must lie first. ``how``: what runs instead of the function itself on these, with ``local`` for it.
    ``partial``: results are partial sums, to be added up over the ranks."""

    outputs: Outputs
    targets: tuple[Split | None, ...]
    how: str = ""
    local: Any = None
    partial: bool = False


def names(*groups: tuple[str, Callable[[Call], Outcome]]) -> dict[str, Callable[[Call], Outcome]]:
    return {name: found for names, found in groups for name in names.split()}
