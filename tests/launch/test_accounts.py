"""What a run leaves besides what it trained: its plan, where its settings are from, what it reached of the peak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.launch.test_trials import JOB, here

import shoal
from shoal.cluster.cached import save
from shoal.launch.measure import cache_folder, fingerprint
from shoal.monitor.summary import start_text
from shoal.plan.mesh import Mesh
from shoal.plan.plan import Plan

pytestmark = pytest.mark.ranks

WIDTH, PEAK = 64, 1e11
FLOPS = 2 * (8 * WIDTH + WIDTH)  # of a sample's forward: two products


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job's file, on a machine that was measured with two workers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save(cache_folder(), fingerprint("cpu", 2), here(PEAK))
    (tmp_path / "accounted.py").write_text(JOB)
    return str(tmp_path / "accounted.py")


def trained(job: str, out: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's summary and its record."""
    found = shoal.train(job, out=str(out), sinks=(), save_every=None, **settings)
    return found, json.loads((out / "run.json").read_text())


def test_a_mesh_that_was_given(tmp_path: Path, job: str) -> None:
    found, record = trained(job, tmp_path / "run", mesh="tensor=2", micro_batch=2)
    plan = Plan.read(tmp_path / "run" / "plan.toml")
    assert plan.mesh == Mesh(tensor=2) and plan.model_dump(mode="json") == record["plan"] and plan.clip == 1.0
    assert found["model_flops_per_s"] == pytest.approx(3 * FLOPS * found["samples_per_s"])
    assert found["utilisation"] == pytest.approx(found["model_flops_per_s"] / (2 * PEAK))


def test_a_layout_that_was_planned(tmp_path: Path, job: str) -> None:
    found, record = trained(job, tmp_path / "run", workers=2)
    assert record["origins"]["settings"]["plan"] == "planned"
    path = tmp_path / "run" / "plan.toml"
    assert f"as planned: --plan={path}" in start_text(record)
    assert Plan.read(path).model_dump(mode="json") == record["plan"]
    assert found["model_flops_per_s"] == pytest.approx(3 * FLOPS * found["samples_per_s"])
    assert found["utilisation"] == pytest.approx(found["model_flops_per_s"] / (2 * PEAK))


def test_a_model_that_nothing_traced(tmp_path: Path, job: str) -> None:
    found, record = trained(job, tmp_path / "run", workers=1)
    assert found["model_flops_per_s"] is None and found["utilisation"] is None
    assert Plan.read(tmp_path / "run" / "plan.toml").mesh == Mesh()
    assert record["origins"]["settings"]["plan"] == "default"
