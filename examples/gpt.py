"""A byte-level GPT on the Python standard library's own sources. Ends by printing text that it generates.

shoal train examples/gpt.py
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.utils.data import Subset

import shoal
from shoal.data.sources.stdlib import stdlib_files
from shoal.data.sources.text import TextBytes
from shoal.models.gpt import GPT


class Job(shoal.Job):
    """Predict the next byte of Python code; the defaults are sized for a minute or two on two CPU cores."""

    defaults: ClassVar[dict] = {"steps": 300, "global_batch": 32, "eval_every": 50, "clip": 1.0}

    width: int = 128
    layers: int = 4
    heads: int = 2
    context: int = 128
    dropout: float = 0.0
    lr: float = 4e-3
    warmup: int = 20
    weight_decay: float = 0.1
    eval_sequences: int = 500
    prompt: str = "def "
    sample_bytes: int = 200
    temperature: float = 0.8

    def model(self):
        return GPT(256, self.width, self.layers, self.heads, self.context, self.dropout)

    def data(self):
        return TextBytes(stdlib_files(held_out=False), self.context)

    def eval_data(self):
        text = TextBytes(stdlib_files(held_out=True), self.context)
        return Subset(text, range(0, len(text), max(1, len(text) // self.eval_sequences)))

    def loss(self, output, targets):
        total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
        return shoal.Loss(total, targets.numel())

    def optimizer(self, model):
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        norms_and_biases = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": norms_and_biases, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def lr_schedule(self, optimizer, steps):
        def factor(step):
            if step < self.warmup:
                return (step + 1) / self.warmup
            done = (step - self.warmup) / max(1, steps - self.warmup)
            return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

        return factor

    def after(self, model, summary):
        prefix = torch.tensor(list(self.prompt.encode()))
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(0)
        ids = model.generate(prefix.to(device), self.sample_bytes, self.temperature, generator)
        print(bytes(ids.tolist()).decode("utf-8", errors="replace"))
