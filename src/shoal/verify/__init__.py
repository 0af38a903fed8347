"""The proof that a layout computes what one device computes. ``shoal.verify(job, ...)`` calls ``verify``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from shoal.verify.report import LayoutResult, Report
from shoal.verify.verify import verify, verify_file

__all__ = ["LayoutResult", "Report", "verify", "verify_file"]


class _CalledModule(ModuleType):
    """This package under the name of its one function, so that ``shoal.verify(...)`` is a call like ``shoal.train``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _CalledModule
