"""Which world the environment describes."""

from __future__ import annotations

import pytest

from shoal.core.errors import LaunchError
from shoal.launch.world import World, find_world, first_node

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
    "env", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "", "WORLD_SIZE": "2"}]
)
def test_a_world_that_makes_no_sense_is_refused(env):
    with pytest.raises(LaunchError, match="should be a whole number|ranks are 0 to 1"):
        find_world(env)


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[003-007,9],login", "gpu003"), ("a1,a2", "a1"), ("n[1,4]", "n1"), ("one", "one")]
)
def test_the_first_node_of_slurms_list(nodes, first):
    assert first_node(nodes) == first
