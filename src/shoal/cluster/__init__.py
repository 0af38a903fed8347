"""What the hardware is: presets with their sources, files, and measuring. No torch but in ``measure.py``."""

from __future__ import annotations

from shoal.cluster.facts import Cluster, Device, Fit, Link
from shoal.cluster.presets import find, names, preset

__all__ = ["Cluster", "Device", "Fit", "Link", "find", "names", "preset"]
