"""One's own training loop on many workers; the lines that are Shoal's are marked.

python examples/own_loop.py                                      one worker
torchrun --nproc-per-node 2 examples/own_loop.py                 two; the same numbers
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import shoal


def points(n, seed):
    """Points in the plane and whether they lie inside the unit circle."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 2, generator=generator) - 2
    return TensorDataset(x, (x.norm(dim=1) < 1).float())


def loss(output, targets):
    return F.binary_cross_entropy_with_logits(output.squeeze(-1), targets)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", default="runs/own_loop")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    run = shoal.prepare(  # Shoal
        model=model,
        data=points(2048, seed=1),
        eval_data=points(512, seed=2),
        loss=loss,
        optimizer=optimizer,
        global_batch=64,
        epochs=args.epochs,
        out=args.out,
    )
    for window in run.windows():  # Shoal
        report = run.step(window)  # Shoal: forward, backward, clip, optimizer and schedule of one global batch
        if window.last_of_epoch:
            print(f"step {report.step}: loss {report.loss:.4f}, gradient norm {report.grad_norm:.3f}")
    found = run.evaluate()  # Shoal; on every rank
    if run.rank == 0:
        print(f"held out: {found}")
    run.save()  # Shoal


if __name__ == "__main__":
    main()
