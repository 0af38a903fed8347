"""Known clusters by name: a node type, and the network that its nodes are joined by. Constants are in presets.toml."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from shoal.cluster.facts import Cluster
from shoal.core import toml
from shoal.core.errors import ConfigError, nearest

#: Networks that any node can have, with one card.
ETHERNET = ("100gbe", "25gbe", "10gbe", "1gbe")
#: Where the source of one Ethernet card is asked for.
ONE_CARD = "assumed: one network card a node, https://en.wikipedia.org/wiki/Network_interface_controller"


def names() -> list[str]:
    """The presets, each with its usual network: ``h100``; ``h100-efa`` names another one of ``networks``."""
    return [*_data()["node"], *_data()["alias"]]


def networks(node: str) -> list[str]:
    """The networks that a preset is known with, its usual one first."""
    return list(dict.fromkeys([*_data()["node"][_data()["alias"].get(node, node)]["cards"], *ETHERNET]))


def preset(name: str, world: int | None = None) -> Cluster:
    """One node of the preset, or ``world`` devices of it. Raises ConfigError: an unknown name, no whole nodes."""
    node, network = _parts(name)
    made = _cluster(name.lower(), node, network)
    return made if world is None else made.resized(world)


def find(name: str, world: int | None = None) -> Cluster:
    """The cluster in a TOML file, or the preset of that name; with ``world`` devices. Raises ConfigError."""
    if not (name.endswith(".toml") or "/" in name or Path(name).is_file()):
        return preset(name, world)
    found = Cluster.read(name)
    return found if world is None else found.resized(world)


def constants() -> Iterator[tuple[str, Any, str]]:
    """Every constant of the presets: its path, value and source."""
    data = _data()
    for kind in ("device", "link", "node"):
        for name, table in data[kind].items():
            for path, (value, source) in _constants(table):
                yield f"{kind}.{name}.{path}", value, _expanded(source)


def _cluster(name: str, node: str, network: str) -> Cluster:
    data = _data()
    table = data["node"][node]
    devices, where = table["devices"]
    cards, cards_where = table["cards"].get(network, (1, ONE_CARD))
    device, device_sources = _record(data["device"][node])
    inside, inside_sources = _record(data["link"][table["inside"]])
    between, between_sources = _record(data["link"][network])
    between["bytes_per_s"] *= cards / devices  # of a device: the node's cards serve all of its devices
    sources = {"devices_per_node": where}
    for part, found in (("device", device_sources), ("inside", inside_sources), ("between", between_sources)):
        sources |= {f"{part}.{path}": source for path, source in found.items()}
    sources["between.bytes_per_s"] += f"; {cards} for {devices} devices: {cards_where}"
    values = {"name": name, "device": device, "devices_per_node": devices, "inside": inside, "between": between}
    expanded = {path: _expanded(source) for path, source in sources.items()}
    return Cluster.parse({**values, "sources": expanded}, f"preset {name}")


def _record(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A device's or link's values, and its sources by path; what it lacks is its base's."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for one in _lineage(table):
        values["name"] = one["name"]
        for path, (value, source) in _constants(one):
            *outer, last = path.split(".")
            place = values
            for step in outer:
                place = place.setdefault(step, {})
            place[last], sources[path] = value, source
    return values, sources


def _lineage(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    base = table.get("base")
    return [*(_lineage(_data()["device"][base]) if base else []), table]


def _constants(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, tuple[Any, str]]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _constants(value, f"{before}{name}.")
        elif isinstance(value, list):
            yield f"{before}{name}", (value[0], value[1])


def _parts(name: str) -> tuple[str, str]:
    """The node and the network that a preset's name says. Raises ConfigError naming near ones."""
    data, text = _data(), name.lower()
    choices = {}
    for known in names():
        node = data["alias"].get(known, known)
        usual = networks(node)
        choices[known] = node, usual[0]
        choices |= {f"{known}-{network}": (node, network) for network in usual}
    if text not in choices:
        near = nearest(text, choices)
        hint = near if near.startswith("did") else f"the presets are {', '.join(names())}"
        raise ConfigError(
            f"no preset {name!r}; {hint}; a network may follow a preset's name, such as h100-efa; or give the path "
            "of a TOML file (shoal measure -o cluster.toml makes one)"
        )
    return choices[text]


def _expanded(source: str) -> str:
    """A source with the addresses that its keys stand for."""
    addresses = _data()["sources"]
    found = _keys().sub(lambda match: f"{addresses[match[1]]} ", source)
    return re.sub(r"/ (?=\w)", "/", found).strip()


@cache
def _keys() -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-])({'|'.join(_data()['sources'])}): ?")


@cache
def _data() -> dict[str, Any]:
    text = files("shoal.cluster").joinpath("presets.toml").read_text(encoding="utf-8")
    return toml.from_toml(text, "presets.toml")
