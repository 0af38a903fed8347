"""A tied GPT of 8 blocks and 8 heads, a prime vocabulary and uneven counts: any layout of 8 ranks can divide it."""

import torch
from torch import nn

import shoal
from shoal.models import GPT


class Job(shoal.Job):
    """``rows``: samples; each has another number of targets that count."""

    vocabulary: int = 61
    width: int = 64
    length: int = 32
    rows: int = 48
    dropout: float = 0.0

    def model(self):
        return GPT(self.vocabulary, self.width, layers=8, heads=8, context=self.length, dropout=self.dropout, tied=True)

    def data(self):
        generator = torch.Generator().manual_seed(1)
        samples = []
        for number in range(self.rows):
            tokens = torch.randint(self.vocabulary, (self.length + 1,), generator=generator)
            targets = tokens[1:].clone()
            targets[1 + 5 * number % self.length :] = -100
            samples.append((tokens[:-1], targets))
        return samples

    def loss(self, output, targets):
        total = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return shoal.Loss(total, (targets != -100).sum())

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
