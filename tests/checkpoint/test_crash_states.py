"""Every state that a crash may leave holds the old or the new checkpoint, whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from crash_states import Disk, Recorder, Stage

from shoal.checkpoint import Reader, Writer, newest_good
from shoal.checkpoint import writer as writer_module

pytestmark = pytest.mark.unit


def state(step: int, mark: float) -> tuple[dict[str, torch.Tensor], dict]:
    tensors = {
        "model/weight": torch.full((12, 4), mark),
        "model/bias": torch.full((40,), mark + 0.5),
        "optimizer/step": torch.tensor(mark),
    }
    return tensors, {"step": step, "mark": mark, "finite": True}


def record(root: Path, saves: list[tuple[int, float]], kind: type[Recorder]) -> tuple[list[tuple], int]:
    """The operations of some saves by two ranks, whose shards are written in turn; where the last save begins."""
    log: list[tuple] = []
    writers = []
    for rank in range(2):
        files = kind(log)
        writers.append((Writer(root / "checkpoints", rank, 2, keep=1, files=files), files))
    begins = 0
    for step, mark in saves:
        begins = len(log)
        shards: list[list[tuple]] = []
        for writer, files in writers:
            files.log = []
            writer.begin(step, *state(step, mark))
            writer.wait()
            shards.append(files.log)
        while any(shards):
            log.extend(shard.pop(0) for shard in shards if shard)
        for writer, files in writers:
            files.log = log
            assert writer.error() is None
            writer.commit()
            writer.wait()
            assert writer.error() is None
    return log, begins


def held(found) -> float | None:
    """The mark of a checkpoint whose every tensor and value agrees on it."""
    reader = Reader(found.path)
    mark = reader.values["mark"]
    tensors, values = state(reader.step, mark)
    whole = reader.values == values and reader.names() == sorted(tensors)
    return mark if whole and all(torch.equal(reader.read(n), t) for n, t in tensors.items()) else None


def explore(tmp_path: Path, saves: list[tuple[int, float]], kind: type[Recorder], limit: int):
    """(states tried, states that hold neither the old nor the new checkpoint)."""
    log, begins = record(tmp_path / "real", saves, kind)
    disk, stage, rng = Disk(tmp_path / "real"), Stage(tmp_path / "crashed"), random.Random(0)
    disk.do(("mkdir", tmp_path / "real" / "checkpoints"))
    disk.durable.add(0)
    old, new = saves[-2][1], saves[-1][1]
    tried, bad, published = 0, [], False
    for index, op in enumerate(log):
        if op == ("mkdir", tmp_path / "real" / "checkpoints"):
            continue
        disk.do(op)
        if index < begins:
            continue
        published = published or (op[0] == "fsync_dir" and op[1].name == "checkpoints")
        for tree in disk.states(limit, rng):
            tried += 1
            stage.show(tree)
            found, _ = newest_good(stage.root / "checkpoints")
            mark = held(found) if found else None
            if mark not in ((new,) if published else (old, new)):
                bad.append((index, op[0], found))
            elif tried % 16 == 0:  # what the next run's clearing leaves
                Writer(stage.root / "checkpoints", 0, 2)
                again, _ = newest_good(stage.root / "checkpoints")
                if again is None or held(again) != mark:
                    bad.append((index, "cleared", again))
                stage.forget()
    return tried, bad


@pytest.fixture(autouse=True)
def small_writes(monkeypatch):
    monkeypatch.setattr(writer_module, "CHUNK_BYTES", 64)


def test_crash_anywhere_leaves_old_or_new_checkpoint_whole(tmp_path):
    """Rotation and pointer move only after the new data is durable.

    https://github.com/KempnerInstitute/KempnerForge/issues/102
    """
    tried = 0
    for name, saves in (("next", [(2, 1.0), (4, 2.0)]), ("same", [(2, 1.0), (4, 2.0), (4, 3.0)])):
        (tmp_path / name).mkdir()
        count, bad = explore(tmp_path / name, saves, Recorder, limit=455)
        assert not bad, bad[:5]
        tried += count
    assert tried >= 10_000, tried


class NoFileSync(Recorder):
    def fsync(self, descriptor: int) -> None:
        pass


class NoFolderSync(Recorder):
    def fsync_dir(self, path: Path) -> None:
        if path.name == "checkpoints":
            super().fsync_dir(path)


class NoParentSync(Recorder):
    def fsync_dir(self, path: Path) -> None:
        if path.name != "checkpoints":
            super().fsync_dir(path)


@pytest.mark.parametrize("kind", [NoFileSync, NoFolderSync, NoParentSync])
def test_states_expose_a_missing_sync(tmp_path, kind):
    """The states are wide enough: each kind of forgotten sync loses a checkpoint in some of them."""
    _, bad = explore(tmp_path, [(2, 1.0), (4, 2.0)], kind, limit=40)
    assert bad
