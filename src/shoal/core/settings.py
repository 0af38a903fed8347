"""The base of all settings: frozen, typed, unknown names refused with the nearest known one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.core.errors import ConfigError, nearest

Model = TypeVar("Model", bound=BaseModel)


class Settings(BaseModel):
    """A frozen record of named values. Raises ConfigError (never pydantic's own error) on bad input."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, arbitrary_types_allowed=False)

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Self:
        """Validate ``values``; ``where`` names their origin in the message. Raises ConfigError, all faults in one."""
        return checked(cls, values, where)


def checked(cls: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """An instance of ``cls`` from ``values``, or ConfigError listing each fault: asked, found, what to change."""
    faults = [
        f"{where}: no field {name!r} in {cls.__name__}; {nearest(name, cls.model_fields)}"
        for name in values
        if name not in cls.model_fields
    ]
    known = {name: value for name, value in values.items() if name in cls.model_fields}
    try:
        made = cls(**known)
    except ValidationError as error:
        faults += [_fault(cls, where, item) for item in error.errors()]
        raise ConfigError("\n".join(faults)) from None
    if faults:
        raise ConfigError("\n".join(faults))
    return made


def _fault(cls: type[BaseModel], where: str, item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"]) or cls.__name__
    field = cls.model_fields.get(str(item["loc"][0])) if item["loc"] else None
    expected = f" (expected {_type_name(field.annotation)})" if field is not None else ""
    if item["type"] == "missing":
        return f"{where}: {path}{expected} is missing; give it a value"
    return f"{where}: {path} = {item['input']!r}{expected}: {item['msg']}"


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def split_override(text: str) -> tuple[str, str]:
    """``"lr=3e-4"`` -> ``("lr", "3e-4")``. Raises ConfigError where there is no ``=``."""
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise ConfigError(f"{text!r} is not an override; write field=value, for example lr=3e-4")
    return name.strip(), value
