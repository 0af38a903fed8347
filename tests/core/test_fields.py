"""Named values, nested: merged onto defaults, read by declared type, refused where they fit nothing."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from shoal.core.errors import ConfigError
from shoal.engine.settings import RunSettings
from shoal.job import Job
from shoal.launch.jobfile import make_job, origins

pytestmark = pytest.mark.unit


class Inner(BaseModel):
    eps: float = 1e-8


class Optim(BaseModel):
    lr: float = 1e-3
    weight_decay: float = 0.01
    inner: Inner = Inner()


@dataclasses.dataclass
class Shape:
    x: int = 1
    y: int = 2


class Fielded(Job):
    """One field of each kind."""

    lr: float = 1e-2
    width: int = 8
    clip: float | None = 1.0
    loose: Any = 1e-2
    either: int | str = 3
    betas: tuple[float, float] = (0.9, 0.99)
    optim: Optim = Optim(weight_decay=0.3)
    shape: Shape = Shape(x=7)
    level: Literal[1, 2, "all"] = 2
    table: dict = {"x": 1, "y": {"u": 1, "v": 2}}
    open: dict[str, float] = {}
    stages: list[Shape] = []
    other: Optim | None = None


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "0.00001", "1E-5"])
@pytest.mark.parametrize(
    "name", ["lr", "loose", "optim.lr", "optim.inner.eps", "open.new", "other.lr", "clip", "either_float"]
)
def test_a_number_given_as_text_is_a_number(name: str, text: str) -> None:
    """It stayed text and failed much later, or compared as text.

    https://github.com/hiyouga/LlamaFactory/issues/4014 https://github.com/h2oai/h2o-llmstudio/pull/699
    https://github.com/allenai/allennlp/issues/1429
    """

    class Both(Fielded):
        either_float: float | str = 0.1

    made = make_job(Both, [f"{name}={text}"])
    value: Any = made
    for part in name.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert type(value) is float and value == 1e-5
    if "." not in name:
        assert getattr(Both(**{name: float(text)}), name) == 1e-5


def test_a_number_that_is_none_is_refused_naming_key_type_and_value() -> None:
    """https://github.com/allenai/allennlp/issues/1429"""
    words = ["lr=abc", "loose=abc", "optim.inner.eps=abc", "shape.y=1.5", "open.k=abc", "other.lr=abc", "width=wide"]
    with pytest.raises(ConfigError) as caught:
        make_job(Fielded, words)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(words)
    for name, kind in (
        ("lr", "float"), ("loose", "float"), ("optim.inner.eps", "float"), ("shape.y", "int"), ("open", "float"),
        ("other.lr", "float"), ("width", "int"),
    ):  # fmt: skip
        assert any(line.startswith(f"Fielded: {name}") and f"(expected {kind}" in line.replace("dict[str, ", "")
                   for line in lines), name  # fmt: skip
    with pytest.raises(ConfigError, match=r"Fielded: lr = 'abc' \(expected float\)"):
        Fielded(lr="abc")
    with pytest.raises(ConfigError, match=r"settings: clip = 'abc' \(expected float \| None\)"):
        RunSettings.parse({"clip": "abc"}, "settings")


