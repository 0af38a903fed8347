"""Kills a real run at random times, again and again, and compares its end with a run that nothing disturbed.

    python tests/kill_runs.py --kills 30 --steps 4000 --seed 1

Half of the kills hit a worker, half the launcher, all with SIGKILL; a killed worker is restarted by the launcher,
a killed launcher started again with --resume. Prints one JSON line; exit status 1 unless all tensors of the last
checkpoint and all losses are bitwise equal. Not collected by pytest: it runs for minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "end_to_end"))

import torch
from commands import children, finish, losses, processes_of, saved, shoal, start, write_job


class Killed:
    """A run in ``folder`` that is killed at times drawn from ``seed``, until ``kills`` have hit."""

    def __init__(self, folder: Path, words: list[object], workers: int, kills: int, seed: int, mean_s: float) -> None:
        self.folder, self.words, self.workers, self.kills, self.mean_s = folder, words, workers, kills, mean_s
        self.random = random.Random(seed)
        self.hit = {"worker": 0, "launcher": 0}
        self.left_over = 0
        self.starts = 0
        self.process: subprocess.Popen[str] | None = None

    def run(self, limit_s: float) -> str | None:
        """Kill and start again until the run ends; why it went wrong, or None."""
        end_s = time.monotonic() + limit_s
        self._start()
        while True:
            assert self.process is not None
            if self.process.poll() is not None:
                result = finish(self.process)
                return None if result.status == 0 else f"exit status {result.status}: {result.err[-2000:]}"
            if sum(self.hit.values()) < self.kills and time.monotonic() < end_s:
                self._wait(self.random.uniform(0.0, 2 * self.mean_s))
                self._kill()
            else:
                time.sleep(0.1)

    def _wait(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while self.process is not None and self.process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.01)

    def _kill(self) -> None:
        assert self.process is not None
        victim = self.random.choice(("worker", "launcher"))
        pids = children(self.process.pid) if victim == "worker" else [self.process.pid]
        if self.process.poll() is not None or not pids:
            return
        if victim == "worker":  # one that dies before its first step is not restarted, by intent
            while self.process.poll() is None and not self._moves():
                time.sleep(0.02)
            self._wait(self.random.uniform(0.0, 1.0))
            pids = children(self.process.pid)
            if self.process.poll() is not None or not pids:
                return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.random.choice(pids), signal.SIGKILL)
            self.hit[victim] += 1
        if victim == "launcher":
            self.process.wait()
            time.sleep(2.0)
            self.left_over += len(processes_of(str(self.folder / "killed")))
            self._start()

    def _moves(self) -> bool:
        """Whether all workers of this attempt have done a step."""
        from shoal.launch.watch import Beats

        beats = Beats(self.folder / "killed" / "launch" / "beats", self.workers)
        alive = set(children(self.process.pid)) if self.process else set()
        moving = all(slot.progressed and slot.pid in alive for slot in beats.slots())
        beats.close()
        return moving

    def _start(self) -> None:
        self.starts += 1
        self.process = start(*self.words, "--restarts", 1000, "--resume", cwd=self.folder, fresh=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--mean-s", type=float, default=4.0, help="mean time between kills, start-up included")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no kill after this time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_job(folder)
        words: list[object] = [
            "train", file, "dropout=0.1", "width=32", "slow=0.0005", "--workers", args.workers, "--global-batch", 8,
            "--micro-batch", 8 // args.workers // 2 or 1, "--clip", 0.5, "--steps", args.steps,
            "--save-every", args.save_every, "--kernels", "default", "--json", "--out",
        ]  # fmt: skip
        began = time.monotonic()
        whole = shoal(*words, folder / "whole", cwd=folder, timeout_s=3600, fresh=True)
        assert whole.status == 0, whole.err
        middle = time.monotonic()
        killed = Killed(folder, [*words, folder / "killed"], args.workers, args.kills, args.seed, args.mean_s)
        wrong = killed.run(args.limit_s)
        told: dict[str, object] = {
            "workers": args.workers, "steps": args.steps, "kills": killed.hit, "asked": args.kills,
            "seed": args.seed, "launcher_starts": killed.starts, "processes_left": killed.left_over, "error": wrong,
            "whole_s": round(middle - began, 1), "killed_s": round(time.monotonic() - middle, 1),
        }  # fmt: skip
        equal = False
        if wrong is None:
            one, other = saved(folder / "whole")[0], saved(folder / "killed")[0]
            told["tensors"] = len(one)
            told["tensors_equal"] = sum(
                name in other and torch.equal(tensor, other[name]) for name, tensor in one.items()
            )
            told["losses_equal"] = losses(folder / "whole") == losses(folder / "killed")
            equal = told["tensors_equal"] == len(one) == len(other) and bool(told["losses_equal"])
        print(json.dumps({**told, "bitwise_equal": equal}), flush=True)
    return 0 if equal and not killed.left_over else 1


if __name__ == "__main__":
    raise SystemExit(main())
