"""The base of all settings: frozen, typed, unknown names refused with the nearest known one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.core.errors import ConfigError
from shoal.core.fields import Text, faults_of, fill

Model = TypeVar("Model", bound=BaseModel)


class Settings(BaseModel):
    """A frozen record of named values. Raises ConfigError (never pydantic's own error) on bad input."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, arbitrary_types_allowed=False, validate_default=True
    )

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Self:
        """Validate ``values``; ``where`` names their origin in the message. Raises ConfigError, all faults in one."""
        made = checked(cls, values, where)
        made.check(where)
        return made

    def check(self, where: str) -> None:
        """Raises ConfigError listing every contradiction among the values."""
        if found := self.contradictions():
            raise ConfigError("\n".join(f"{where}: {text}" for text in found))

    def contradictions(self) -> list[str]:
        """Values that are good alone but not together: each as asked, found, what to change."""
        return []


def checked(cls: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """An instance of ``cls`` from ``values``, or ConfigError listing each fault: asked, found, what to change."""
    ready, faults = fill(cls, values, where)
    try:
        made = cls(**ready)
    except ValidationError as error:
        raise ConfigError(
            "\n".join([*faults, *faults_of(error, cls, where, skip=values.keys() - ready.keys())])
        ) from None
    if faults:
        raise ConfigError("\n".join(faults))
    return made


def split_override(text: str) -> tuple[str, Text]:
    """``"lr=3e-4"`` -> ``("lr", "3e-4")``. Raises ConfigError where there is no ``=``."""
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise ConfigError(f"{text!r} is not an override; write field=value, for example lr=3e-4")
    return name.strip(), Text(value)
