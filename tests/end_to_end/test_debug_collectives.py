"""A job that calls torch.distributed on one worker only."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import rows, shoal, write_job

pytestmark = pytest.mark.ranks


def test_a_call_of_the_users_on_one_worker_only_is_named_with_the_others_call(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/22071 https://github.com/pytorch/pytorch/issues/78022"""
    write_job(tmp_path)
    result = shoal(
        "train", "tiny.py", "--workers", 2, "--global-batch", 8, "--steps", 3, "fault=mixed", "at=3",
        "--debug-collectives", "--out", "out", cwd=tmp_path, timeout_s=30,
    )  # fmt: skip
    assert result.status == 1
    said = result.err.splitlines()[-1] if "Detected" in result.err.splitlines()[-1] else result.err
    assert "Detected mismatch between collectives on ranks" in said
    assert "OpType=BROADCAST, TensorShape=[3]" in said and "OpType=ALLREDUCE" in said
    assert "Rank 0 is running" in said and "Rank 1 is running" in said
    assert rows(tmp_path / "out"), "calls that agree are let through"
