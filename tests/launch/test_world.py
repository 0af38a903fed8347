"""Which world the environment describes."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

from shoal.core.errors import ConfigError, LaunchError
from shoal.launch.world import World, find_world, first_node, join, worker_count

pytestmark = pytest.mark.unit


def test_no_world_without_variables():
    assert find_world({}) is None
    assert find_world({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}) is None


def test_torchrun():
    env = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert find_world(env) == World(3, 1, 4, 2, launched=False)


def test_slurm():
    env = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}
    assert find_world(env) == World(5, 1, 8, 0, launched=False)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"RANK": "x", "WORLD_SIZE": "2"},
            "variable RANK should be a whole number, found 'x': unset RANK and WORLD_SIZE",
        ),
        ({"RANK": "", "WORLD_SIZE": "2"}, "variable RANK should be a whole number, found ''"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "variable WORLD_SIZE should be a whole number, found 'two'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "?"}, "variable LOCAL_RANK should be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "join a world of 2 as rank 2: ranks are 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "join a world of 2 as rank -1: ranks are 0 to 1"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "n"}, "variable SLURM_NTASKS should be a whole"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "variable SLURM_LOCALID .* found None"),
    ],
)
def test_a_world_that_makes_no_sense_is_refused(env, said):
    with pytest.raises(LaunchError, match=said):
        find_world(env)


@pytest.fixture
def alone(monkeypatch):
    """No address to meet at, and no variables of SLURM."""
    for name in [name for name in os.environ if name.startswith(("MASTER_", "SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)


def test_more_local_ranks_than_gpus_are_refused(alone, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"rank 7 is number 3 on its machine, which has 2 GPU\(s\): start at most 2"):
        join(World(7, 3, 8, 0, launched=False), "cuda")
    with pytest.raises(ConfigError, match="--workers 3, but this machine has 2 GPUs; ask for 2 or fewer"):
        worker_count(3, "cuda")
    assert worker_count(None, "cuda") == 2


def test_several_ranks_without_an_address_are_refused(alone, monkeypatch):
    world = World(0, 0, 2, 0, launched=False)
    with pytest.raises(
        LaunchError, match="MASTER_ADDR is not set and SLURM names no nodes: start with torchrun, or set"
    ):
        join(world, "cpu")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[1-2]")
    monkeypatch.setenv("SLURM_JOB_ID", "7.1")
    monkeypatch.setenv("MASTER_ADDR", "")  # put back by monkeypatch, since join sets it
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(LaunchError, match="variable SLURM_JOB_ID should be a whole number, found '7.1'"):
        join(world, "cpu")


def test_an_address_where_nobody_listens_is_named(alone, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(LaunchError, match=f"rank 1 of 2 could not join the world at 127.0.0.1:{port}: .*; check that"):
        join(World(1, 1, 2, 0, launched=False), "cpu", timeout_s=0.5)


@pytest.mark.parametrize("agent", [False, True])
def test_ranks_that_do_not_come_to_the_meeting_point_are_named(alone, monkeypatch, agent):
    """https://github.com/pytorch/pytorch/issues/52876 https://github.com/pytorch/pytorch/pull/55010"""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if agent:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    else:
        del store
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(LaunchError, match=r"rank 0 of 4 waited 0.5 s .* but ranks 1, 2, 3 of 4 did not come: look at"):
        join(World(0, 0, 4, 0, launched=False), "cpu", timeout_s=0.5)
    monkeypatch.setenv("MASTER_PORT", "")
    with pytest.raises(LaunchError, match="variable MASTER_PORT should be a whole number, found ''"):
        join(World(0, 0, 4, 0, launched=False), "cpu", timeout_s=0.5)


def test_a_list_of_nodes_that_makes_no_sense_is_refused():
    with pytest.raises(LaunchError, match=r"cannot read SLURM's node list '\[1-2\]': set MASTER_ADDR"):
        first_node("[1-2]")


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[003-007,9],login", "gpu003"), ("a1,a2", "a1"), ("n[1,4]", "n1"), ("one", "one")]
)
def test_the_first_node_of_slurms_list(nodes, first):
    assert first_node(nodes) == first
