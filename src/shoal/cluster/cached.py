"""Measured clusters, kept in a folder under what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shoal.cluster.facts import Cluster
from shoal.core.errors import ConfigError

#: Counted up when what is measured changes, so that older files are not taken for new ones.
FORMAT = 3


class Kept(NamedTuple):
    """A measurement; ``unkept``: why it is not in its file, empty where it is."""

    cluster: Cluster
    path: Path
    unkept: str = ""


def path_of(folder: Path, fingerprint: Mapping[str, str]) -> Path:
    """The file for a machine with this fingerprint."""
    text = json.dumps({"format": FORMAT, **fingerprint}, sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.toml"


def load(folder: Path, fingerprint: Mapping[str, str]) -> Kept | None:
    """What was kept for this fingerprint; None where nothing can be found. Raises ConfigError for a damaged file."""
    path = path_of(folder, fingerprint)
    try:
        path.stat()
    except OSError:  # not there, or in a folder that is closed to this user: never kept by them
        return None
    try:
        cluster = Cluster.read(path)
    except ConfigError as error:
        raise ConfigError(f"the kept measurement is damaged: {error}; delete {path}, or run shoal measure") from None
    return Kept(cluster, path)


def save(folder: Path, fingerprint: Mapping[str, str], cluster: Cluster) -> Path:
    """Keep a measurement, in place of an older one; the file is there whole or not at all. Raises ConfigError."""
    path = path_of(folder, fingerprint)
    said = "".join(f"# {name}: {value}\n" for name, value in fingerprint.items())
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(f"{said}\n{cluster.to_toml()}", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"the measurement cannot be kept in {folder}: {error.strerror}; set XDG_CACHE_HOME to another folder"
        ) from None
    return path
