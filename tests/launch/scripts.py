"""Small runs that the tests start in a process of their own: ``scripts.py CASE OUT WORKERS RESTARTS``."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.core.errors import ConfigError
from shoal.launch import worker
from shoal.launch.local import run_workers
from shoal.launch.stop import STOP
from shoal.launch.watch import Watch
from shoal.launch.worker import open_beats
from shoal.launch.world import World, join


def entry(case: str, out: Path, world: World) -> int:
    """A run of 3 steps (300 where it is to be stopped) that goes wrong as ``case`` says."""
    print(f"rank={world.rank} restart={world.restart} port={os.environ['MASTER_PORT']} pid={os.getpid()}", flush=True)
    if case == "early":
        raise ImportError("no such module")
    if case == "config":
        raise ConfigError("asked for 3, found 2: change it")
    join(world, "cpu", debug_collectives=case == "mixed")
    if case == "mixed":
        return mixed(world)
    begin(case, world)
    beats = open_beats(out, world)
    beats.beat(0, "start")
    for step in range(300 if case in ("long", "unsaved") else 3):
        beats.beat(step, "data_wait")
        if step == 2:
            fault(case, world)
        beats.beat(step, "forward_backward")
        asked = torch.tensor([float(STOP.requested)])
        dist.all_reduce(asked)
        if asked.item():
            print(f"saved by {world.rank}", flush=True)
            return 75
        if case in ("long", "unsaved"):
            time.sleep(0.05)
            print("step", flush=True)
    total = torch.full((4096, 64), float(world.rank + 1))
    dist.all_reduce(total)
    print(f"sum={total[0, 0].item():.0f}", flush=True)
    return 0


def begin(case: str, world: World) -> None:
    """What a rank does before it first tells of itself, while the others wait for it."""
    if case == "unbegun" and world.rank == 1:
        time.sleep(600)
    until_s = time.process_time() + 3
    while case == "slow" and world.rank == 1 and time.process_time() < until_s:
        pass
    if case in ("unbegun", "slow"):
        dist.all_reduce(torch.ones(1))


def mixed(world: World) -> int:
    """Collective calls that differ between ranks 0 and 1 in kind, shape and type; then one that does not."""
    odd = world.rank == 1
    calls = {
        "kind": lambda: dist.broadcast(torch.ones(4), 0) if odd else dist.all_reduce(torch.ones(4)),
        "shape": lambda: dist.all_reduce(torch.ones(5 if odd else 4)),
        "type": lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if odd else torch.float32)),
    }
    for name, call in calls.items():
        began_s = time.monotonic()
        try:
            call()
        except RuntimeError as error:
            soon = time.monotonic() - began_s < 30
            told = f"{name}@{world.rank}@{soon}@{' '.join(str(error).split())}\n"
            os.write(1, told.encode())  # in one piece: the ranks share the pipe
    total = torch.ones(4)
    dist.all_reduce(total)
    os.write(1, f"sum={total[0].item():.0f}\n".encode())
    return 0


def fault(case: str, world: World) -> None:
    """What goes wrong at the third step."""
    if case == "boom" and world.rank == world.size - 1:
        raise ValueError("boom")
    if case == "kill" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "twice" and world.restart < 2 and world.rank == 0:
        raise OSError(f"attempt {world.restart}")
    if case == "hang" and world.rank in (1, 3):
        time.sleep(600)
    if case == "frozen" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def tell_threads() -> None:
    """Print at each fork how many threads this process has. numpy's BLAS ends its own at any fork: at this one."""
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    os.register_at_fork(before=lambda: print(f"threads={len(os.listdir('/proc/self/task'))}", flush=True))


def main() -> int:
    case, out, workers, restarts = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    port = int(sys.argv[5]) if len(sys.argv) > 5 else None
    print(f"launcher={os.getpid()}", flush=True)
    start_s = {"unborn": 2.0, "unbegun": 2.0, "slow": 1.0}.get(case, 30.0)
    watch = Watch(least_s=1.0, pause_s=30.0, start_s=start_s, stacks_s=0.5, saves=case != "unsaved")
    if case == "unborn":  # as a fork that waits for a thread which its parent had
        register = worker.register_stacks
        worker.register_stacks = lambda folder, rank: time.sleep(600) if rank == 1 else register(folder, rank)
    if case == "twice":
        tell_threads()
    try:
        return run_workers(functools.partial(entry, case, out), workers, out, restarts, "cpu", port, watch)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
