"""A tiny tied language model with uneven counts, and faults that the engine of a job of several ranks can be given."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.models import GPT

VOCABULARY, LENGTH = 61, 8


def rows(size):
    import torch

    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(size):
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[1 + number % LENGTH :] = -100
        samples.append((tokens[:-1], targets))
    return samples


class Job(shoal.Job):
    """``fault``: a method of Faults, put in where there are several ranks."""

    tied: bool = True
    dropout: float = 0.0
    fault: str = ""

    def model(self):
        return GPT(VOCABULARY, 16, 2, 2, LENGTH, self.dropout, tied=self.tied)

    def data(self):
        return rows(24)

    def loss(self, output, targets):
        total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return shoal.Loss(total, (targets != -100).sum())

    def optimizer(self, model):
        import torch

        if self.fault and dist.get_world_size() > 1:
            getattr(Faults, self.fault.replace("-", "_"))(model)
        return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Faults:
    """Each changes the engine in this process."""
