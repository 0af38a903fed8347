"""Positions shared out between tensor regions: a run computes what one process computes."""

from __future__ import annotations

import pytest
from tests.tensor_cases import FAMILIES, OWN, family
from tests.tensor_training import hold

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", list(OWN))
def test_our_models(name, degree):
    print(name, hold(OWN[name], degree, sequence=True))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_fam(name):
    print(name, hold(family(name), 2, sequence=True))
