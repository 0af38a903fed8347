"""How a command loads its code."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Import without collecting garbage, and leave what was made out of all later collections, the last one included.

    Modules live until the process ends, but looking through them again and again is a third of loading torch, and
    once more of ending; a worker, being a fork, copies what is looked through.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
