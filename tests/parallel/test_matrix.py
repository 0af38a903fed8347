"""Every night: a GPT of 8 blocks under each layout x schedule x accumulation x recompute, and under all of 8 ranks."""

from functools import cache
from itertools import product
from pathlib import Path

import pytest
from tests.parallel.test_meshes import gpt_job, same, trained

import shoal
from shoal.plan.mesh import Mesh
from shoal.plan.ranks import data_ranks
from shoal.plan.schedule import SCHEDULES, conflicts

pytestmark = [pytest.mark.ranks, pytest.mark.nightly]

GLOBAL_BATCH, STEPS = 16, 2  # of 20 samples: the second window is short
SIZES = {"width": 64, "heads": 8, "length": 32}
MESHES = (
    "replicate=2", "shard=2", "tensor=2", "pipeline=2",
    "replicate=2,shard=2", "replicate=2,tensor=2", "shard=2,tensor=2",
    "pipeline=2,replicate=2", "pipeline=2,shard=2", "pipeline=2,tensor=2",
)  # fmt: skip
CHUNKS = {"gpipe": 1, "1f1b": 1}  # of the other schedules each rank runs two


def cells() -> list[tuple[str, dict]]:
    """Every mesh with its settings; what a schedule's rule on micro-batches forbids is left out."""
    found = []
    for text, accumulation, recompute in product(MESHES, (1, 4), ("none", "selective", "full")):
        mesh = Mesh.parse(text)
        micro_batch = GLOBAL_BATCH // (data_ranks(mesh) * accumulation)
        given = {"mesh": text, "micro_batch": micro_batch, "recompute": recompute}
        if mesh.pipeline == 1:
            found.append((text, given))
            continue
        for name in SCHEDULES:
            chunks = CHUNKS.get(name, 2)
            if not conflicts(name, mesh.pipeline, chunks, accumulation):
                found.append((text, {**given, "schedule": name, "chunks": chunks}))
    return found


@cache
def alone(folder: Path):
    return trained(gpt_job(**SIZES), folder, 1, STEPS, GLOBAL_BATCH, micro_batch=4)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.parametrize(("text", "given"), cells(), ids=lambda value: str(value).replace("'", ""))
def test_every_cell_computes_what_one_process_does(folder, tmp_path, text, given):
    found = trained(gpt_job(**SIZES), tmp_path, Mesh.parse(text).size, STEPS, GLOBAL_BATCH, **given)
    same(found, alone(folder))


def test_every_way_to_lay_out_8_ranks_computes_what_one_device_does():
    job = Path(__file__).parents[1] / "verify" / "eight.py"
    report = shoal.verify(str(job), world=8, global_batch=GLOBAL_BATCH, steps=1)
    assert len(report.layouts) == 20
    for one in report.layouts:
        assert one.status == "equal" and max(one.max_rel_loss, one.max_rel_grad, one.max_rel_weight) < 1e-10, one
