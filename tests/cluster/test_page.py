"""What a person sees of a cluster: one page, and a picture of measured points against their fits."""

import xml.etree.ElementTree as ET

import pytest
from test_facts import CLUSTER

from shoal.cluster import picture, preset
from shoal.cluster.page import duration, page, quantity
from shoal.core.errors import ConfigError

pytestmark = pytest.mark.unit
NAMESPACE = "{http://www.w3.org/2000/svg}"


def test_a_page_has_each_link_with_the_error_of_its_fits():
    lines = page(CLUSTER).splitlines()
    assert lines[0] == "mine: 2 node(s) of 4 device(s)"
    rows = [line.split() for line in lines if "all_reduce" in line]
    assert rows == [["all_reduce", "2", "100", "us", "1", "GB/s", "25%"]] * 2  # 1 % and 49 % off
    assert any(line == "device: measured" for line in lines)


def test_a_preset_has_a_page_too():
    text = page(preset("h100", 16))
    assert (
        "bf16 989 TFLOP/s" in text
        and "NVLink 4: 363 GB/s a device" in text
        and "collective" not in text.split("\n")[-1]
    )


@pytest.mark.parametrize(("value", "text"), [(2.5e9, "2.5 GB/s"), (999, "999 B/s"), (1e15, "1 PB/s"), (0.5, "0.5 B/s")])
def test_quantity(value, text):
    assert quantity(value, "B/s") == text


@pytest.mark.parametrize(("value", "text"), [(2.0, "2 s"), (1.5e-3, "1.5 ms"), (2e-7, "0.2 us")])
def test_duration(value, text):
    assert duration(value) == text


def test_a_picture_has_every_point_and_a_line_per_series(tmp_path):
    picture.write(CLUSTER, tmp_path / "c.svg")
    root = ET.parse(tmp_path / "c.svg").getroot()
    titles = [text.text for text in root.iter(f"{NAMESPACE}text") if text.get("font-size") == "13"]
    assert titles == ["matrix products", "element-wise", "inside: 2 ranks", "between: 2 ranks"]
    circles = [circle.get("r") for circle in root.iter(f"{NAMESPACE}circle")]
    assert circles.count("3") == 1 + 1 + 2 + 2 and circles.count("4") == 4
    lines = [path for path in root.iter(f"{NAMESPACE}path") if path.get("fill") == "none"]
    assert len(lines) == 4


def test_points_stand_where_the_axes_say():
    root = ET.fromstring(picture.svg(CLUSTER))
    chart = list(root.iter(f"{NAMESPACE}g"))[2]
    ticks = {text.text: text for text in chart.iter(f"{NAMESPACE}text")}
    points = [circle for circle in chart.iter(f"{NAMESPACE}circle") if circle.get("r") == "3"]
    one_kb = float(ticks["1 kB"].get("x"))
    assert one_kb < float(points[0].get("cx")) < one_kb + 10  # 1024 bytes
    low, high = (float(ticks[name].get("y")) for name in ("1e-4", "1 ms"))
    assert high < float(points[1].get("cy")) < float(points[0].get("cy")) <= low


def test_a_web_page_has_picture_and_text(tmp_path):
    picture.write(CLUSTER, tmp_path / "c.HTML")
    text = (tmp_path / "c.HTML").read_text()
    assert text.startswith("<!DOCTYPE html>") and "<svg" in text and "mine: 2 node(s)" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"c.png is no kind of picture that is drawn; end the name in .svg or .html"):
        picture.write(CLUSTER, tmp_path / "c.png")
    with pytest.raises(ConfigError, match="h100 holds no measured points to draw; measure it: shoal measure"):
        picture.svg(preset("h100"))
    with pytest.raises(ConfigError, match=r"gone/c.svg cannot be written: No such file"):
        picture.write(CLUSTER, tmp_path / "gone" / "c.svg")
