"""Is a CUDA machine right, and then how fast? Correctness first, speed only where all of it holds; one JSON line.

python benchmarks/gpu_check.py            # under five minutes on one GPU
python benchmarks/gpu_check.py --device cpu --size layers=2 width=64 heads=2 context=64   # the same checks without one

Correct: losses equal the CPU's in float64 and stay near them in float32 and bf16; a resumed run ends with the
uninterrupted run's weights; layouts of all GPUs (where there are several) pass shoal verify. Speed: tokens per second
and peak memory by precision, the rate of a large matrix product, memory bandwidth, the time to start a kernel.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
JOB = str(HERE / "shoal_job.py")
#: Relative, of the loss of every step, against the CPU's run: of the same initial weights, so bf16 against float32.
TOLERANCE = {"fp64": ("fp64", 1e-10), "fp32": ("fp32", 1e-5), "bf16": ("fp32", 1e-2)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", nargs="*", default=[], help="field=value of the model")
    parser.add_argument("--steps", type=int, default=20, help="of the timed runs")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    return parser.parse_args()


def shoal(args, *command, device=None):
    """Run a command of Shoal's on the device; its standard output."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if (device or args.device) == "cpu" else {}
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *command],
        env=os.environ | hidden, capture_output=True, text=True, timeout=args.timeout_s, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"shoal {' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def trained(args, out, precision, steps, *more, device=None):
    """The step rows of a run on one device."""
    command = ["train", JOB, *args.size, "--workers", "1", "--steps", str(steps), "--global-batch", "8"]
    command += ["--kernels", "default"]  # one choice in all runs that are held against each other
    shoal(args, *command, "--precision", precision, "--out", str(out), *more, device=device)
    lines = sorted((out / "events").glob("*.jsonl"))[0].read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "step"]


def correct(args, folder):
    """Each check by name: whether it holds, and its figure."""
    reference = {
        precision: [row["loss"] for row in trained(args, folder / f"cpu-{precision}", precision, 4, device="cpu")]
        for precision in ("fp64", "fp32")
    }
    found = {}
    for precision, (against, tolerance) in TOLERANCE.items():
        losses = [row["loss"] for row in trained(args, folder / precision, precision, 4)]
        error = max(abs(a - b) / b for a, b in zip(losses, reference[against], strict=True))
        found[f"loss_{precision}"] = {"holds": error <= tolerance, "error": error, "tolerance": tolerance}
    resumed = folder / "resumed"
    trained(args, resumed, "fp32", 2)
    trained(args, resumed, "fp32", 4, "--resume")
    for name in ("fp32", "resumed"):
        shoal(args, "checkpoint", "export", str(folder / name), "--to", str(folder / f"{name}-weights"))
    whole, parts = (load_file(folder / f"{name}-weights" / "model.safetensors") for name in ("fp32", "resumed"))
    unequal = [name for name in whole if not torch.equal(whole[name], parts[name])]
    found["resume_bitwise"] = {"holds": not unequal, "different": unequal[:3]}
    count = torch.cuda.device_count() if args.device == "cuda" else 2
    if count > 1:
        output = shoal(args, "verify", JOB, *args.size, "--world", str(count), "--json", "--steps", "2")
        layouts = json.loads(output.strip().splitlines()[-1])["layouts"]
        bad = [row["mesh"] for row in layouts if row["status"] in ("different", "error")]
        found["layouts"] = {"holds": not bad, "tried": len(layouts), "bad": bad}
    return found


def seconds(work, device, repeats=20):
    """Median seconds of ``work``, each time awaited."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    taken = []
    for _ in range(repeats + 3):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[3:])


def rates(device):
    """What the device reaches on plain torch."""
    side = 8192 if device == "cuda" else 1024
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        found[f"matmul_{str(dtype).removeprefix('torch.')}_tflops"] = 2e-12 * side**3 / seconds(lambda: a @ b, device)  # noqa: B023
    numbers = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    out = torch.empty_like(numbers)
    found["memory_gb_per_s"] = 2e-9 * numbers.nbytes / seconds(lambda: torch.mul(numbers, 2.0, out=out), device)
    one = torch.zeros(1, device=device)
    found["kernel_start_us"] = 1e6 * seconds(lambda: [one.add_(1) for _ in range(1000)], device) / 1000
    return found


def speed(args, folder):
    """Tokens per second and peak memory by precision."""
    found = {}
    for precision in ("fp32", "bf16"):
        rows = trained(args, folder / f"speed-{precision}", precision, args.steps)[2:]
        tokens = next((int(s.split("=")[1]) for s in args.size if s.startswith("context=")), 256) * 8
        step_s = statistics.median(row["step_s"] for row in rows)
        found[precision] = {
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "peak_bytes": max(row["memory_bytes"] for row in rows),
        }
    return found


def main():
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device was found; run on a machine with one, or try the checks with --device cpu")
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    result = {"benchmark": "gpu_check", "device": name, "torch": torch.__version__}
    with tempfile.TemporaryDirectory(prefix="shoal-gpu-") as folder:
        result["correct"] = correct(args, Path(folder))
        holds = all(check["holds"] for check in result["correct"].values())
        if holds:
            result["rates"] = rates(args.device)
            result["speed"] = speed(args, Path(folder))
    print(json.dumps(result))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
