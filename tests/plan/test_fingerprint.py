"""A model told line by line, and a plan for another one."""

import pytest

from shoal.core.errors import ConfigError
from shoal.plan.fingerprint import Parameter, check_model, fingerprint

pytestmark = pytest.mark.unit


def model(blocks: int, width: int = 16) -> tuple[str, ...]:
    found = [Parameter("tokens.weight", (61, width), "float32")]
    for block in range(blocks):
        found += [
            Parameter(f"blocks.{block}.feed.0.weight", (4 * width, width), "float64"),
            Parameter(f"blocks.{block}.feed.2.weight", (width, 4 * width), "float32"),
        ]
    return fingerprint([*found, Parameter("scale", (), "complex64")])


def test_repeated_blocks_are_one_line_and_what_differs_between_them_is_not() -> None:
    assert model(3) == (
        "tokens.weight 61x16", "blocks.{0-2}.feed.0.weight 64x16", "blocks.{0-2}.feed.2.weight 16x64",
        "scale scalar complex64",
    )  # fmt: skip
    assert model(1)[1] == "blocks.0.feed.0.weight 64x16"
    odd = [Parameter(f"layers.{n}.w", (4 if n == 1 else 8,), "float32") for n in (0, 1, 2, 3, 7)]
    assert fingerprint(odd) == ("layers.{0,2-3,7}.w 8", "layers.1.w 4")


def test_a_plan_for_another_model_is_refused_with_what_differs_first() -> None:
    check_model(model(3), model(3), "plan.toml")
    text = (
        r"plan.toml is for another model: it has 'blocks.\{0-2\}.feed.0.weight 64x16', 'blocks.* where this model has "
        r"'blocks.\{0-3\}.feed.0.weight 64x16', 'blocks.*; make a plan for this model"
    )
    with pytest.raises(ConfigError, match=text):
        check_model(model(3), model(4), "plan.toml")
    with pytest.raises(ConfigError, match="'scale scalar complex64' where this model has nothing"):
        check_model(model(3), model(3)[:-1], "plan.toml")
    with pytest.raises(ConfigError, match="it has 'a', 'b', 'c' and 1 more where this model has nothing"):
        check_model([*"abcd"], [], "plan.toml")
