"""Saving in the background: what is kept, what a failure leaves, how long training is held up."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from saving import FullDisk, assert_holds, names, newest, save, state, writers

from shoal.checkpoint import Reader, Writer, checkpoints, newest_good
from shoal.checkpoint.files import FileSystem
from shoal.core.errors import CheckpointError

pytestmark = pytest.mark.unit


class Held(FileSystem):
    """Every write waits until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        assert self.go.wait(20)
        super().write(descriptor, data)


def test_full_disk_keeps_the_previous_and_leaves_no_partial(tmp_path):
    """https://github.com/axolotl-ai-cloud/axolotl/pull/2177"""
    save(writers(tmp_path, 2), 5, state(1.0))
    group = writers(tmp_path, 2, files={1: FullDisk(room_bytes=100)})
    for writer in group:
        writer.begin(10, state(2.0), {"step": 10})
    for writer in group:
        writer.wait()
    assert [writer.poll() for writer in group] == [(True, False), (False, True)]
    needed = group[1]._save.layout.file_bytes
    with pytest.raises(CheckpointError, match=rf"rank 1's shard of step 10.*needs {needed} bytes, \d+ bytes are free"):
        raise group[1].error()
    for writer in group:
        writer.abandon()
        assert writer.error() is None and writer.in_flight is None
    assert names(tmp_path) == ["step-5"]
    assert_holds(tmp_path / "step-5", 5, state(1.0))
    group[1].files = FileSystem()
    save(group, 10, state(2.0))
    assert newest(tmp_path) == 10


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_abandoning_in_any_order_leaves_nothing(tmp_path, order):
    group = writers(tmp_path, 2, files={1: FullDisk(room_bytes=0)})
    for writer in group:
        writer.begin(1, state(), {})
    for rank in order:
        group[rank].abandon()
    assert names(tmp_path) == []


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "fsync_dir"])
def test_failing_commit_is_kept_and_previous_stays(tmp_path, call):
    """Each operation of the commit fails once; what is found after is the old one or, once renamed, the new one."""
    save(writers(tmp_path, 1), 5, state(1.0))
    [writer] = writers(tmp_path, 1)
    writer.begin(5, state(2.0), {"step": 5})
    writer.wait()

    def fail(*args) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    setattr(writer.files, call, fail)
    writer.commit()
    writer.wait()
    with pytest.raises(CheckpointError, match="cannot commit step 5 in .*Input/output error"):
        raise writer.error()
    writer.begin(6, state(), {})  # an error is pending: nothing is written
    assert writer.poll()[1]
    delattr(writer.files, call)
    writer.abandon()
    assert names(tmp_path) == ["step-5"]
    assert_holds(tmp_path / "step-5", 5, state(1.0))


def test_publication_cut_between_its_renames_gives_the_old_one_back(tmp_path):
    save(writers(tmp_path, 1), 5, state(1.0))
    os.rename(tmp_path / "step-5", tmp_path / "step-5.replaced")
    assert newest(tmp_path) == 5
    Writer(tmp_path, 0, 1)
    assert names(tmp_path) == ["step-5"]
    assert_holds(tmp_path / "step-5", 5, state(1.0))


def test_strays_of_a_failed_save_never_enter_a_new_one(tmp_path):
    """https://github.com/ray-project/ray/issues/41700"""
    for folder in ("step-10", "step-10.partial"):
        (tmp_path / folder).mkdir()
        for rank in range(4):
            (tmp_path / folder / f"shard-{rank:05d}-of-00004.safetensors").write_bytes(b"stray")
            (tmp_path / folder / f"shard-{rank:05d}.json").write_bytes(b"stray")
    group = writers(tmp_path, 2)
    for writer in group:
        writer.begin(10, state(3.0), {"step": 10})
        writer.wait()
    (tmp_path / "step-10.partial" / "shard-00003-of-00004.safetensors").write_bytes(b"late stray")
    for writer in group:
        writer.commit()
        writer.wait()
        assert writer.error() is None
    assert names(tmp_path) == ["step-10"]
    shards = [f"shard-{rank:05d}-of-00002.safetensors" for rank in range(2)]
    assert names(tmp_path / "step-10") == ["MANIFEST.json", *shards]
    assert sorted(json.loads((tmp_path / "step-10" / "MANIFEST.json").read_text())["body"]["files"]) == shards
    assert_holds(tmp_path / "step-10", 10, state(3.0))


