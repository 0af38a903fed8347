"""What the architecture promises: no torch where plain values suffice, and modules that can be read in one sitting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

SOURCE = Path(__file__).resolve().parents[2] / "src" / "shoal"
MODULES = sorted(SOURCE.rglob("*.py"))
LIMITS = {"engine/step.py": 150}


@pytest.mark.parametrize(
    "names",
    [
        "shoal",
        "shoal.core.settings, shoal.core.errors",
        "shoal.job",
        "shoal.cluster",
        "shoal.plan.batch, shoal.plan.plan, shoal.plan.ranks, shoal.plan.schedule",
        "shoal.monitor, shoal.monitor.events, shoal.monitor.console",
        "shoal.cli",
    ],
)
def test_torch_is_not_imported(names: str) -> None:
    code = f"import sys, {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_modules_stay_short() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in MODULES}
    assert "engine/step.py" in lengths
    assert {name: lines for name, lines in lengths.items() if lines > LIMITS.get(name, 400)} == {}


def test_examples_hide_no_standard_module() -> None:
    """``python examples/own_loop.py`` looks for modules in the examples' folder first."""
    names = {path.stem for folder in ("examples", "benchmarks") for path in (SOURCE.parents[1] / folder).glob("*.py")}
    assert names
    assert not names & sys.stdlib_module_names
