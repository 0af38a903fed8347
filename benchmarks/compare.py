"""Is Shoal as fast as plain PyTorch? Runs plain.py and shoal_job.py in turn and prints one JSON line.

python benchmarks/compare.py --cases A B C --pairs 5 --kernels default
python benchmarks/compare.py --cases shard tensor pipeline --pairs 5

A step is the time from the end of one step to the end of the next, nothing between left out. The first step
counts from the start of the command to its end. Memory is the high-water mark of each worker, read from /proc
every 0.2 s. The sides of a pair run one after the other, in alternating order; "ratio" is Shoal's figure over
plain PyTorch's within a pair. Plain PyTorch always runs with torch's default kernels.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = {  # name: (micro-batches per step, precision, steps, layout)
    "A": (1, "fp32", 12, "replicate"),
    "B": (4, "fp32", 6, "replicate"),
    "C": (1, "bf16", 12, "replicate"),
    "shard": (1, "fp32", 12, "shard"),
    "tensor": (1, "fp32", 12, "tensor"),
    "pipeline": (4, "fp32", 8, "pipeline"),
}
WARMUP = 2  # first steps left out of the median


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=["A", "B", "C"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None, help="instead of each case's own number")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--kernels", choices=("default", "auto"), default="default", help="Shoal's --kernels")
    parser.add_argument("--size", nargs="*", default=[], help="field=value of the model, given to both sides")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    return parser.parse_args()


def children(pid):
    """All living descendants of a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        direct = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return []
    return direct + [below for child in direct for below in children(child)]


def high_water_bytes(pid):
    """The most memory a process has held, 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = [line for line in lines if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) * 1024 if found else 0


def watched(command, log, timeout_s):
    """Run a command; (its start, seconds since 1970; the high-water mark of each descendant)."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    peaks, started = {}, time.time()
    command = [part.replace("{t0}", repr(started)) for part in command]
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                for pid in children(process.pid):
                    peaks[pid] = max(peaks.get(pid, 0), high_water_bytes(pid))
                if time.time() - started > timeout_s:
                    raise SystemExit(f"{command} ran longer than {timeout_s} s; its output is in {log}")
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}:\n{Path(log).read_text()[-3000:]}")
    return started, sorted(peaks.values(), reverse=True)


def plain(args, case, steps, folder):
    """One run of plain.py."""
    accumulate, precision, _, layout = CASES[case]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(args.workers), str(HERE / "plain.py"), "--steps", str(steps)]
    command += [
        "--accumulate",
        str(accumulate),
        "--precision",
        precision,
        "--micro-batch",
        str(args.micro_batch),
        "--layout",
        layout,
    ]
    command += ["--warmup", str(WARMUP), "--t0", "{t0}"]
    for setting in args.size:
        command += [f"--{setting.split('=')[0]}", setting.split("=")[1]]
    log = folder / "plain.txt"
    _, peaks = watched(command, log, args.timeout_s)
    row = json.loads(log.read_text().strip().splitlines()[-1])
    peak = max(peaks[: args.workers], default=0)
    return {"step_s": row["step_s"], "first_step_s": row["first_step_s"], "peak_bytes": peak}


def shoal(args, case, steps, folder):
    """One run of shoal_job.py, read from its event file."""
    accumulate, precision, _, layout = CASES[case]
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    batch = readers(args, case) * args.micro_batch * accumulate
    command = [str(Path(sys.executable).with_name("shoal")), "train", str(HERE / "shoal_job.py"), *args.size]
    command += ["--workers", str(args.workers), "--steps", str(steps), "--global-batch", str(batch)]
    command += ["--micro-batch", str(args.micro_batch), "--precision", precision, "--kernels", args.kernels]
    command += ["--mesh", f"{layout}={args.workers}"]
    started, peaks = watched([*command, "--out", str(out)], folder / "shoal.txt", args.timeout_s)
    events = sorted((out / "events").glob("*.jsonl"))[0].read_text().splitlines()
    ends = [row["time"] for row in map(json.loads, events) if row["kind"] == "step"]
    step_s = [end - begin for begin, end in zip(ends, ends[1:], strict=False)][WARMUP - 1 :]
    peak = max(peaks[: args.workers], default=0)
    return {"step_s": statistics.median(step_s), "first_step_s": ends[0] - started, "peak_bytes": peak}


def spread(values):
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compared(args, case, folder):
    """All pairs of one case: each side's figures, and Shoal's over plain PyTorch's within each pair."""
    steps = args.steps or CASES[case][2]
    tokens = readers(args, case) * args.micro_batch * CASES[case][0] * context(args)
    rows = {"plain": [], "shoal": []}
    for pair in range(args.pairs):
        sides = (plain, shoal) if pair % 2 == 0 else (shoal, plain)
        for side in sides:
            row = side(args, case, steps, folder)
            row["tokens_per_s"] = tokens / row["step_s"]
            rows[side.__name__].append(row)
            print(f"{case} {pair + 1}/{args.pairs} {side.__name__}: {row}", file=sys.stderr, flush=True)
    figures = ("tokens_per_s", "step_s", "first_step_s", "peak_bytes")
    result = {name: {f: spread([r[f] for r in rows[name]]) for f in figures} for name in rows}
    pairs = list(zip(rows["shoal"], rows["plain"], strict=True))
    result["ratio"] = {f: spread([s[f] / p[f] for s, p in pairs]) for f in figures}
    return result | {"steps": steps, "pairs": args.pairs}


def readers(args, case):
    """Ranks that read different samples."""
    return args.workers if CASES[case][3] in ("replicate", "shard") else 1


def context(args):
    """The sequence length, also where --size changes it."""
    given = dict(setting.split("=") for setting in args.size)
    return int(given.get("context", 256))


def environment(args):
    """What the figures depend on."""
    code = "import torch; print(torch.__version__)"
    torch_version = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch_version,
        "workers": args.workers,
        "threads_per_worker": 1,
        "kernels": args.kernels,
    }


def main():
    args = arguments()
    result = {"benchmark": "compare", "environment": environment(args)}
    with tempfile.TemporaryDirectory(prefix="shoal-compare-") as folder:
        result["cases"] = {case: compared(args, case, Path(folder)) for case in args.cases}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