def test_pointer_and_rotation_wait_for_the_delayed_writer(tmp_path):
    """https://github.com/KempnerInstitute/KempnerForge/issues/102"""
    save(writers(tmp_path, 1, keep=1), 5, state(1.0))
    held = Held()
    [writer] = writers(tmp_path, 1, keep=1, files={0: held})
    writer.begin(10, state(2.0), {"step": 10})
    for _ in range(10):
        assert writer.poll() == (False, False)
        assert newest(tmp_path) == 5
        assert_holds(tmp_path / "step-5", 5, state(1.0))
        time.sleep(0.01)
    held.go.set()
    writer.wait()
    assert newest(tmp_path) == 5  # written, not yet committed
    held.go.clear()
    writer.commit()
    time.sleep(0.05)
    assert newest(tmp_path) == 5 and writer.committed is None
    held.go.set()
    writer.wait()
    assert writer.committed == 10 and names(tmp_path) == ["step-10"]
    assert_holds(tmp_path / "step-10", 10, state(2.0))


def test_a_kill_while_the_writer_is_held_leaves_the_older_one(tmp_path):
    """https://github.com/KempnerInstitute/KempnerForge/issues/102"""
    save(writers(tmp_path, 1, keep=1), 5, state(1.0))
    process = multiprocessing.get_context("fork").Process(target=_held_save, args=(tmp_path,))
    process.start()
    while not (tmp_path / "step-10.partial").exists():
        assert process.exitcode is None
        time.sleep(0.01)
    assert newest(tmp_path) == 5
    process.kill()
    process.join()
    assert newest(tmp_path) == 5
    assert_holds(tmp_path / "step-5", 5, state(1.0))
    Writer(tmp_path, 0, 1, keep=1)
    assert names(tmp_path) == ["step-5"]
    assert_holds(tmp_path / "step-5", 5, state(1.0))


def _held_save(folder: Path) -> None:
    [writer] = writers(folder, 1, keep=1, files={0: Held()})
    writer.begin(10, state(2.0), {"step": 10})
    writer.wait()


def test_checkpoint_is_of_the_moment_it_was_begun(tmp_path):
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3267"""
    held = Held()
    [writer] = writers(tmp_path, 1, files={0: held})
    tensors, values = state(1.0), {"step": 10, "position": [1, 2]}
    before = time.time()
    writer.begin(10, tensors, values)
    begun = time.time()
    for _ in range(4):  # training goes on
        for tensor in tensors.values():
            tensor.add_(1)
        values["step"] += 1
        values["position"].append(9)
    held.go.set()
    writer.wait()
    writer.commit()
    writer.wait()
    assert names(tmp_path) == ["step-10"]
    assert_holds(tmp_path / "step-10", 10, state(1.0))
    assert Reader(tmp_path / "step-10").values == {"step": 10, "position": [1, 2]}
    body = json.loads((tmp_path / "step-10" / "MANIFEST.json").read_text())["body"]
    assert before <= body["time_s"] <= begun


def test_checkpoints_that_are_not_finite_never_push_out_good_ones(tmp_path):
    """https://github.com/kyutai-labs/pocket-tts/pull/262"""
    group = writers(tmp_path, 2, keep=2)
    for step in range(2, 14, 2):
        save(group, step, state(step, finite=step < 6), finite=step < 6)
    assert names(tmp_path) == ["step-12", "step-2", "step-4"]
    found, skipped = newest_good(tmp_path)
    assert found.step == 4 and [bad.step for bad in skipped] == [12]
    assert skipped[0].problem == "its weights are not finite"
    assert_holds(found.path, 4, state(4.0))


