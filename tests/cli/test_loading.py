"""Commands load their code with the garbage collector at rest."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shoal.cli.loading import loading

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def test_what_was_loaded_is_never_looked_through_again_and_collecting_goes_on() -> None:
    with loading():
        assert not gc.isenabled()
        module = [[]]
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0 and not any(known is module for known in gc.get_objects())


def test_code_that_does_not_load_leaves_collecting_on() -> None:
    with pytest.raises(ImportError), loading():
        import shoal.no_such_module  # noqa: F401
    assert gc.isenabled()
