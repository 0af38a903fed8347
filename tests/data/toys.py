"""Data sets and readers of the data tests: several ranks are so many Windows in one process."""

from __future__ import annotations

import random

import numpy as np
import torch

from shoal.data import DataSettings, Windows


class Ids:
    """Map-style: sample i is the number i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(index)


class Noise(Ids):
    """Map-style: three random numbers from three generators."""

    def __getitem__(self, index):
        return torch.rand(1).item(), np.random.rand(), random.random()


class Shards:
    """Iterable: lists of numbers, split by whole shards, with a state."""

    def __init__(self, shards, noise=False):
        self.shards, self.noise, self.read = shards, noise, 0

    @property
    def num_shards(self):
        return len(self.shards)

    def shard(self, num_shards, index):
        return Shards(self.shards[index::num_shards], self.noise)

    def __iter__(self):
        items = [item for shard in self.shards for item in shard]
        for item in items[self.read :]:
            self.read += 1
            yield (item, np.random.rand()) if self.noise else item
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


class Stream:
    """Iterable without a split; shuffles with torch's global generator."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        for item in torch.randperm(self.size).tolist():
            yield item, random.random()


def settings(rank=0, ranks=1, **more):
    defaults = {"global_batch": 8, "micro_batch": 2, "seed": 7}
    return DataSettings(rank=rank, ranks=ranks, **{**defaults, **more})


def read(dataset, first, stop, ranks=1, state=None, **more):
    """``result[rank]``: the windows of that rank."""
    result = []
    for rank in range(ranks):
        windows = Windows(dataset, settings(rank, ranks, **more))
        result.append(list(windows.iterate(first, stop, state)))
        windows.close()
    return result


def ids_of(windows):
    """Sample ids of one rank's windows, in order."""
    return [sample for window in windows for micro in window.micro_batches for sample in micro.ids]


def values_of(windows):
    """Collated values of real micro-batches, flat."""
    return [
        value
        for window in windows
        for micro in window.micro_batches
        if not micro.padding
        for value in torch.stack([torch.as_tensor(part) for part in micro.batch]).flatten().tolist()
    ]
