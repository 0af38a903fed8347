"""``shoal --help`` answers at once."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call, shoal

from shoal.engine.settings import RunSettings

pytestmark = pytest.mark.unit


def test_help_answers_at_once_without_torch(tmp_path: Path) -> None:
    tries = []
    for _ in range(3):  # processor time: what the command itself takes, whatever else the machine does
        before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        result = shoal("--help", cwd=tmp_path, fresh=True)
        assert result.status == 0
        assert "train" in result.out
        tries.append(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before)
    assert min(tries) < 0.4
    listed = call([sys.executable, "-X", "importtime", "-m", "shoal", "train", "--help"], tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in listed.err.splitlines() if line.startswith("import time:")}
    assert "shoal.cli.train" in imported
    assert not {"torch", "numpy"} & imported


def test_every_setting_is_a_flag_with_its_default(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "train", "--help"],
        cwd=tmp_path, env={"COLUMNS": "200", "PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    for name, field in RunSettings.model_fields.items():
        assert "--" + name.replace("_", "-") in done.stdout
        assert field.default is None or str(field.default).strip("()',") in done.stdout


def test_help_of_measure_needs_no_torch(tmp_path: Path) -> None:
    listed = call([sys.executable, "-X", "importtime", "-m", "shoal", "measure", "--help"], tmp_path, COLUMNS="200")
    imported = {line.rpartition("|")[2].strip() for line in listed.err.splitlines() if line.startswith("import time:")}
    assert listed.status == 0 and not {"torch", "numpy"} & imported
    for flag in ("--out", "-o", "--workers", "--json", "--plot", "--folder"):
        assert flag in listed.out
