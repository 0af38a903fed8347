"""A vision transformer on scikit-learn's handwritten digits. Reports the accuracy on held-out digits.

shoal train examples/vit.py     (needs scikit-learn)
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import shoal
from shoal.models.vit import ViT


def digits(held_out):
    """Images [n, 8, 8] in 0..1 and their digits; every fifth image is held out."""
    loaded = load_digits()
    images = torch.tensor(loaded.images / 16, dtype=torch.float32)
    labels = torch.tensor(loaded.target)
    chosen = (torch.arange(len(labels)) % 5 == 0) == held_out
    return TensorDataset(images[chosen], labels[chosen])


class Job(shoal.Job):
    """Which digit is it?"""

    defaults: ClassVar[dict] = {"epochs": 20, "global_batch": 64, "clip": 1.0}

    width: int = 64
    layers: int = 3
    heads: int = 4
    patch: int = 2
    lr: float = 2e-3
    weight_decay: float = 0.05

    def model(self):
        return ViT(classes=10, width=self.width, layers=self.layers, heads=self.heads, patch=self.patch)

    def data(self):
        return digits(held_out=False)

    def eval_data(self):
        return digits(held_out=True)

    def loss(self, output, targets):
        return shoal.Loss(F.cross_entropy(output, targets, reduction="sum"), len(targets))

    def metrics(self, output, targets):
        correct = (output.argmax(dim=-1) == targets).sum()
        return {"accuracy": shoal.Loss(correct, len(targets))}

    def optimizer(self, model):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]  # norms, biases, class token, positions
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr)

    def lr_schedule(self, optimizer, steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps, cycle_momentum=False)
