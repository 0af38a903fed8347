"""Codecs are rehearsed as they run and priced as they are rehearsed; a verification leaves them off and says so."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal import Job, Loss
from shoal.core.errors import ConfigError
from shoal.verify import verify
from shoal.verify.rehearsal import rehearse

FIGURES_BYTES = 8 * 64  # of the step's own sum, at most


class Wide(Job):
    """A network whose two matrices are large enough for a codec."""

    defaults: ClassVar[dict] = {"compress": "topk:0.01"}

    def model(self):
        return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 32))

    def data(self):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(256, 48, generator=generator), torch.randint(32, (256,), generator=generator)
        return list(zip(x, y, strict=True))

    def loss(self, output, targets):
        return Loss(F.cross_entropy(output, targets, reduction="sum"), len(targets))

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.unit
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("compress", ["topk:0.01", "powersgd:2", "bf16", "int8"])
def test_a_rehearsal_sees_the_bytes_that_are_foretold(ranks, compress):
    """One bucket of matrices and one of vectors: each stage of the codec once, and one sum of the rest."""
    (each,) = rehearse(Wide(), mesh=f"replicate={ranks}", compress=compress, global_batch=16).ranks
    counted = {(e.kind, e.phase): (e.count, e.bytes) for e in each.counted.collectives}
    figures = counted.pop(("all_reduce", "sync_exposed"))
    gathered = ranks * (47 + 31) * 8  # a hundredth of 4608 and 3072, rounded up
    sides = 2 * (96 + 48 + 32 + 96) * 4
    vectors = (96 + 32) * 4
    numbers = 4608 + 3072
    scaled = numbers * 260 // 256  # whole blocks on 2 ranks, not on 8
    expected = {
        "topk:0.01": {"all_gather": (1, gathered), "all_reduce": (1, vectors)},
        "powersgd:2": {"all_reduce": (3, sides + vectors)},
        "bf16": {"all_to_all": (1, numbers * 2), "all_gather": (1, numbers * 2), "all_reduce": (1, vectors)},
        "int8": {"all_to_all": (1, scaled), "all_gather": (1, scaled), "all_reduce": (1, vectors)},
    }[compress]
    found = dict.fromkeys(expected, (0, 0))
    for (kind, _), (count, nbytes) in counted.items():
        found[kind] = found[kind][0] + count, found[kind][1] + nbytes
    if compress == "int8" and ranks == 8:  # 1024 numbers on each rank, of which 512 are padding in all
        padded = 8 * 1024 * 260 // 256
        expected |= {"all_to_all": (1, padded), "all_gather": (1, padded)}
    assert found == expected
    assert figures[0] == 1 and figures[1] <= FIGURES_BYTES
    slack = 512 * 2 * 260 / 256 if compress == "int8" else 0
    assert abs(each.said.traffic["replicate"] - sum(nbytes for _, nbytes in found.values())) <= slack


@pytest.mark.unit
@pytest.mark.parametrize(("compress", "beside"), [("topk:0.01", 0), ("powersgd:2", 1152)])
def test_what_is_kept_is_in_the_foretold_memory(compress, beside):
    """Errors lie there from step to step; those of this step come when activations have gone. PowerSGD: Q too."""
    found = [
        rehearse(Wide(), mesh="replicate=2", compress=each, global_batch=256).ranks[0] for each in (None, compress)
    ]
    assert [each.memory_error for each in found] == pytest.approx([0, 0], abs=0.02)
    more = found[1].said.memory.buffers - found[0].said.memory.buffers
    assert more == (4608 + 3072) * 4 + beside
    assert found[1].counted.memory["buffers"] == pytest.approx(more, abs=64)


@pytest.mark.ranks
def test_a_verification_is_of_the_layout_without_the_codec(tmp_path):
    """A codec's gradients are others: equality is not claimed of them, nor is the layout called wrong."""
    report = verify(Wide(), meshes="replicate=2", steps=1, global_batch=8)
    assert [result.status for result in report.layouts] == ["equal"]
    assert any("compress = 'topk:0.01' is off here" in note for note in report.notes)
    with pytest.raises(ConfigError, match="verify takes no setting 'compress'"):
        verify(Wide(), meshes="replicate=2", compress="bf16")
