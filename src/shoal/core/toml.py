"""Plain values to TOML and back: scalars, lists of scalars, and tables one level deep."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML text that reads back as ``values``; names whose value is None are left out. Raises ConfigError."""
    given = {name: value for name, value in values.items() if value is not None}
    lines = [f"{_key(name)} = {_value(value)}" for name, value in given.items() if not isinstance(value, Mapping)]
    for name, table in given.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(name)}]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def from_toml(text: str, where: str) -> dict[str, Any]:
    """The values in TOML ``text``; ``where`` names its origin in the message. Raises ConfigError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}; write name = value lines, text in quotes") from None


def read_text(path: str | Path, what: str) -> str:
    """The UTF-8 text of a file; ``what`` says in the message what should be in it. Raises ConfigError."""
    try:
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as {what}: {error.strerror}; give the path of a file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} cannot be read as {what}: byte {error.start} is not UTF-8; save it as UTF-8"
        ) from None


def _key(name: str) -> str:
    return name if name.isascii() and name.replace("-", "_").isidentifier() else _quoted(name)


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped and JSON leaves.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(_value(item) for item in value)}]"
    raise ConfigError(f"a {type(value).__name__} cannot be written as TOML: {value!r}; use text, numbers or lists")
