"""What a model's code is told of tensors that it makes itself while it is traced: what a run would tell it."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from shoal.blueprint import known
from shoal.blueprint.trace import trace
from shoal.core.errors import ModelError

pytestmark = pytest.mark.unit


class Asking(nn.Module):
    """Runs a function of an input [B, T, 4] and gives what it answered as a multiple of a layer's output."""

    def __init__(self, question):
        super().__init__()
        self.layer, self.question = nn.Linear(4, 4), question

    def forward(self, x: Tensor) -> Tensor:
        self.answer = self.question(x)
        self.seen.append(self.answer)
        return self.layer(x)

    seen: list = []


def asked(question):
    """What a traced model and one that runs are told."""
    model, x = Asking(question), torch.ones(2, 3, 4)
    Asking.seen.clear()
    trace(model, (x,), {}, 2)
    model(x)
    traced, run = Asking.seen
    return traced, run


def written_through_a_view(x):
    places = torch.zeros(3, 3)
    places[1:].fill_(2)
    places.T[0].add_(1)
    return places.tolist()


def of_a_shape(x):
    ones = torch.ones_like(x[..., 0], dtype=torch.long)
    return [ones.cumsum(-1).tolist(), x.new_full((2,), 3.0).sum().item(), bool(x.new_zeros(2, 2).any())]


def chosen(x):
    mask = torch.arange(6).remainder(2).bool()
    return [mask.nonzero().flatten().tolist(), torch.arange(6)[mask].shape, int(mask.sum())]


@pytest.mark.parametrize(
    "question",
    [
        lambda x: bool((torch.arange(x.shape[1]) < 3).all()),
        lambda x: torch.tensor([2, 5]).max().item(),
        lambda x: torch.equal(torch.ones(2, 2).tril(), torch.ones(2, 2)),
        written_through_a_view,
        of_a_shape,
        chosen,
        lambda x: isinstance(torch.arange(3), torch._subclasses.FakeTensor),
        lambda x: isinstance(torch.arange(3), FakeTensor),
    ],
)
def test_a_question_about_what_the_model_made_is_answered_as_in_a_run(question):
    traced, run = asked(question)
    assert traced == run


def from_data(x):
    found = torch.zeros(2, 3)
    rows = found[1:]
    found[0, 0] = x[0, 0, 0]
    return rows


def filled(x):
    found = torch.zeros(2, 3)
    rows = found[1:]
    rows.copy_(x[:1, :, 0])
    return found


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x,
        from_data,
        filled,
        lambda x: torch.rand(3),
        lambda x: torch.zeros(3).bernoulli_(0.5),
        lambda x: torch.empty_like(torch.ones(3)),
    ],
)
def test_what_depends_on_data_or_chance_stays_unknown(made):
    """A tensor that data was written into, an alias of it, and random numbers have no answer, and code that asks for
    tracing is told so."""
    assert asked(lambda x: isinstance(made(x), torch._subclasses.FakeTensor)) == (True, False)
    with pytest.raises(ModelError, match="cannot run without its data"):
        asked(lambda x: bool(made(x).sum() > 0))


def test_what_is_large_is_not_worked_out(monkeypatch):
    monkeypatch.setattr(known, "LARGEST", 5)
    assert asked(lambda x: torch.ones(5).sum().item()) == (5.0, 5.0)
    with pytest.raises(ModelError, match="cannot run without its data"):
        asked(lambda x: torch.ones(6).sum().item())


def test_torchs_own_code_is_told_the_truth_and_names_are_given_back():
    """Its shape functions ask as well, by the same name, and tell the device by it."""
    held = torch._subclasses.fake_tensor.FakeTensor
    traced, run = asked(lambda x: torch.linalg.svd(torch.eye(3, 4)).Vh.stride())
    assert traced == run
    assert torch._subclasses.FakeTensor is FakeTensor is held


class Masking(nn.Module):
    """Attention as transformers writes it: no mask where all positions are one sequence, told from their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        places = torch.arange(x.shape[1]).repeat(x.shape[0], 1)
        parts = (torch.diff(places, prepend=places[:, :1] - 1) != 1).cumsum(-1)
        mask = None
        if isinstance(parts, torch._subclasses.FakeTensor) or not (parts[:, -1] == 0).all():
            mask = (parts[:, None] == parts[:, :, None])[:, None].tril()
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).squeeze(1)


def test_a_mask_that_a_run_leaves_out_is_left_out():
    """transformers makes a mask of packed sequences wherever it sees a fake tensor.

    https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py
    """
    blueprint = trace(Masking(), (torch.zeros(2, 6, 8),), {}, 2)
    (attention,) = [op for op in blueprint.operations if op.name == "scaled_dot_product_attention"]
    assert dict(attention.keywords)["attn_mask"] is None
