"""Weights in shards: every level, and the hybrid, train as one process does."""

import copy

import pytest
import torch
from tests.harness import run_ranks
from tests.sharding import gradients_of, micro_batches, plain, run_window, sharded, train, whole
from tests.small_jobs import LM, classes_loss, error, mlp_rows, token_loss, token_rows
from torch import nn

from shoal.engine.optimizer import NamedOptimizer
from shoal.models.gpt import GPT

pytestmark = pytest.mark.ranks

COUNTS = [3, 11, 1, 9, 12, 2, 7, 5, 4, 10, 6, 8, 1, 2, 3, 12]
STEPS = [list(range(16)), list(range(3, 14)), list(range(1, 16))]  # the second and third leave ranks without a sample


def tied_gpt():
    torch.manual_seed(0)
    return GPT(37, 16, 3, 4, 12, tied=True).double()


class Spare(LM):
    """A language model with a layer that takes no part, in a block and beside them."""

    def __init__(self):
        super().__init__(tied=True)
        self.blocks[1].spare = nn.Linear(3, 5)
        self.spare = nn.Linear(3, 5)


class Adapted(nn.Module):
    """A frozen base with a scale without dimensions and a small adapter."""

    def __init__(self):
        super().__init__()
        self.base = LM().requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.base.norm.register_forward_hook(lambda module, args, y: y + self.scale * self.up(self.down(args[0])))

    def forward(self, tokens):
        return self.base(tokens)


def seeded(kind):
    def make():
        torch.manual_seed(0)
        return kind().double()

    return make


def agree(found, wanted, bound=1e-10):
    """Losses, norms, gradients of each step and weights at the end."""
    for a, b in zip(found.losses + found.norms, wanted.losses + wanted.norms, strict=True):
        assert abs(a - b) <= bound * abs(b)
    for a, b in zip(found.gradients, wanted.gradients, strict=True):
        assert error(a, b) < bound
    assert error(found.weights, wanted.weights) < bound


MODELS = {"tied": tied_gpt, "spare": seeded(Spare), "frozen": seeded(Adapted)}
CELLS = [((2,), level, name) for level in (1, 2, 3) for name in MODELS] + [
    ((2, 2), 1, "tied"),
    ((2, 2), 2, "tied"),
    ((2, 2), 3, "tied"),
    ((2, 2), 3, "spare"),
    ((4,), 3, "tied"),
    ((4,), 2, "frozen"),
]


@pytest.mark.parametrize(("shape", "level", "name"), CELLS)
def test_training_in_shards_is_training_in_one_process(shape, level, name):
    """Four micro-batches a step, uneven counts, ranks without samples, clipping, three AdamW steps in float64."""
    ranks, rows = shape[0] * shape[-1] if len(shape) == 2 else shape[0], token_rows(COUNTS)

    def body(rank):
        held = sharded(MODELS[name](), shape, level=level)
        return train(held, rows, token_loss, STEPS, 8 // ranks // 2 or 1, clip=0.5)

    wanted = plain(MODELS[name](), rows, token_loss, STEPS, clip=0.5)
    for found in run_ranks(body, ranks):
        agree(found, wanted)


class Deep(nn.Module):
    """Blocks of which a rank calls only those that its samples need; fed with data, and after a layer."""

    def __init__(self, first):
        super().__init__()
        self.first = nn.Linear(8, 8) if first else nn.Identity()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 4)) for _ in range(2)])

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            chosen = x[:, number] > (0.5 if number == 1 else -9)
            if chosen.any():
                x = x.index_add(0, chosen.nonzero()[:, 0], block(x[chosen]))
        y = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            chosen = (x[:, 0] > 0.7) == bool(number)
            if chosen.any():
                y = y.index_add(0, chosen.nonzero()[:, 0], expert(x[chosen]))
        return y


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("first", [True, False])
def test_a_block_that_only_some_ranks_call_neither_hangs_nor_loses_its_gradient(level, first):
    """Reduce-scatters of different sizes met, or ranks waited for each other; missing gradients count as zero.

    https://github.com/pytorch/pytorch/issues/158719 https://github.com/pytorch/pytorch/issues/64629
    """
    rows = mlp_rows(16, seed=3)
    steps = [list(range(k, 16, 2)) + [k] for k in range(2)] * 2

    def make():
        torch.manual_seed(1)
        return Deep(first).double()

    def body(rank):
        calls = []
        held = sharded(make(), (2,), level=level)
        for name, module in held.model.named_modules():
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
        return train(held, rows, classes_loss, steps, 1), calls

    wanted = plain(make(), rows, classes_loss, steps)
    found = run_ranks(body, 2, timeout_s=40)
    assert found[0][1] != found[1][1]  # the ranks called different blocks
    for one, _ in found:
        agree(one, wanted)


def test_tied_weights_stay_one_parameter():
    """Embedding and head became two tensors after sharding, each with half of the gradient.

    https://github.com/verl-project/verl/issues/7834 https://github.com/NVIDIA-NeMo/Automodel/pull/2213
    https://github.com/facebookresearch/lingua/pull/75 https://github.com/meta-pytorch/torchtune/issues/616
    """
    rows = token_rows(COUNTS)

    def tied_everywhere():
        model = tied_gpt()
        model.blocks[2].feed[0].weight = model.blocks[0].feed[0].weight  # in two blocks
        return model

    def body(rank):
        model = tied_everywhere()
        before = sum(1 for _ in model.parameters())
        held = sharded(model, (2,))
        assert model.head.weight is model.tokens.weight
        found = train(held, rows, token_loss, STEPS, 2)
        assert model.head.weight is model.tokens.weight
        assert model.blocks[2].feed[0].weight is model.blocks[0].feed[0].weight
        assert sum(1 for _ in model.parameters()) == before
        return found

    wanted = plain(copy.deepcopy(tied_everywhere()), rows, token_loss, STEPS)
    for found in run_ranks(body, 2):
        agree(found, wanted)


def test_the_fused_optimizer_takes_the_step_s_factor_on_shards():
    """float32, one factor inside torch's fused kernel."""
    rows = token_rows(COUNTS)

    def steady(model):  # a large eps: gradients that are zero but for rounding move nothing
        return torch.optim.AdamW(model.parameters(), lr=0.02, eps=0.01)

    def body(rank):
        model = tied_gpt().float()
        held = sharded(model, (2,))
        gradients, made = gradients_of(held), NamedOptimizer(steady(model), model)
        for ids in STEPS:
            run_window(model, gradients, micro_batches(rank, 2, ids, 4), rows, token_loss)
            gradients.assign([True] * len(gradients.parameters))
            assert made.fused
            assert made.step(1 / sum(COUNTS[i] for i in ids))
        return {name: whole(param) for name, param in model.named_parameters()}

    wanted = plain(tied_gpt().float(), rows, token_loss, STEPS, optimizer=steady).weights
    for found in run_ranks(body, 2):
        assert error(found, wanted) < 1e-5
