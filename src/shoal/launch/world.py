"""Which world of ranks this process belongs to, and joining it. The environment is read here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from shoal.core.errors import ConfigError, LaunchError
from shoal.engine.meet import leave_word, missing


@dataclass(frozen=True)
class World:
    """This process's place among all ranks; ``launched`` where Shoal's own launcher started it."""

    rank: int
    local_rank: int
    size: int
    restart: int
    launched: bool


def device_kind() -> Literal["cpu", "cuda"]:
    """``cuda`` where there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def worker_count(asked: int | None, device: str) -> int:
    """How many workers to start here: what was asked, or every GPU, or two cores. Raises ConfigError."""
    if device == "cuda":
        gpus = torch.cuda.device_count()
        if asked is not None and asked > gpus:
            raise ConfigError(f"--workers {asked}, but this machine has {gpus} GPUs; ask for {gpus} or fewer")
        return asked or gpus
    if asked is not None and asked < 1:
        raise ConfigError(f"--workers {asked}; at least 1")
    return asked or min(2, len(os.sched_getaffinity(0)))


def find_world(environment: Mapping[str, str] | None = None) -> World | None:
    """The world that torchrun, SLURM or our launcher set up; None where there is none. Raises LaunchError."""
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        local_default = env["RANK"]
        restart = _integer(env, "TORCHELASTIC_RESTART_COUNT", "0")
        rank, local_rank, size = (
            _integer(env, name, local_default if name == "LOCAL_RANK" else None) for name in names
        )
    elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and "SLURM_NTASKS" in env:
        if _integer(env, "SLURM_NTASKS") == 1:
            return None  # one task is an ordinary process: it may start workers itself
        rank, local_rank, size, restart = (
            _integer(env, name, default)
            for name, default in (
                ("SLURM_PROCID", None),
                ("SLURM_LOCALID", None),
                ("SLURM_NTASKS", None),
                ("SLURM_RESTART_COUNT", "0"),
            )
        )
    else:
        return None
    if not 0 <= rank < size:
        raise LaunchError(f"asked to join a world of {size} as rank {rank}: ranks are 0 to {size - 1}")
    return World(rank, local_rank, size, restart, launched=env.get("SHOAL_LAUNCHED") == "1")


def join(
    world: World, device: str | torch.device, timeout_s: float = 1800.0, debug_collectives: bool = False
) -> torch.device:
    """Make the process group of ``world``, of one rank too, so that every collective exists; returns this
    rank's device. Collective.

    ``debug_collectives``: torch compares kind, shape and type of each collective call over all ranks before it
    runs, and where they differ raises on every rank, naming both. Raises LaunchError when the world cannot be
    joined, ConfigError for a device that is not there."""
    kind = torch.device(device).type
    place = torch.device("cuda", world.local_rank) if kind == "cuda" else torch.device("cpu")
    if dist.is_initialized():
        if debug_collectives and dist.get_debug_level() != dist.DebugLevel.DETAIL:
            raise ConfigError(
                "debug_collectives was asked for, but the process group is there already and does not check its "
                "calls; leave init_process_group out, or set TORCH_DISTRIBUTED_DEBUG=DETAIL before it"
            )
        return place
    if kind == "cuda":
        found = torch.cuda.device_count()
        if world.local_rank >= found:
            raise ConfigError(
                f"rank {world.rank} is number {world.local_rank} on its machine, which has {found} GPU(s): "
                f"start at most {found} workers per machine or set device=cpu"
            )
        torch.cuda.set_device(world.local_rank)
    if debug_collectives:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # groups made from now on check every call
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "MASTER_ADDR" not in os.environ and world.size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return place
    if "MASTER_ADDR" not in os.environ:
        _slurm_rendezvous()
    try:
        store = _store(world, timeout)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    except (dist.DistError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"rank {world.rank} of {world.size} could not join the world at {where}: {error}; "
            "check that this address is reachable and its port free"
        ) from error
    return place


def _store(world: World, timeout: timedelta) -> dist.Store:
    """The store at MASTER_ADDR, when all ranks have come to it. Raises LaunchError naming those that have not.

    As torch's env:// makes it, but that one tells at most how many came."""
    hosts = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port = _integer(os.environ, "MASTER_PORT")
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], port, world.size, hosts, timeout, wait_for_workers=False, multi_tenant=True
    )
    keys = leave_word(store, "join", world.rank, world.size)
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        if late := missing(store, keys):
            raise LaunchError(
                f"rank {world.rank} of {world.size} waited {timeout.total_seconds():g} s for the others, but {late} "
                "did not come: look at what those ranks say, and whether they can reach "
                f"{os.environ['MASTER_ADDR']}:{port}"
            ) from None
    return dist.PrefixStore("default_pg", store)


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _slurm_rendezvous() -> None:
    """MASTER_ADDR and MASTER_PORT from SLURM's variables: the first node, a port from the job's number."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise LaunchError(
            "asked to join a world of several ranks, but MASTER_ADDR is not set and SLURM names no nodes: "
            "start with torchrun, or set MASTER_ADDR and MASTER_PORT"
        )
    os.environ["MASTER_ADDR"] = first_node(nodes)
    job = _integer(os.environ, "SLURM_JOB_ID", "0")
    os.environ.setdefault("MASTER_PORT", str(20000 + job % 10000))


def first_node(nodes: str) -> str:
    """The first host of SLURM's compressed list: ``gpu[003-007,9],login`` gives ``gpu003``."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)", nodes)
    if not match:
        raise LaunchError(f"cannot read SLURM's node list {nodes!r}: set MASTER_ADDR and MASTER_PORT")
    inner = re.split(r"[,-]", match[2])[0] if match[2] else ""
    return match[1] + inner + match[3]


def _integer(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = env.get(name, default)
    try:
        return int(text if text is not None else "")
    except ValueError:
        raise LaunchError(
            f"the environment variable {name} should be a whole number, found {text!r}: "
            "unset RANK and WORLD_SIZE to start workers here, or start with torchrun"
        ) from None
