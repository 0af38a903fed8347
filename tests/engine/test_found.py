"""All ranks begin from one checkpoint, good on every one of them, and a disk is read through once."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.checkpoint.saving import edit_manifest, save, state, writers
from tests.harness import run_ranks
from torch import nn

import shoal.checkpoint.reader
from shoal.core.errors import CheckpointError
from shoal.engine.found import newest_everywhere
from shoal.engine.weights import load_weights

pytestmark = pytest.mark.ranks


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 1, 2 and 3 by two ranks."""
    group = writers(tmp_path / "disk", 2, keep=3)
    for step in (1, 2, 3):
        save(group, step, state(step))
    return tmp_path / "disk"


def flip(path):
    """Change a bit of the second shard."""
    shard = sorted(path.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 4
    shard.write_bytes(data)
    return shard.name


def look(folder_of, ranks):
    """What each rank finds in its folder: step, path, skipped (step, problem), and how many files it has read."""

    def body(rank):
        reads, checksum = [], shoal.checkpoint.reader.file_checksum

        def counted(path):
            reads.append(path)
            return checksum(path)

        shoal.checkpoint.reader.file_checksum = counted
        found, skipped = newest_everywhere(folder_of(rank))
        return found and found.step, found and found.path, [(bad.step, bad.problem) for bad in skipped], len(reads)

    return run_ranks(body, ranks)


def test_one_rank_reads_the_disk_that_all_share(saved):
    found = look(lambda rank: saved, 4)
    assert [(step, path, skipped) for step, path, skipped, _ in found] == [(3, saved / "step-3", [])] * 4
    assert [reads for *_, reads in found] == [2, 0, 0, 0], "two shards, by rank 0"


def test_a_damaged_one_is_skipped_by_all_with_its_reason(saved):
    name = flip(saved / "step-3")
    (saved / "step-2" / "MANIFEST.json").unlink()
    for step, path, skipped, _ in look(lambda rank: saved, 3):
        assert (step, path) == (1, saved / "step-1")
        assert [(bad, problem.split(" ")[0]) for bad, problem in skipped] == [(3, name), (2, "MANIFEST.json")]


def test_ranks_with_disks_of_their_own_take_the_newest_that_is_good_on_all(saved, tmp_path):
    """Rank 1's newest is damaged, its second newest missing, and its third another save of that step."""
    other = tmp_path / "other"
    shutil.copytree(saved, other)
    name = flip(other / "step-3")
    shutil.rmtree(other / "step-2")
    found = look(lambda rank: other if rank else saved, 3)
    for rank, (step, path, skipped, _) in enumerate(found):
        assert (step, path) == (1, (other if rank else saved) / "step-1")
        assert skipped == [
            (3, f"on rank 1: {name} changed since it was written: its checksum differs"),
            (2, "on rank 1: MANIFEST.json is missing: the save was never completed"),
        ]
    assert found[1][3] > 0 and found[2][3] == 0, "the first rank of each disk reads it"
    edit_manifest(other / "step-1", lambda manifest: manifest.update(time_s=0.0))
    for step, _, skipped, _ in look(lambda rank: other if rank else saved, 2):
        assert step is None and skipped[-1] == (1, "on rank 1: its MANIFEST.json is another than rank 0's")


def test_weights_are_taken_from_a_checkpoint_that_verifies_only(saved):
    name = flip(saved / "step-3")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Parameter(torch.zeros(3, 4))
            self.norm = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
            self.register_buffer("seen", torch.tensor(0))
            self.register_buffer("empty", torch.empty(0, 3))

    def body(rank):
        with pytest.raises(CheckpointError, match=f"holds no good checkpoint; .*step-3 is none: {name} changed since"):
            load_weights(Net(), saved / "step-3")
        models = [Net(), Net()]
        assert load_weights(models[0], saved / "step-2") == []
        [note] = load_weights(models[1], saved)
        assert "step-3 is skipped" in note
        return [model.get_buffer("seen").item() for model in models]

    assert run_ranks(body, 2) == [[2, 2]] * 2
    (saved / "step-2" / "MANIFEST.json").write_text("{}")

    def torn(rank):
        with pytest.raises(CheckpointError, match="step-2 is none: MANIFEST.json is torn or changed"):
            load_weights(Net(), saved / "step-2")

    run_ranks(torn, 2)
