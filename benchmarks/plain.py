"""The plain PyTorch way: torchrun, a hand-written loop and layout, for a byte-level GPT of 11 M parameters.

torchrun --standalone --nproc-per-node 2 benchmarks/plain.py --steps 12 --t0 $(date +%s.%N)

Layouts: DDP; fully_shard on each block; parallelize_module with column and row layers, for which query, key and
value stand in layers of their own; 1F1B over stages cut by hand. Only the model and the data set are Shoal's, so that
both sides of a comparison train the same. The last line of rank 0's output is one JSON object.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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
    parser.add_argument("--layout", choices=("replicate", "shard", "tensor", "pipeline"), default="replicate")
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


class SplitAttention(nn.Module):
    """The model's attention with query, key and value as layers of their own, over the heads that are here."""

    def __init__(self, packed):
        super().__init__()
        self.head_width = packed.qkv.in_features // packed.heads
        for name, weight, bias in zip("qkv", packed.qkv.weight.chunk(3), packed.qkv.bias.chunk(3), strict=True):
            layer = nn.Linear(*reversed(weight.shape))
            layer.weight, layer.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
            setattr(self, name, layer)
        self.out = packed.out

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Stage(nn.Module):
    """The first or the last half of the model."""

    def __init__(self, model, rank, ranks):
        super().__init__()
        count = len(model.blocks)
        self.blocks = model.blocks[count * rank // ranks : count * (rank + 1) // ranks]
        if rank == 0:
            self.tokens, self.positions = model.tokens, model.positions
        if rank == ranks - 1:
            self.norm, self.head = model.norm, model.head

    def forward(self, x):
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def split_model(args, rank, ranks):
    """The model in the layout that was asked for."""
    model = GPT(256, args.width, args.layers, args.heads, args.context)
    if args.layout == "replicate":
        return DistributedDataParallel(model)
    if args.layout == "shard":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if args.layout == "pipeline":
        return Stage(model, rank, ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.out": RowwiseParallel()}
    plan |= {"feed.0": ColwiseParallel(), "feed.2": RowwiseParallel()}
    for block in model.blocks:
        block.attention = SplitAttention(block.attention)
        parallelize_module(block, mesh, plan)
    return model


def mean_loss(output, targets):
    """Cross-entropy of all tokens."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def pipeline_step(model, optimizer, schedule, stream, args):
    """One optimizer update by a pipeline schedule; the mean loss, which the last rank alone has."""
    optimizer.zero_grad(set_to_none=True)
    window = [next(stream) for _ in range(args.accumulate)]
    inputs, targets = (torch.cat(parts) for parts in zip(*window, strict=True))
    losses = []
    if hasattr(model, "tokens"):
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=losses)
    optimizer.step()
    return torch.stack(losses).mean().item() if losses else 0.0


def train_step(model, optimizer, stream, args):
    """One optimizer update; the mean loss of this rank's micro-batches."""
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for i in range(args.accumulate):
        inputs, targets = next(stream)
        last = i == args.accumulate - 1
        with nullcontext() if last or args.layout != "replicate" else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
                loss = mean_loss(model(inputs), targets) / args.accumulate
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
    model = split_model(args, rank, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = TextBytes(stdlib_files(held_out=False), args.context)
    readers = ranks if args.layout in ("replicate", "shard") else 1
    sampler = DistributedSampler(data, readers, rank % readers, seed=0, drop_last=True)
    stream = batches(DataLoader(data, batch_size=args.micro_batch, sampler=sampler, drop_last=True), sampler)

    schedule = None
    if args.layout == "pipeline":
        stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
        schedule = Schedule1F1B(stage, args.accumulate, loss_fn=mean_loss)
    step_s, first_step_s, before = [], None, time.perf_counter()
    for step in range(1, args.steps + 1):
        if schedule is None:
            loss = train_step(model, optimizer, stream, args)
        else:
            loss = pipeline_step(model, optimizer, schedule, stream, args)
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
        tokens = readers * args.accumulate * args.micro_batch * args.context
        row = {"step_s": median, "tokens_per_s": tokens / median, "first_step_s": first_step_s}
        row |= {"peak_rss_bytes": peaks, "steps_s": step_s, "loss": loss, "ranks": ranks}
        row |= {"parameters": sum(p.numel() for p in model.parameters()), "threads": torch.get_num_threads()}
        print(json.dumps(row | {"omp_num_threads": os.environ.get("OMP_NUM_THREADS")}), flush=True)
    dist.barrier()  # a rank that leaves early can abort the others
    sys.stdout.flush()
    os._exit(0)  # taking gloo down aborts now and then ("terminate called without an active exception")


if __name__ == "__main__":
    main()
