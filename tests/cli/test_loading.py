"""Commands load their code with the garbage collector at rest, and end in one line."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shoal.cli.loading import loading, told
from shoal.core.errors import ConfigError

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


@pytest.mark.parametrize(
    ("raised", "status", "words"),
    [
        (ConfigError("asked, found, change"), 1, "error: asked, found, change\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_what_ends_a_command_is_one_line_and_a_status(
    capsys: pytest.CaptureFixture[str], raised: BaseException, status: int, words: str
) -> None:
    with pytest.raises(SystemExit) as ended, told():
        raise raised
    assert ended.value.code == status and capsys.readouterr().err == words
