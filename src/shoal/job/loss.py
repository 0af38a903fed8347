"""The loss of a micro-batch as a sum and a count, so that it can be normalised once, over the global batch."""

from __future__ import annotations

from typing import Any, NamedTuple


class Loss(NamedTuple):
    """A summed loss and the number of items (tokens, samples) it was summed over.

    The step's loss is (sum of all sums) / (sum of all counts) over the global batch, in every layout.
    ``sum``: a scalar tensor that requires grad. ``count``: int, float or scalar tensor, finite, >= 0.
    """

    sum: Any
    count: Any
