"""Every night: models as users write them under each kind of layout: equal to one device, or refused with a reason."""

from pathlib import Path

import pytest
from tests.varied.job import KINDS

import shoal

pytestmark = [pytest.mark.ranks, pytest.mark.nightly]

JOB = str(Path(__file__).with_name("job.py"))
MESHES = ["tensor=2", "pipeline=2", "shard=2", "pipeline=2,tensor=2"]
DATA = "the model cannot be traced: module 'blocks.0' (B) cannot run without its data"
KEPT = "the model keeps 'state', which depends on weights, from one forward to the next"
#: (model, a part of the mesh) -> what is said; all else is equal.
REFUSED = {
    ("Sparse", "tensor"): DATA, ("Sparse", "pipeline"): DATA,
    ("Parameters", "pipeline"): "the model has 1 places to cut, 2 stages were asked for",
    ("Hidden", "pipeline"): KEPT,
    ("Memory", "pipeline"): "add_ writes a value that depends on weights into one that does not",
    ("Skipped", "pipeline"): "a pipeline needs the same path between blocks for all data of one shape",
}  # fmt: skip
#: Of its own samples on each data rank: another model there, and that is said.
DIFFERENT = {("Memory", "shard"), ("Hidden", "shard")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_nobody_wrote_for_this(kind):
    report = shoal.verify(JOB, fields={"kind": kind}, meshes=MESHES, global_batch=8, micro_batch=2, steps=4)
    for found in report.layouts:
        axes = [part.partition("=")[0] for part in found.mesh.split(",")]
        said = next((text for (name, axis), text in REFUSED.items() if name == kind and axis in axes), None)
        if any((kind, axis) in DIFFERENT for axis in axes):
            assert found.status == "different" and "from one forward to the next, which each data rank" in found.reason
        elif said is None:
            assert found.status == "equal" and max(found.max_rel_loss, found.max_rel_grad) < 1e-10, found
        else:
            assert found.status == "refused", found
            assert said in found.reason, found
