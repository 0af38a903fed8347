"""Families of models that nobody rewrote, under layouts: three steps are those of one process, in float64."""

from pathlib import Path

import pytest
from tests.zoo.cells import LAYOUTS, NOT_DIVIDED, cell, expected_status
from tests.zoo.families import FAMILIES


def hold(family: str, layouts: tuple[str, ...], folder: Path) -> None:
    for layout in layouts:
        found = cell(family, layout, folder)
        assert found.status == expected_status(family, layout), f"{family}, {layout}: {found.status}: {found.told}"
        if found.status == "refused":
            assert "no weight of the model can be divided" in found.told


def two(family: str) -> tuple[str, str]:
    """A layout of two ranks and one of four: three families in a row meet all six."""
    number = list(FAMILIES).index(family) % 3
    return LAYOUTS[number], LAYOUTS[3 + (number + 1) % 3]


@pytest.mark.ranks
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_in_one_process(family, tmp_path):
    hold(family, two(family), tmp_path)


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_in_one_process_under_every_layout(family, tmp_path):
    hold(family, LAYOUTS, tmp_path)


@pytest.mark.unit
def test_at_least_nine_cells_in_ten_are_split():
    cells = [expected_status(family, layout) for family in FAMILIES for layout in LAYOUTS]
    assert len(FAMILIES) >= 20
    assert NOT_DIVIDED.keys() <= FAMILIES.keys()
    assert cells.count("split") >= 0.9 * len(cells)
