"""The job of plain.py as a Shoal job: a byte-level GPT of 11 M parameters.

shoal train benchmarks/shoal_job.py --workers 2 --steps 12 --global-batch 16 --micro-batch 8
"""

import torch
import torch.nn.functional as F

import shoal
from shoal.data.sources.stdlib import stdlib_files
from shoal.data.sources.text import TextBytes
from shoal.models.gpt import GPT


class Job(shoal.Job):
    """Same model, data, loss and optimizer as the plain script."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256
    lr: float = 3e-4

    def model(self):
        return GPT(256, self.width, self.layers, self.heads, self.context)

    def data(self):
        return TextBytes(stdlib_files(held_out=False), self.context)

    def loss(self, output, targets):
        total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
        return shoal.Loss(total, targets.numel())

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)
