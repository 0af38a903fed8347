"""``shoal verify``: flags, the table, the object that --json prints, and the exit status."""

import math
import sys
from pathlib import Path

import pytest
from commands import call, shoal

from shoal.cli.verify import FLAGS
from shoal.verify.verify import PRECISION, SETTINGS, STEPS

JOB = Path(__file__).resolve().parents[1] / "verify" / "tied.py"
SMALL = ("--global-batch", 8, "--micro-batch", 2, "--steps", 1)


@pytest.mark.unit
def test_help_needs_no_torch_and_names_the_commands_own_defaults(tmp_path: Path) -> None:
    listed = call([sys.executable, "-X", "importtime", "-m", "shoal", "verify", "--help"], tmp_path, COLUMNS="200")
    imported = {line.rpartition("|")[2].strip() for line in listed.err.splitlines() if line.startswith("import time:")}
    assert listed.status == 0 and not {"torch", "numpy"} & imported
    for flag in (*FLAGS, "world", "json"):
        assert "--" + flag.replace("_", "-") in listed.out
    assert set(FLAGS) == set(SETTINGS) and FLAGS["steps"] == str(STEPS) and FLAGS["precision"] == PRECISION
    assert "(default: 3)" in listed.out and "(default: fp64)" in listed.out


@pytest.mark.ranks
def test_equal_layouts_end_with_status_0_and_one_json_object(tmp_path: Path) -> None:
    done = shoal(
        "verify", JOB, "tied=false", "--mesh", "pipeline=2", "--schedule", "gpipe", *SMALL, "--json", cwd=tmp_path
    )
    assert done.status == 0, done.err
    ((found,), keys) = done.summary["layouts"], list(done.summary)
    assert keys == ["layouts"] and found["mesh"] == "pipeline=2" and found["status"] == "equal"
    assert list(found) == [
        "mesh", "status", "max_rel_loss", "max_rel_grad", "max_rel_weight", "first_difference", "reason", "split",
    ]  # fmt: skip
    assert found["max_rel_grad"] < 1e-10 and found["first_difference"] is None and found["split"] == {"pipeline": 1.0}
    assert "the same: the layout computes what one device computes" in done.out
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.ranks
def test_a_difference_ends_with_status_1_and_is_named(tmp_path: Path) -> None:
    done = shoal("verify", JOB, "fault=halved-gradient", "--mesh", "replicate=2", *SMALL, "--json", cwd=tmp_path)
    assert done.status == 1
    (found,) = done.summary["layouts"]
    assert found["status"] == "different" and math.isclose(found["max_rel_grad"], 0.5, rel_tol=1e-6)
    assert found["first_difference"] == "step 1: gradient of 'blocks.0.feed.0.weight'"
    assert "NOT THE SAME: 1 of 1 layouts" in done.out and found["reason"] in done.out


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        (("--mesh", "replicate=3"), 0, "global batch 8 cannot be cut over 3 workers"),
        ((), 1, "error: verify takes one of --mesh, --plan and --world, found none of them"),
        (("--world", 2, "--mesh", "tensor=2"), 1, "found --mesh and --world"),
        (("--mesh", "tensr=2"), 1, "did you mean 'tensor'"),
        (("--mesh", "replicate=2", "tide=true"), 1, "no field 'tide' in Job; did you mean 'tied'?"),
        (("--mesh", "replicate=2", "--schedule", "zigzag"), 1, "zigzag"),
    ],
)
def test_what_is_refused(tmp_path: Path, args: tuple, status: int, text: str) -> None:
    done = shoal("verify", JOB, *args, *SMALL, cwd=tmp_path)
    assert done.status == status and text in done.out + done.err
    assert "Traceback" not in done.err
