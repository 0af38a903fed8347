"""How a job is run, as plain values and their arithmetic. No torch. ``shoal.plan(job, ...)`` finds the best one."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CalledModule(ModuleType):
    """This package under the name of what it is for, so that ``shoal.plan(...)`` is a call like ``shoal.train``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("shoal.launch.planning").plan(*args, **kwargs)  # a layer above: loaded when called


sys.modules[__name__].__class__ = _CalledModule
