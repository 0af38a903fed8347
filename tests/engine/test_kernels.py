"""Which float32 product a run uses: the fastest that is float32, where it gains enough to be worth other rounding."""

import pytest
import torch

from shoal.engine.kernels import choose, measure, select

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("default_ms", "other_ms", "other_error", "chosen"),
    [
        (2.0, 0.9, 3.5e-7, "medium"),  # a processor whose default kernel runs at half its rate
        (2.0, 1.9, 3.5e-7, "highest"),  # a gain that is not worth other rounding
        (2.0, 0.5, 3e-3, "highest"),  # fast because it rounds to bfloat16
        (2.0, 3.0, 2e-7, "highest"),
    ],
)
def test_the_fastest_product_that_is_float32_is_chosen_where_it_gains(default_ms, other_ms, other_error, chosen):
    measured = {
        "highest": {"ms": default_ms, "error": 2.5e-7},
        "medium": {"ms": other_ms, "error": other_error},
    }
    assert choose(measured) == chosen


def test_the_record_says_what_was_measured_and_a_resumed_run_keeps_its_choice():
    before = torch.get_float32_matmul_precision()
    found = select("auto", "cpu", None)
    assert torch.get_float32_matmul_precision() == before
    assert found["float32_matmul"] in ("highest", "medium")
    assert "highest" in found["why"] and "medium" in found["why"] and " ms, error " in found["why"]
    assert select("auto", "cpu", {"float32_matmul": "medium"}) == {"float32_matmul": "medium"}
    assert select("default", "cpu", None)["why"] == "torch's default, as asked"
    assert select("auto", "cuda", None)["float32_matmul"] == "highest"


def test_measured_errors_are_float32s():
    assert all(0 < entry["error"] < 1e-5 for name, entry in measure(rounds=1).items() if name == "highest")
