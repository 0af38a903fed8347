"""How a command loads its code, and how it fails."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.core.errors import ShoalError


@contextmanager
def told() -> Iterator[None]:
    """Shoal's own errors as one line on stderr and exit status 1; Ctrl-C as one line and 130, as shells have it."""
    try:
        yield
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None


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