def test_a_default_of_the_wrong_type_is_refused_and_a_text_that_is_a_number_read() -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/4014"""

    class Typed(Job):
        lr: float = "1e-5"  # type: ignore[assignment]
        inner: Inner = Inner.model_construct(eps="1e-5")

    made = Typed()
    assert (made.lr, made.inner.eps) == (1e-5, 1e-5)

    class Wrong(Job):
        lr: float = "fast"  # type: ignore[assignment]
        inner: Inner = Inner.model_construct(eps="small")

    with pytest.raises(ConfigError) as caught:
        Wrong()
    assert "lr = 'fast' (expected float)" in str(caught.value)
    assert "inner.eps = 'small' (expected float)" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("widht", 3, "no field 'widht' in Fielded; did you mean 'width'?"),
        ("optim", {"weigth_decay": 0.1}, "no field 'optim.weigth_decay' in Optim; did you mean 'weight_decay'?"),
        ("optim", {"inner": {"esp": 0.1}}, "no field 'optim.inner.esp' in Inner; did you mean 'eps'?"),
        ("other", {"weigth_decay": 0.1}, "no field 'other.weigth_decay' in Optim; did you mean 'weight_decay'?"),
        ("shape", {"yy": 1}, "no field 'shape.yy' in Shape; did you mean 'y'?"),
        ("stages", [{"x": 1}, {"xx": 1}], "no field 'stages.1.xx' in Shape; did you mean 'x'?"),
        ("table", {"xy": 1}, "no field 'table.xy' in this dict"),
        ("table", {"y": {"uu": 1}}, "no field 'table.y.uu' in this dict"),
    ],
)
def test_an_unknown_name_is_refused_at_every_depth_with_its_path_and_the_nearest(name, value, said) -> None:
    """A misspelt key was ignored; training ran with defaults.

    https://github.com/deepspeedai/DeepSpeed/issues/774 https://github.com/ROCm/aorta/pull/247
    """
    for make in (lambda: Fielded(**{name: value}), lambda: make_job(Fielded, {name: value})):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value).startswith(f"Fielded: {said}")
        assert len(str(caught.value).splitlines()) == 1


def test_an_open_dict_takes_any_name() -> None:
    assert make_job(Fielded, ["open.a=1", "open.b=2"]).open == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    "given", [["optim.lr=5", "shape.y=5", "table.y.u=5"], {"optim": {"lr": 5}, "shape.y": 5, "table": {"y": {"u": 5}}}]
)
def test_one_nested_value_leaves_its_siblings_as_they_were(given) -> None:
    """Giving one nested option wiped its siblings. https://github.com/modelscope/ms-swift/pull/9691"""
    made = make_job(Fielded, given)
    assert made.optim == Optim(lr=5, weight_decay=0.3)
    assert made.shape == Shape(x=7, y=5)
    assert made.table == {"x": 1, "y": {"u": 5, "v": 2}}
    assert Fielded().table == {"x": 1, "y": {"u": 1, "v": 2}}, "the default is as it was"


def test_typed_words_for_lists_none_and_json() -> None:
    assert [make_job(Fielded, [f"level={word}"]).level for word in ("1", "all")] == [1, "all"]
    with pytest.raises(ConfigError, match=r"level = '3' \(expected Literal\[1, 2, 'all'\]\)"):
        make_job(Fielded, ["level=3"])
    made = make_job(Fielded, ["betas=0.8,0.95", "clip=none", 'stages=[{"x": 3}]', 'optim={"lr": "1e-5"}', "either=7"])
    assert (made.betas, made.clip, made.stages) == ((0.8, 0.95), None, [Shape(3, 2)])
    assert made.optim == Optim(lr=1e-5, weight_decay=0.3)
    assert made.either == 7
    assert make_job(Fielded, ["either=seven"]).either == "seven"
    with pytest.raises(ConfigError, match="optim = '{lr' is not JSON"):
        make_job(Fielded, ["optim={lr"])


@pytest.mark.parametrize(
    "words", [["lr=1", "lr=2"], ["optim.lr=1", 'optim={"lr": 2}'], ['optim={"lr": 2}', "optim.lr=1"]]
)
def test_a_value_given_twice_is_refused(words) -> None:
    """https://github.com/Azure/azureml-assets/pull/1331 https://github.com/axolotl-ai-cloud/axolotl/pull/1388"""
    with pytest.raises(ConfigError, match="given twice"):
        make_job(Fielded, words)


def test_every_value_has_an_origin() -> None:
    """https://github.com/modelscope/ms-swift/pull/9691"""

    made = make_job(Fielded, ["optim.lr=5", "width=3"])
    found = origins(made, ["optim.lr", "width"], ["clip"])
    assert {name for name, origin in found["fields"].items() if origin == "given"} == {"optim.lr", "width"}
    assert found["fields"]["optim.weight_decay"] == "job"
    assert found["settings"]["clip"] == "given" and found["settings"]["seed"] == "default"
