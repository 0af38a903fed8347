"""Plain values to TOML and back: scalars, lists and tables, each within the others."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML text that reads back as ``values``; names whose value is None are left out. Raises ConfigError."""
    return "\n".join(_table((), values)) + "\n"


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


def write_text(path: str | Path, text: str, folders: bool = False) -> None:
    """Write a UTF-8 file over what was there; ``folders``: those on the way are made. Raises ConfigError."""
    try:
        if folders:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(text.encode())
    except OSError as error:
        raise _unwritable(path, error.strerror) from None


def check_writable(path: str | Path, folders: bool = False) -> None:
    """What ``write_text`` would raise for a folder that is not there, or may not be written to: known before the work
    whose result is to be written. Raises ConfigError."""
    place = Path(path).absolute()
    fault = None
    if place.is_dir():
        fault = errno.EISDIR
    elif place.exists():
        fault = None if os.access(place, os.W_OK) else errno.EACCES
    else:
        folder = place.parent
        while folders and not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            fault = errno.ENOTDIR if folder.exists() else errno.ENOENT
        elif not os.access(folder, os.W_OK | os.X_OK):
            fault = errno.EACCES
    if fault is not None:
        raise _unwritable(path, os.strerror(fault))


def _unwritable(path: str | Path, why: str | None) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {why}; name a file in a folder that is there")


def _table(path: tuple[str, ...], values: Mapping[str, Any]) -> list[str]:
    """The lines of a table: its own values, then the tables in it under their headers."""
    given = {name: value for name, value in values.items() if value is not None}
    lines = [f"{_key(name)} = {_value(value)}" for name, value in given.items() if not isinstance(value, Mapping)]
    for name, table in given.items():
        if isinstance(table, Mapping):
            inner = (*path, name)
            lines += ["", f"[{'.'.join(map(_key, inner))}]", *_table(inner, table)]
    return lines


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
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items() if item is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, Sequence) and any(isinstance(item, Mapping) for item in value):
        return "".join(["[\n", *(f"    {_value(item)},\n" for item in value), "]"])  # a table a line
    if isinstance(value, Sequence):
        return f"[{', '.join(_value(item) for item in value)}]"
    raise ConfigError(f"a {type(value).__name__} cannot be written as TOML: {value!r}; use text, numbers or lists")
