"""How much can faster float32 products gain a whole step on this processor? One JSON line.

python benchmarks/float32_limit.py --rounds 5

One worker, one thread, a step of the job of compare.py (case A, without communication), profiled. ``products`` is the
share of the step's time in matrix products, ``kernels`` the rate of each float32 kernel of torch on those very shapes.
``gain`` is then what the step would gain if every product ran at the fastest kernel's rate (Amdahl's law), and
``gain_if_all_else_were_free`` the same if, further, everything that is not a product took no time: no choice of kernels
reaches beyond it.
"""

import argparse
import json
import statistics
import time

import torch
from shoal_job import Job
from torch.profiler import ProfilerActivity, profile

PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm")
KERNELS = ("highest", "medium")  # torch's names of its float32 products on a CPU


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences")
    return parser.parse_args()


class Worker:
    """One worker's steps with torch's default kernels."""

    def __init__(self, micro_batch):
        torch.manual_seed(0)
        self.job = Job()
        self.model = self.job.model()
        self.optimizer = self.job.optimizer(self.model)
        rows = torch.stack([torch.as_tensor(self.job.data()[index][0]) for index in range(micro_batch)])
        self.inputs, self.targets = rows, rows.roll(-1, 1)

    def step(self):
        loss = self.job.loss(self.model(self.inputs), self.targets)
        (loss.sum / loss.count).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def profiled(worker, rounds):
    """Seconds of a step, seconds of its products, and the products' shapes with how often each comes."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        for _ in range(rounds):
            worker.step()
    rows = found.key_averages(group_by_input_shape=True)
    seconds = sum(row.self_cpu_time_total for row in rows) / 1e6 / rounds
    products = [row for row in rows if row.key in PRODUCTS]
    shapes = {}
    for row in products:
        left, right = [shape for shape in row.input_shapes if len(shape) > 1][-2:]
        shape = (*left, right[-1])
        shapes[shape] = shapes.get(shape, 0) + row.count // rounds
    return seconds, sum(row.self_cpu_time_total for row in products) / 1e6 / rounds, shapes


def timed(shapes):
    """Seconds that all products of a step take with the kernels that are set, each shape by its least time."""
    total = 0.0
    for (*batch, m, k, n), count in shapes.items():
        left, right, least = torch.randn(*batch, m, k), torch.randn(*batch, k, n), float("inf")
        for _ in range(5):
            start = time.perf_counter()
            torch.matmul(left, right)
            least = min(least, time.perf_counter() - start)
        total += least * count
    return total


def main():
    args = arguments()
    torch.set_num_threads(1)
    worker = Worker(args.micro_batch)
    for _ in range(2):
        worker.step()
    step_s, products_s, shapes = profiled(worker, args.rounds)
    flops = sum(2 * count * torch.Size(shape).numel() for shape, count in shapes.items())
    found = {name: [] for name in KERNELS}
    for _ in range(args.rounds):
        for name in KERNELS:
            torch.set_float32_matmul_precision(name)
            found[name].append(timed(shapes))
    seconds = {name: statistics.median(each) for name, each in found.items()}
    fastest_s = min(products_s, *seconds.values())
    result = {
        "benchmark": "float32_limit",
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "step_s": step_s,
        "products": products_s / step_s,
        "products_flops_per_s": flops / products_s,
        "kernels_flops_per_s": {name: flops / each for name, each in seconds.items()},
        "gain": step_s / (step_s - products_s + fastest_s),
        "gain_if_all_else_were_free": step_s / fastest_s,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
