"""``shoal rehearse``: what is printed of each rank, the object of --json, and the exit status."""

from pathlib import Path

import pytest
from commands import shoal as shoal_command

from shoal.cli.rehearse import FLAGS
from shoal.verify.rehearsal import SETTINGS

GPT_FILE = Path(__file__).resolve().parents[2] / "examples" / "gpt.py"


@pytest.mark.unit
def test_the_command_prints_each_rank_and_an_object(tmp_path):
    done = shoal_command(
        "rehearse", GPT_FILE, "layers=2", "width=16", "context=8", "--mesh", "pipeline=2,shard=2",
        "--shard-level", 1, "--clip", "none", "--global-batch", 8, "--schedule", "gpipe", "--ranks", "distinct",
        "--cluster", "h100", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.status == 0, done.err
    assert [each["rank"] for each in done.summary["ranks"]] == [0, 2] and done.summary["world"] == 4
    assert "rank 2 (pipeline 1, shard 0)" in done.out and "reserved and" in done.out and "predicted" in done.out
    assert "Counted with the CPU's kernels" in done.out and not list(tmp_path.iterdir())
    wrong = shoal_command("rehearse", GPT_FILE, "--mesh", "pipeline=2", "--rank", 4, cwd=tmp_path)
    assert wrong.status == 1 and "error: rank 4 is not on the mesh" in wrong.err
    assert tuple(FLAGS) == SETTINGS
