"""``shoal measure`` with a grid of a second, so that a test can wait for it: arguments as the command's own."""

from __future__ import annotations

import sys

import shoal.launch.measure as module
from shoal.cli import main
from shoal.cluster.grid import KIB, MIB, Grid


def tiny() -> Grid:
    """A grid that takes a second or two."""
    return Grid(
        main_precision="fp32",
        products=((16, 16, 16), (64, 64, 64), (128, 64, 256)),
        precisions=("fp64",),
        corners=((64, 64, 64),),
        stream_bytes=(48 * KIB, 768 * KIB),
        largest_bytes=256 * KIB,
        sizes=8,
        attentions=((1, 2, 32, 16),),
        function=(64, 64),
        optimizer_numel=64 * KIB,
        disk_bytes=MIB,
        budget_s=1.0,
    )


if __name__ == "__main__":
    module.grid = lambda kind: tiny()
    sys.argv[1:1] = ["measure"]
    main()
