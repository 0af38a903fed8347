"""Any of the varied models with its data: ``shoal verify tests/varied/job.py kind=Tied --mesh tensor=2``."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import shoal

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.varied import shapes, states
from tests.varied.shapes import C, T, V

PARTS = ("Feed", "Attend", "Block", "Symmetric", "Lora")
KINDS = {
    name: value
    for module in (shapes, states)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, nn.Module) and name not in PARTS
}
CLASSES = ("ConvText", "Recurrent", "Bag", "Masked")  # of a whole text


class Job(shoal.Job):
    kind: str = "Words"

    def model(self):
        return KINDS[self.kind]()

    def data(self):
        generator = torch.Generator().manual_seed(3)
        return [self.row(number, generator) for number in range(32)]

    def row(self, number, generator):
        target = torch.tensor(number % C)
        if self.kind in ("Groups", "Branches"):
            return torch.rand(*((1, 8, 8) if self.kind == "Groups" else (12,)), generator=generator), target
        ids = torch.randint(1, V, (T + 1,), generator=generator)
        if self.kind not in CLASSES:
            target = ids[1:].clone()
            target[1 + number % T :] = -100
        return ids[:-1], target

    def loss(self, output, targets):
        count = (targets != -100).sum()
        if not isinstance(output, dict):
            return shoal.Loss(self.entropy(output, targets), count)
        early, (kind,), _ = output["more"]
        total = self.entropy(output["logits"], targets) + 0.3 * self.entropy(early, targets)
        return shoal.Loss(total + 0.1 * self.entropy(kind, targets[:, 0] % C), count)

    @staticmethod
    def entropy(logits, targets):
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")

    def optimizer(self, model):
        trained = [param for param in model.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-6)
