"""The cluster's record: files both ways, parts of it, and what contradicts."""

import math

import pytest

from shoal.cluster.facts import Cluster, Device, Fit, Link, Product, Stream
from shoal.core import toml
from shoal.core.errors import ConfigError

pytestmark = pytest.mark.unit

PRODUCT = Product(precision="fp32", m=1, k=2, n=3, seconds=1e-6)
DEVICE = Device(
    name="d", memory_bytes=100, flops_per_s={"fp32": 1e12}, matmul_share=0.5, attention_share=0.5, memory_share=1,
    memory_bytes_per_s=1e9, launch_s=0, products=(PRODUCT,),
    streams=(Stream(bytes=8, seconds=1e-9),),
)  # fmt: skip
FITS = (Fit(collective="all_reduce", ranks=2, latency_s=1e-4, bytes_per_s=1e9, points=((1024, 1e-4), (2048, 2e-4))),)
LINK = Link(name="wire", bytes_per_s=1e9, fits=FITS)
CLUSTER = Cluster(
    name="mine", device=DEVICE, devices_per_node=4, nodes=2, inside=LINK, between=LINK, sources={"device": "measured"}
)


def test_a_file_has_it_all(tmp_path):
    CLUSTER.write(tmp_path / "c.toml")
    assert Cluster.read(tmp_path / "c.toml") == CLUSTER


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"gone/c.toml cannot be written: No such file.*a folder that is there"):
        CLUSTER.write(tmp_path / "gone" / "c.toml")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"between": None}, r"2 nodes and no link between them; add a table \[between\] with bytes_per_s"),
        ({"inside": None}, r"4 devices in a node and no link between them; add a table \[inside\]"),
        ({"device": DEVICE.model_copy(update={"reserved_bytes": 100})}, "reserved_bytes = 100 leaves nothing of"),
        ({"device": DEVICE.model_copy(update={"flops_per_s": {}})}, "flops_per_s is empty; give the matrix peak"),
        ({"device": DEVICE.model_copy(update={"flops_per_s": {"fp32": 0.0}})}, "flops_per_s.fp32 = 0 is no rate; give"),
        (
            {"device": DEVICE.model_copy(update={"flops_per_s": {"fp32": 1e12, "fp23": 1e12}})},
            "device.flops_per_s.fp23: no precision 'fp23'; did you mean 'fp32'",
        ),
        (
            {"device": DEVICE.model_copy(update={"flops_per_s": {"fp16": 1e12}})},
            "device.products.0.precision = fp32, and device.flops_per_s has no fp32; give its matrix peak, or leave",
        ),
        (
            {"device": DEVICE.model_copy(update={"products": (PRODUCT.model_copy(update={"precision": "bp16"}),)})},
            "device.products.0.precision: no precision 'bp16'; did you mean 'fp16'",
        ),
        ({"device": DEVICE.model_copy(update={"memory_bytes_per_s": math.inf})}, "should be a finite number"),
        ({"between": LINK.model_copy(update={"bytes_per_s": math.nan})}, "between.bytes_per_s = nan"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, change, text):
    (tmp_path / "c.toml").write_text(CLUSTER.model_copy(update=change).to_toml())
    with pytest.raises(ConfigError, match=rf"c.toml: .*{text}"):
        Cluster.read(tmp_path / "c.toml")


def test_a_file_with_a_mistyped_name_is_refused():
    values = toml.from_toml(CLUSTER.to_toml().replace("bytes_per_s", "byte_per_s"), "c")
    with pytest.raises(ConfigError, match=r"c: no field 'inside.byte_per_s' in Link; did you mean 'bytes_per_s'"):
        Cluster.parse(values, "c")


@pytest.mark.parametrize(("world", "nodes", "devices"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (8, 2, 4), (40, 10, 4)])
def test_resized(world, nodes, devices):
    found = CLUSTER.resized(world)
    assert (found.nodes, found.devices_per_node, found.world) == (nodes, devices, world)
    assert found.device == DEVICE


def test_resized_to_what_are_no_whole_nodes_is_refused():
    with pytest.raises(ConfigError, match="mine: asked for 6 devices, and a node has 4; ask for whole nodes: 4 or 8"):
        CLUSTER.resized(6)
    with pytest.raises(ConfigError, match="mine: asked for 0 devices; 1 or more"):
        CLUSTER.resized(0)


def test_resized_beyond_a_node_needs_a_link_between():
    alone = CLUSTER.model_copy(update={"nodes": 1, "between": None})
    with pytest.raises(ConfigError, match=r"mine with 8 devices: 2 nodes and no link between them; add .*\[between\]"):
        alone.resized(8)


def test_measured_figures_are_rates():
    assert DEVICE.products[0].flops_per_s == pytest.approx(12e6)
    assert FITS[0].model_copy(update={"points": ()}).seconds(1e6) == pytest.approx(1.1e-3)


def test_a_measured_collective_goes_by_its_points_and_never_falls_with_more_bytes():
    """A line through a link's bursts was a third too fast for large buffers."""
    points = ((1e3, 1e-3), (1e4, 3e-3), (1e5, 2e-3), (1e6, 42.5e-3), (2e6, 82.5e-3))
    fit = Fit(collective="all_reduce", ranks=2, latency_s=1e-3, bytes_per_s=1e9, points=points)
    assert fit.seconds(1e6) == pytest.approx(42.5e-3) and fit.seconds(1.5e6) == pytest.approx(62.5e-3)
    assert fit.seconds(1e4) == fit.seconds(1e5) == pytest.approx(2.5e-3)  # pooled
    assert fit.seconds(10) == pytest.approx(1e-3)
    assert fit.seconds(4e6) == pytest.approx(82.5e-3 + 2e6 * 81.5e-3 / (2e6 - 1e3))
    line = fit.model_copy(update={"points": ()})
    assert line.seconds(1e6) == pytest.approx(2e-3)
