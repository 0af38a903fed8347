"""A model straight into shards has the first weights of model(), and is not held whole on the way."""

import pytest
import torch
from tests.harness import run_ranks
from tests.sharding import mesh_of, plain, train, whole
from tests.small_jobs import error, token_loss, token_rows
from torch import nn

from shoal.models.gpt import GPT
from shoal.parallel.shard.materialise import materialise
from shoal.parallel.shard.spec import ShardSettings

pytestmark = pytest.mark.ranks

ROWS = token_rows([3, 11, 1, 9, 12, 2, 7, 5])


def gpt():
    return GPT(37, 64, 4, 4, 12, tied=True)


class Odd(nn.Module):
    """Buffers, tensors that are attributes, a scale without dimensions, weights that are made of others."""

    def __init__(self):
        super().__init__()
        self.lin, self.emb, self.norm = nn.Linear(8, 8), nn.Embedding(10, 8, padding_idx=3), nn.BatchNorm1d(8)
        nn.init.orthogonal_(self.lin.weight)
        self.register_buffer("frequency", 1.0 / 10 ** (torch.arange(0, 8).float() / 8))
        self.table = torch.outer(torch.arange(4.0), self.frequency)
        self.order = torch.randperm(7)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.again = nn.Module()
        self.again.scale = self.scale
        self.last = nn.Parameter(torch.randn(3, 3) @ self.lin.weight.data[:3, :3])


class Reading(nn.Module):
    """Its constructor looks at a value."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 4)
        if float(self.lin.weight.sum()) > -1e9:
            nn.init.normal_(self.lin.bias)


class Seeding(nn.Module):
    """Its constructor sets a seed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.lin = nn.Linear(8, 4)


def seed():
    torch.manual_seed(5)


def made(kind, **settings):
    return materialise(kind, seed, mesh_of((2,)), ShardSettings(**settings), torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "note"),
    [(gpt, None), (Odd, None), (Reading, "DataDependentOutput"), (Seeding, "sets a seed of its own")],
)
def test_first_weights_are_those_of_the_whole_model_bitwise(kind, note):
    def body(rank):
        result = made(kind)
        seed()
        single = kind()
        found = dict(result.sharded.model.named_parameters())
        assert {n: tuple(p.shape) for n, p in found.items()} == {
            n: tuple(p.shape) for n, p in single.named_parameters()
        }
        assert all(torch.equal(whole(found[name]), param.detach()) for name, param in single.named_parameters())
        buffers = dict(result.sharded.model.named_buffers())
        assert all(torch.equal(buffers[name], buffer) for name, buffer in single.named_buffers())
        if kind is Odd:
            assert torch.equal(result.sharded.model.table, single.table)
            assert torch.equal(result.sharded.model.order, single.order)
        return result.note

    for told in run_ranks(body, 2):
        assert told is None if note is None else note in told and "built whole on every rank" in told


def test_a_model_made_in_shards_trains_the_same_and_keeps_its_ties():
    """Tied weights became two tensors after a start without data.

    https://github.com/verl-project/verl/issues/7834 https://github.com/meta-pytorch/torchtune/issues/616
    """
    steps = [list(range(8)), list(range(1, 8))]

    def body(rank):
        result = materialise(gpt, seed, mesh_of((2,)), ShardSettings(level=3), torch.device("cpu"), wide=torch.float64)
        model = result.sharded.model
        assert model.head.weight is model.tokens.weight
        return train(result.sharded, ROWS, token_loss, steps, 2), result.whole_bytes

    seed()
    single = gpt()
    most = max(param.numel() * param.element_size() for param in single.parameters())
    wanted = plain(single.double(), ROWS, token_loss, steps)
    for found, held in run_ranks(body, 2):
        assert error(found.weights, wanted.weights) < 1e-10
        assert held == most  # one weight at a time
