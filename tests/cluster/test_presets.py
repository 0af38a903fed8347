"""Presets: every constant has a source, every name works, and what is not known is refused with near names."""

import re
from functools import cache
from pathlib import Path

import pytest

from shoal.cluster import find, names, preset
from shoal.cluster.presets import constants, networks
from shoal.core.errors import ConfigError

pytestmark = pytest.mark.unit

ASKED = ("v100", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "gb200", "mi300x", "l40s", "rtx4090")
ADDRESS = r"https://\S+\.\S+"
LINKS = ("NVLink 3", "NVLink 4", "NVLink 5", "PCIe 4", "PCIe 5")
NETWORKS = ("hdr", "ndr", "efa", "100gbe", "25gbe", "10gbe", "1gbe")


def numbers(values, path=""):
    """The path of every number in a record."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{path}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{path}{name}"


def test_no_constant_lacks_a_source():
    found = list(constants())
    assert len(found) > 200
    assert [path for path, _, source in found if not re.search(ADDRESS, source)] == []


@pytest.mark.parametrize("name", names())
def test_every_number_that_a_preset_gives_has_an_address(name):
    """What the presets leave at its default is zero, or no constant: how many nodes."""
    for network in networks(name):
        cluster = preset(f"{name}-{network}")
        given = cluster.model_dump(exclude_unset=True, exclude={"sources"})
        given.pop("nodes", None)
        assert sorted(numbers(given)) == sorted(cluster.sources)
        for path, source in cluster.sources.items():
            assert re.search(ADDRESS, source), f"{path}: {source}"


def test_what_the_presets_leave_out_is_off():
    cluster = preset("h100")
    left = set(numbers(cluster.model_dump(exclude={"sources"}))) - set(cluster.sources)
    assert left == {"nodes", "device.sharing"}  # and every device has its own processor


def test_devices_and_links_that_people_have_are_there():
    assert set(ASKED) <= set(names())
    inside = {preset(name).inside.name for name in names()}
    assert all(any(link in name for name in inside) for link in LINKS)
    assert set(NETWORKS) <= {network for name in names() for network in networks(name)}


def test_a_network_is_shared_by_a_nodes_devices():
    assert preset("h100").between.bytes_per_s == 50e9
    assert preset("h100-100gbe").between.bytes_per_s == 12.5e9 / 8
    assert preset("h100-100gbe").between.name == "100 Gbit Ethernet"
    assert "1 for 8 devices" in preset("h100-100gbe").sources["between.bytes_per_s"]


def test_a_device_keeps_what_it_shares_with_its_base():
    h100, h200 = preset("h100").device, preset("H200").device
    assert h200.flops_per_s == h100.flops_per_s
    assert h200.memory_bytes > h100.memory_bytes


@pytest.mark.parametrize(
    ("name", "near"),
    [("h10", "did you mean 'h100'"), ("a100-80g", "did you mean 'a100-80gb'"), ("h100-edf", "did you mean 'h100-ef"),
     ("abacus", "the presets are v100-16gb, .*rtx4090")],
)  # fmt: skip
def test_an_unknown_preset_is_refused_with_near_names(name, near):
    with pytest.raises(ConfigError, match=f"no preset '{name}'; {near}.*shoal measure -o cluster.toml"):
        find(name)


def test_find_reads_files_and_presets(tmp_path):
    path = tmp_path / "mine.toml"
    preset("a100", 16).write(path)
    assert find(str(path)) == preset("a100", 16)
    assert find(str(path), 32).nodes == 4
    assert find("a100", 8) == preset("a100-80gb-hdr", 8).model_copy(update={"name": "a100"})
    with pytest.raises(ConfigError, match=r"gone.toml cannot be read as a cluster"):
        find("gone.toml")


def test_the_guide_has_every_preset_as_it_is():
    """docs/clusters.md: name, devices, memory, best matrix peak in 16 bits, bandwidth, links."""
    guide = (Path(__file__).resolve().parents[2] / "docs" / "clusters.md").read_text()
    rows = [line for line in guide.splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.startswith(tuple(f"| `{name}`" for name in names()))] == [
        row_of(name) for name in names() if name not in aliases()
    ]
    assert all(f"`{other}`" in guide for other in aliases())


def row_of(name):
    cluster = preset(name)
    device, inside, between = cluster.device, cluster.inside, cluster.between
    peak = device.flops_per_s.get("bf16", device.flops_per_s["fp16"])
    return (
        f"| `{name}` | {cluster.devices_per_node} | {device.memory_bytes / 1e9:.1f} | {peak / 1e12:g} | "
        f"{device.matmul_share:.2f} | {device.memory_bytes_per_s / 1e12:.3g} | {inside.name}, "
        f"{inside.bytes_per_s / 1e9:g} × {inside.share:.2f} | {between.name}, {between.bytes_per_s / 1e9:.3g} × "
        f"{between.share:.2f} | {', '.join(n for n in networks(name) if not n.endswith('gbe'))} |"
    )


@cache
def aliases():
    return [name for name in names() if name not in {path.split(".")[1] for path, _, _ in constants()}]
