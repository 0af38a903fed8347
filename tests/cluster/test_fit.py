"""Fits find the constants that made the points, whatever a few disturbed points say."""

import pytest

from shoal.cluster.facts import Product
from shoal.cluster.fit import half_and_rates, line, line_error, reach

pytestmark = pytest.mark.unit

SIZES = [1024.0 * 4**step for step in range(10)]


@pytest.mark.parametrize(("latency", "rate"), [(1e-6, 4e11), (3e-4, 1e9), (2e-3, 6e6), (1e-9, 1e9)])
def test_line_finds_latency_and_rate(latency, rate):
    found = line([(size, latency + size / rate) for size in SIZES])
    assert found[1] == pytest.approx(rate, rel=0.01)
    assert found[0] == pytest.approx(latency, rel=0.02) or found[0] < 1e-7


def test_small_sizes_count_as_much_as_large_ones():
    """With plain least squares the largest size alone would decide, and the latency would be anything."""
    points = [(size, (1e-4 + size / 1e9) * (1.02 if number % 2 else 0.98)) for number, size in enumerate(SIZES)]
    latency, rate = line(points)
    assert latency == pytest.approx(1e-4, rel=0.05) and rate == pytest.approx(1e9, rel=0.05)
    assert line_error(points, latency, rate) < 0.03


def test_one_disturbed_point_changes_little():
    points = [(size, 1e-4 + size / 1e9) for size in SIZES]
    points[3] = (points[3][0], 50 * points[3][1])
    latency, rate = line(points)
    assert latency == pytest.approx(1e-4, rel=0.15) and rate == pytest.approx(1e9, rel=0.05)


def test_what_the_points_leave_open_stays_at_what_was_seen():
    latency, rate = line([(size, 1e-3) for size in SIZES[:4]])
    assert latency == pytest.approx(1e-3, rel=0.05)
    assert SIZES[3] / 1e-3 < rate < 1e12


def made(half, precision="fp32", peak=1e11, sizes=(16, 64, 256, 1024)):
    for m in sizes:
        for n in sizes:
            shape = Product(precision=precision, m=m, k=256, n=n, seconds=1.0)
            yield shape.model_copy(update={"seconds": shape.flops_per_s / (peak * reach(shape, half))})


def test_each_length_that_is_the_half_halves_the_reach():
    shape = Product(precision="fp32", m=1, k=3, n=9, seconds=1.0)
    assert reach(shape, 0) == 1
    assert reach(shape, 3) == pytest.approx(1 / 4 * 3 / 6 * 9 / 12)


@pytest.mark.parametrize("half", [0.0, 1.25**12, 1.25**16])
def test_half_and_rates_find_what_made_the_products(half):
    products = [*made(half), *made(half, "bf16", 3e11)]
    found, rates, error = half_and_rates(products, 0.0)
    assert found == pytest.approx(half) and error < 1e-9
    assert rates == pytest.approx({"fp32": 1e11, "bf16": 3e11})


def test_short_products_do_not_count_where_there_are_long_ones():
    slow = [product.model_copy(update={"seconds": product.seconds * 100}) for product in made(0.0, sizes=(1, 2))]
    short = max(product.seconds for product in slow)
    found, rates, _ = half_and_rates([*slow, *made(0.0, sizes=(512, 1024))], short * 1.01)
    assert (found, rates["fp32"]) == (0.0, pytest.approx(1e11))


def test_no_rate_is_far_beyond_the_best_one_seen():
    products = list(made(1000.0, sizes=(8, 16)))
    best = max(product.flops_per_s for product in products)
    assert half_and_rates(products, 0.0)[1]["fp32"] <= 1.5 * best