def test_damaged_checkpoints_never_push_out_good_ones(tmp_path):
    save(writers(tmp_path, 1), 1, state(1.0))
    save(writers(tmp_path, 1), 2, state(2.0))
    shard = next((tmp_path / "step-2").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x77")
    save(writers(tmp_path, 1), 3, state(3.0))
    assert [found.step for found in checkpoints(tmp_path) if found.problem is None] == [3, 1]


def test_ranks_do_not_race_on_the_folders(tmp_path):
    """Ranks raced on creating, renaming or deleting the folder; a delay of 0 to 50 ms precedes every file operation.

    https://github.com/huggingface/transformers/issues/28015 https://github.com/karpathy/nanochat/pull/336
    https://github.com/Physical-Intelligence/openpi/pull/969 https://github.com/huggingface/transformers/issues/20988
    """

    class Slow(FileSystem):
        def __init__(self, seed: int) -> None:
            self.random = random.Random(seed)

        def __getattribute__(self, name: str):
            if name in operations:
                time.sleep(0.05 * object.__getattribute__(self, "random").random() ** 8)  # few are long
            return object.__getattribute__(self, name)

    operations = {name for name in vars(FileSystem) if not name.startswith("_")}
    ranks, failures = 8, []
    barrier = threading.Barrier(ranks, timeout=30)

    def run(rank: int) -> None:
        try:
            writer = Writer(tmp_path, rank, ranks, keep=1, files=Slow(rank))
            barrier.wait()
            for turn in range(20):
                step = turn // 2 + 1  # every step is saved twice
                writer.begin(step, state(turn + 1.0), {"step": step})
                while not writer.poll()[0]:
                    assert not writer.poll()[1], writer.error()
                    time.sleep(0.0005)
                barrier.wait()
                writer.commit()  # rank 0 works on it while the others begin the next
            writer.wait()
            assert writer.error() is None, writer.error()
        except BaseException as error:
            failures.append((rank, error))
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert names(tmp_path) == ["step-10"]
    assert_holds(tmp_path / "step-10", 10, state(20.0))


def test_removing_what_is_gone_already_is_fine(tmp_path):
    """https://github.com/Physical-Intelligence/openpi/pull/969"""

    class Second(FileSystem):
        """Somebody else is always a moment quicker."""

        def unlink(self, path: Path) -> None:
            path.unlink(missing_ok=True)
            super().unlink(path)

        def rmdir(self, path: Path) -> None:
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()
            super().rmdir(path)

    [writer] = writers(tmp_path, 1, keep=1, files={0: Second()})
    for step in (1, 2):
        save([writer], step, state(step))
    assert names(tmp_path) == ["step-2"]
    assert_holds(tmp_path / "step-2", 2, state(2.0))


@pytest.fixture
def one_thread():
    """Copies whose time does not hang on when a second core is free."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_background_save_stalls_far_less_than_a_synchronous_one(one_thread):
    """The stall is a copy of the local state: at most two plain copies and 5 ms, 15 % of writing it to a disk."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # others of the tests' folders may lie in memory
        stalls_far_less(Path(folder))


def stalls_far_less(tmp_path):
    tensors = {f"model/{index}": torch.randn(1 << 20) for index in range(16)}  # 64 MiB
    copies, stalls, whole = [], [], []
    [writer] = writers(tmp_path, 1, keep=1)
    writer.reserve(tensors)
    buffers = {name: tensor.clone() for name, tensor in tensors.items()}
    for step in range(1, 21):  # the least of each: other processes disturb single ones
        start = time.perf_counter()
        for name, tensor in tensors.items():
            buffers[name].copy_(tensor)
        copies.append(time.perf_counter() - start)
        start = time.perf_counter()
        writer.begin(step, tensors, {"step": step})
        stalls.append(writer.stall_s)
        writer.wait()
        writer.commit()
        writer.wait()
        whole.append(time.perf_counter() - start)
        short = min(stalls) <= 2 * min(copies) + 0.005 and min(stalls) <= 0.15 * min(whole)
        if step >= 3 and short:
            break
    print(f"copy {min(copies):.4f} s, stall {min(stalls):.4f} s, synchronous {min(whole):.4f} s")
    assert short, (min(copies), min(stalls), min(whole))


def test_misuse_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot keep 0 checkpoints"):
        Writer(tmp_path, 0, 1, keep=0)
    [writer] = writers(tmp_path, 1)
    with pytest.raises(CheckpointError, match="cannot commit: no save is in flight"):
        writer.commit()
    with pytest.raises(CheckpointError, match="step 1: its values are not JSON"):
        writer.begin(1, state(), {"when": object()})
    with pytest.raises(CheckpointError, match="cannot save 'odd': a checkpoint cannot hold torch.complex128"):
        writer.begin(1, {"odd": torch.zeros(2, dtype=torch.complex128)}, {})
    writer.begin(1, state(), {})
    with pytest.raises(CheckpointError, match="save of step 1 is neither committed nor abandoned"):
        writer.begin(2, state(), {})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot prepare the checkpoints' folder"):
        Writer(Path(tmp_path / "file" / "inner"), 0, 1)


def test_only_rank_0_clears_what_is_left_over(tmp_path):
    """https://github.com/karpathy/nanochat/pull/336"""
    for name in ("step-3.partial", "step-2.trash", "step-1.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    Writer(tmp_path, 1, 2)
    assert len(names(tmp_path)) == 3
    Writer(tmp_path, 0, 2)
    assert names(tmp_path) == []
