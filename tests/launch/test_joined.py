"""Ranks of a world that others set up: who stands still is named; calls that differ are named; who is missing too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.harness import run_ranks
from tests.launch.test_local import alive, pids, run

import shoal
from shoal.core.errors import ConfigError, RankMismatch
from shoal.engine.meet import meet

pytestmark = pytest.mark.ranks


def test_under_torchrun_a_rank_that_stands_still_is_named_with_stacks_and_all_end(tmp_path):
    """https://github.com/pytorch/pytorch/issues/52876"""
    script = Path(__file__).with_name("joined.py")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(script), "hang", str(tmp_path),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    started = pids(ended.stdout)
    assert len(started) == 2 and not alive(started)
    assert "error: rank 1 stopped moving: no progress for" in ended.stderr
    assert "rank 0's stack:" in ended.stderr and "all_reduce" in ended.stderr
    assert "rank 1's stack:" in ended.stderr and "in fault" in ended.stderr


def test_collective_calls_that_differ_are_named_on_every_rank(tmp_path):
    """https://github.com/pytorch/pytorch/issues/22071 https://github.com/pytorch/pytorch/issues/78022"""
    code, stdout, stderr = run("mixed", tmp_path)
    assert code == 0, stderr
    told = {tuple(line.split("@")[:2]): line for line in stdout.splitlines() if "@" in line}
    both = {
        "kind": ("OpType=ALLREDUCE", "OpType=BROADCAST"),
        "shape": ("TensorShape=[4]", "TensorShape=[5]"),
        "type": ("TensorDtypes=Float", "TensorDtypes=Double"),
    }
    assert set(told) == {(name, rank) for name in both for rank in "01"}
    for (name, rank), line in told.items():
        mine, other = both[name] if rank == "0" else both[name][::-1]
        assert f"@{rank}@True@Detected mismatch" in line
        here, there = line.split("but Rank")
        assert f"Rank {rank} is running" in here and mine in here and other not in here
        assert there.startswith(f" {1 - int(rank)} is running") and other in there.split("Collectives differ")[0]
    assert stdout.count("sum=2") == 2


def test_a_group_that_exists_already_cannot_check_its_calls(tmp_path):
    def body(rank):
        import torch
        from tests.small_jobs import classes_loss, mlp, mlp_rows

        model = mlp()
        with pytest.raises(
            ConfigError, match="debug_collectives was asked for, but the process group is there already"
        ):
            shoal.prepare(
                model=model, data=mlp_rows(8), loss=classes_loss, optimizer=torch.optim.SGD(model.parameters()),
                out=str(tmp_path), debug_collectives=True,
            )  # fmt: skip

    run_ranks(body, 1)


def test_a_meeting_names_exactly_the_ranks_that_are_missing():
    """https://github.com/pytorch/pytorch/issues/52876 https://github.com/pytorch/pytorch/pull/55010"""

    def body(rank):
        meet("at the start")
        text = ""
        if rank in (1, 3):
            time.sleep(5)
        else:
            try:
                meet("at the start", timeout_s=3)
            except RankMismatch as error:
                text = str(error)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        _regroup(rank)
        return text

    told = run_ranks(body, 4, timeout_s=30)
    assert told[1] == told[3] == ""
    for text in (told[0], told[2]):
        assert "all ranks were to meet at the start, but ranks 1, 3 of 4 did not come in 3 s" in text
        assert "must end on every rank" in text


def _regroup(rank):
    """The harness ends with a barrier, which a group with a barrier under way has no more."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=4)
