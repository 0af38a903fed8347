"""Tensor parallelism: weights divided over ranks that read the same samples."""

from shoal.parallel.tensor.apply import Layout, apply
from shoal.parallel.tensor.part import plain

__all__ = ["Layout", "apply", "plain"]
