"""Loading sinks by name, and keeping a broken one from stopping the run."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from shoal.core.errors import ConfigError
from shoal.monitor import sinks
from shoal.monitor.sinks import Sinks, load_sinks

pytestmark = pytest.mark.unit


class Toy:
    """Keeps what it was given; raises where told."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.calls: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def start(self, record: dict[str, Any]) -> None:
        self._call("start")

    def row(self, row: dict[str, Any]) -> None:
        self._call("row")
        self.rows.append(dict(row))
        row.clear()

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str) -> None:
        self.calls.append(method)
        if method == self.fails_in:
            raise RuntimeError("the server is gone")


class NoSink:
    """Lacks the methods of a sink."""


def register(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = [EntryPoint(name, value, sinks.GROUP) for name, value in values.items()]
    monkeypatch.setattr(sinks, "entry_points", lambda group: points if group == sinks.GROUP else [])


def test_built_in_sinks_load_by_name() -> None:
    assert [type(sink).__name__ for sink in load_sinks(["console", "tensorboard"])] == [
        "Console",
        "TensorBoard",
    ]


def test_a_registered_sink_loads_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, toy=f"{__name__}:Toy")
    (sink,) = load_sinks(["toy"])
    assert type(sink).__name__ == "Toy"


def test_an_unknown_sink_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no sink is called 'tensorbord'; did you mean 'tensorboard'"):
        load_sinks(["tensorbord"])


def test_a_sink_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, wandb="shoal_package_that_is_not_there:Sink")
    with pytest.raises(ConfigError, match=r"sink 'wandb' .* cannot be imported: .*; install its package"):
        load_sinks(["wandb"])


def test_something_else_under_a_sinks_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, odd=f"{__name__}:NoSink")
    with pytest.raises(ConfigError, match="made a NoSink without start, row and close"):
        load_sinks(["odd"])


@pytest.mark.parametrize("method", ["start", "row", "close"])
def test_a_sink_that_raises_is_left_out_and_the_others_go_on(method: str) -> None:
    broken, whole = Toy(fails_in=method), Toy()
    both = Sinks([broken, whole])
    both.start({"out": "x"})
    both.row({"kind": "step", "step": 1})
    both.row({"kind": "step", "step": 2})
    both.close()
    assert whole.calls == ["start", "row", "row", "close"]
    assert broken.calls.count(method) == 1
    assert broken.calls[-1] == "close", "a sink that failed may still have something to close"
    assert both.problems == [
        f"sink Toy raised RuntimeError in {method}: the server is gone; it gets no more rows, training goes on"
    ]


def test_a_sink_cannot_change_what_the_others_see() -> None:
    first, second = Toy(), Toy()
    row = {"kind": "step", "step": 1}
    Sinks([first, second]).row(row)
    assert first.rows == second.rows == [row] == [{"kind": "step", "step": 1}]
