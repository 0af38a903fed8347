"""``shoal measure`` with a grid of a second, so that a test can wait for it: arguments as the command's own."""

from __future__ import annotations

import sys

import shoal.launch.measure as module
from shoal.cli import main
from shoal.cluster.grid import tiny

if __name__ == "__main__":
    module.grid = lambda kind: tiny()
    sys.argv[1:1] = ["measure"]
    main()
