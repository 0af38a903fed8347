"""The plain PyTorch way: torchrun, DDP and a hand-written loop, for a byte-level GPT of 11 M parameters.

torchrun --standalone --nproc-per-node 2 benchmarks/plain.py --steps 12 --t0 $(date +%s.%N)

Only the model and the data set are Shoal's, so that both sides of a comparison train the same. The last line
of rank 0's output is one JSON object.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from shoal.data.sources.stdlib import stdlib_files
from shoal.data.sources.text import TextBytes
from shoal.models.gpt import GPT


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in one step")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences per worker and micro-batch")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=2, help="first steps left out of the median")
    parser.add_argument("--t0", type=float, default=time.time(), help="seconds since 1970 when the command began")
    return parser.parse_args()


def batches(loader, sampler):
    """Micro-batches without end, shuffled anew each epoch."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def train_step(model, optimizer, stream, args):
    """One optimizer update; the mean loss of this rank's micro-batches."""
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for i in range(args.accumulate):
        inputs, targets = next(stream)
        last = i == args.accumulate - 1
        with nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / args.accumulate
            loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def main():
    args = arguments()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(256, args.width, args.layers, args.heads, args.context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = TextBytes(stdlib_files(held_out=False), args.context)
    sampler = DistributedSampler(data, seed=0, drop_last=True)
    stream = batches(DataLoader(data, batch_size=args.micro_batch, sampler=sampler, drop_last=True), sampler)

    step_s, first_step_s, before = [], None, time.perf_counter()
    for step in range(1, args.steps + 1):
        loss = train_step(model, optimizer, stream, args)
        now = time.perf_counter()
        step_s.append(now - before)
        before = now
        if first_step_s is None:
            first_step_s = time.time() - args.t0
        if rank == 0:
            print(f"step {step} loss {loss:.4f} {step_s[-1]:.4f} s", flush=True)

    scale = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    peaks = [None] * ranks
    dist.all_gather_object(peaks, peak)
    if rank == 0:
        median = statistics.median(step_s[args.warmup :] or step_s)
        tokens = ranks * args.accumulate * args.micro_batch * args.context
        row = {"step_s": median, "tokens_per_s": tokens / median, "first_step_s": first_step_s}
        row |= {"peak_rss_bytes": peaks, "steps_s": step_s, "loss": loss, "ranks": ranks}
        row |= {"parameters": sum(p.numel() for p in model.parameters()), "threads": torch.get_num_threads()}
        print(json.dumps(row | {"omp_num_threads": os.environ.get("OMP_NUM_THREADS")}), flush=True)
    dist.barrier()  # a rank that leaves early can abort the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
