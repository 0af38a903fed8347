"""Measured points against the fits, as one SVG or HTML file that needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.cluster.facts import Cluster, Link
from shoal.cluster.fit import reach
from shoal.cluster.page import page, quantity
from shoal.core.errors import ConfigError
from shoal.core.toml import write_text

HEIGHT = 340
_ACROSS, _LEFT, _TOP, _BOTTOM = 320, 70, 34, 46  # of a chart: its width, and the room around it
_LETTER = 6.2  # of a name in the legend
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999", "#7f3c8d", "#8c564b"
)  # fmt: skip
_MANY = 100  # points of a series, from which on they are drawn small
Points = Sequence[tuple[float, float]]


class Series(NamedTuple):
    """Measured points, and the line that predicts them."""

    name: str
    points: Points
    curve: Points


class Panel(NamedTuple):
    """One chart, both axes logarithmic; ``units``: of x and y."""

    title: str
    units: tuple[str, str]
    series: list[Series]


def check(path: str | Path) -> None:
    """Raises ConfigError unless the name says SVG or HTML."""
    if Path(path).suffix.lower() not in (".svg", ".html"):
        raise ConfigError(f"{path} is no kind of picture that is drawn; end the name in .svg or .html")


def write(cluster: Cluster, path: str | Path) -> None:
    """An SVG or an HTML page, as the name ends. Raises ConfigError: another ending, nothing measured, no folder."""
    save(svg(cluster), path, cluster.name, page(cluster))


def save(picture: str, path: str | Path, name: str, words: str) -> None:
    """Write an SVG, with ``words`` above it where the file is a page. Raises ConfigError: another ending, no folder."""
    check(path)
    made = picture
    if Path(path).suffix.lower() == ".html":
        title, text = html.escape(name), html.escape(words)
        made = f'<!DOCTYPE html><meta charset="utf-8"><title>{title}</title>\n<pre>{text}</pre>\n{picture}\n'
    write_text(path, made)


def svg(cluster: Cluster) -> str:
    """The picture's text. Raises ConfigError where the cluster holds no measured points."""
    panels = _panels(cluster)
    if not panels:
        raise ConfigError(f"{cluster.name} holds no measured points to draw; measure it: shoal measure")
    return drawn(panels)


def against(title: str, unit: str, pairs: Mapping[str, Points]) -> Panel:
    """By name what was predicted over what was measured, as (measured, predicted); the line is where they agree."""
    every = [measured for points in pairs.values() for measured, _ in points]
    ends = [(value, value) for value in (min(every), max(every))]
    return Panel(title, (unit, unit), [Series(name, points, ends) for name, points in pairs.items() if points])


def drawn(panels: Sequence[Panel]) -> str:
    """Charts side by side, as an SVG's text."""
    across, width, height = 2, max(map(_width, panels)), max(map(_height, panels))
    rows = math.ceil(len(panels) / across)
    parts = [
        f'<g transform="translate({index % across * width},{index // across * height})">{_chart(panel)}</g>'
        for index, panel in enumerate(panels)
    ]
    size = f'width="{across * width}" height="{rows * height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )


def _width(panel: Panel) -> int:
    """With its legend."""
    return _LEFT + _ACROSS + 34 + math.ceil(_LETTER * max(len(series.name) for series in panel.series))


def _height(panel: Panel) -> int:
    """With its legend, which may be longer."""
    return max(HEIGHT, _TOP + 16 * len(panel.series) + 8)


def _panels(cluster: Cluster) -> list[Panel]:
    device, found = cluster.device, []
    if device.products:
        series = []
        for precision in dict.fromkeys(product.precision for product in device.products):
            mine = [product for product in device.products if product.precision == precision]
            rate = device.flops_per_s[precision] * device.matmul_share
            flops = [(2.0 * p.m * p.k * p.n, p) for p in sorted(mine, key=lambda p: p.m * p.k * p.n)]
            points = [(count, p.flops_per_s) for count, p in flops]
            series.append(
                Series(precision, points, [(count, rate * reach(p, device.matmul_half)) for count, p in flops])
            )
        found.append(Panel("matrix products", ("FLOP", "FLOP/s"), series))
    if device.streams:
        points = [(stream.bytes, stream.bytes / stream.seconds) for stream in device.streams]
        rate = device.memory_bytes_per_s * device.memory_share
        found.append(Panel("element-wise", ("B", "B/s"), [Series("x * y", points, [(x, rate) for x, _ in points])]))
    for name in ("inside", "between"):
        found += _collectives(name, getattr(cluster, name))
    return found


def _collectives(name: str, link: Link | None) -> list[Panel]:
    fits = [fit for fit in link.fits if fit.points] if link is not None else []
    found = []
    for ranks in dict.fromkeys(fit.ranks for fit in fits):
        series = []
        for fit in fits:
            if fit.ranks == ranks:
                curve = [(x, fit.seconds(x)) for x in _between(fit.points[0][0], fit.points[-1][0], 40)]
                series.append(Series(fit.collective, fit.points, curve))
        found.append(Panel(f"{name}: {ranks} ranks", ("B", "s"), series))
    return found


def _between(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (step / (count - 1)) for step in range(count)]


def _chart(panel: Panel) -> str:
    every = [point for series in panel.series for point in (*series.points, *series.curve)]
    x_axis, y_axis = (_decades([point[number] for point in every]) for number in (0, 1))
    right, bottom = _LEFT + _ACROSS, HEIGHT - _BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = (math.log10(point[0]) - x_axis[0]) / (x_axis[-1] - x_axis[0])
        y = (math.log10(point[1]) - y_axis[0]) / (y_axis[-1] - y_axis[0])
        return _LEFT + x * (right - _LEFT), bottom - y * (bottom - _TOP)

    parts = [f'<text x="{_LEFT}" y="20" font-size="13">{html.escape(panel.title)}</text>']
    for decade in x_axis:
        x, _ = place((10.0**decade, 10.0 ** y_axis[0]))
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_tick(decade, panel.units[0])}</text>')
    for decade in y_axis:
        _, y = place((10.0 ** x_axis[0], 10.0**decade))
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(decade, panel.units[1])}</text>')
    for number, series in enumerate(panel.series):
        colour = _COLOURS[number % len(_COLOURS)]
        line = "L".join("{:.1f} {:.1f}".format(*place(point)) for point in series.curve)
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}"/>')
        radius = 3 if len(series.points) < _MANY else 1.5
        for point in series.points:
            x, y = place(point)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>')
        y = _TOP + 12 + 16 * number
        parts.append(f'<circle cx="{right + 14}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{right + 24}" y="{y}">{html.escape(series.name)}</text>')
    return "".join(parts)


def _decades(values: list[float]) -> list[int]:
    """Powers of ten around all values, every second one or fewer where there are many."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    step = max(1, math.ceil((high - low) / 6))
    return list(range(low, high + step, step))


def _tick(decade: int, unit: str) -> str:
    if unit == "s":
        return {0: "1 s", -3: "1 ms", -6: "1 us"}.get(decade, f"1e{decade}")
    return quantity(10.0**decade, unit)
