"""One rank of a world that torchrun set up: ``joined.py CASE OUT``, where CASE is one of ``scripts.py``."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts import entry

from shoal.launch.watch import Watch
from shoal.launch.worker import open_beats, watch_joined
from shoal.launch.world import find_world

if __name__ == "__main__":
    case, out = sys.argv[1], Path(sys.argv[2])
    world = find_world()
    assert world is not None
    (out / "launch").mkdir(parents=True, exist_ok=True)
    watch_joined(out, world, open_beats(out, world), Watch(least_s=1.0, pause_s=30.0))
    sys.exit(entry(case, out, world))
