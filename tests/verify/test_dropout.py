"""Dropout under verify: masks that depend on seed, step, place, sample and element, and on nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ModelError
from shoal.engine.randomness import key, seed_all
from shoal.models import GPT
from shoal.parallel.recompute.apply import apply
from shoal.verify.dropout import Keyed
from shoal.verify.exact import Exactly, keep_all

pytestmark = pytest.mark.unit
IDS = torch.arange(24).reshape(3, 8)


class Direct(nn.Module):
    """Drops by a function in its own forward, as many transformers do, and calls one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x)) + self.drop(x)
        return F.dropout(self.second(x), 0.3, self.training)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Direct(), Direct()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def ran(model: nn.Module, x: Tensor, ids: tuple[int, ...], *, step: int = 0, number: int = 0) -> Tensor:
    """The model's output in the forward of a step's micro-batch, after a backward."""
    mode = Exactly(lift=False)
    with mode:
        mode.keyed.watch(model)
        mode.keyed.takes(key(7, step, number, 0), key(7, step), ids)
        seed_all(7, step, number, 0)
        out = model(x)
        (out**2).sum().backward()
    for module in model.modules():
        module._compiled_call_impl = None
    return out.detach()


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(61, 16, 2, 2, 8, 0.3)


def test_a_sample_has_the_same_masks_in_every_micro_batch_and_others_in_every_step() -> None:
    model = gpt()
    together = ran(model, IDS, (5, 6, 9))
    assert torch.allclose(ran(model, IDS[1:], (6, 9), number=3), together[1:], atol=1e-6)
    assert not torch.allclose(ran(model, IDS[1:], (6, 8), number=3)[1], together[2])
    assert not torch.allclose(ran(model, IDS, (5, 6, 9), step=1), together)
    model.eval()
    assert torch.equal(ran(model, IDS, (5, 6, 9)), model(IDS))


def test_every_call_has_masks_of_its_own_and_recomputed_ones_their_own_again() -> None:
    x = torch.ones(2, 4, 8)
    torch.manual_seed(0)
    kept, again = Stacked(), Stacked()
    again.load_state_dict(kept.state_dict())
    apply(again, "full")
    assert torch.equal(ran(kept, x, (1, 2)), ran(again, x, (1, 2)))
    for mine, other in zip(kept.parameters(), again.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None and torch.equal(mine.grad, other.grad)
    twice = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    both = ran(twice, torch.ones(2, 64, requires_grad=True), (1, 2))
    assert set(both.unique().tolist()) == {0.0, 4.0} and 0.15 < (both > 0).float().mean() < 0.35


@pytest.mark.parametrize(
    ("function", "shape", "alike"),
    [(F.dropout, (4, 512), ()), (F.dropout2d, (4, 512, 2, 2), (2, 3)), (F.dropout1d, (4, 512, 3), (2,))],
)
def test_masks_keep_as_many_as_asked_for_and_whole_channels_where_asked_for(function, shape, alike) -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x, 0.25, True)

    found = ran(Drops(), torch.ones(shape, requires_grad=True), (1, 2, 3, 4))
    assert found.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert 0.65 < (found > 0).float().mean() < 0.85
    for dim in alike:
        assert torch.equal(found, found.narrow(dim, 0, 1).expand_as(found))


@pytest.mark.parametrize("mask", [None, "bool", "added", "causal"])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_that_drops_is_attention_but_for_what_it_drops(mask, heads, monkeypatch) -> None:
    monkeypatch.setattr(Keyed, "mask", lambda self, place, like, p, channels=False: torch.ones_like(like))
    torch.manual_seed(0)
    query, keys, values = (torch.randn(2, h, 5, 8, requires_grad=True) for h in (4, heads, heads))
    given = {"is_causal": mask == "causal", "enable_gqa": heads != 4, "scale": 0.3}
    if mask in ("bool", "added"):
        kept = torch.ones(5, 5, dtype=torch.bool).tril()
        given["attn_mask"] = kept if mask == "bool" else torch.zeros(5, 5).masked_fill(~kept, float("-inf"))

    class Attends(nn.Module):
        p = 0.5

        def forward(self, query: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, keys, values, dropout_p=self.p, **given)

    model = Attends()
    found = ran(model, query, (1, 2))
    model.p = 0.0
    assert torch.allclose(found, model(query), atol=1e-6)


def test_a_dropout_whose_samples_cannot_be_told_is_refused_by_name() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x.sum(0))

    text = r"dropout in drop works on a tensor of shape \[7\], in which .*the micro-batch's 3 samples.*switches it off"
    with pytest.raises(ModelError, match=text):
        ran(Mixed(), torch.ones(3, 7, requires_grad=True), (1, 2, 3))


def test_forms_without_keyed_masks_are_switched_off_and_named() -> None:
    mode = Exactly(lift=False)
    x = torch.ones(4, 8)
    with mode:
        assert torch.equal(F.alpha_dropout(x, 0.5, True), x)
    assert mode.off == {"alpha_dropout"}
    model = nn.ModuleList([nn.LSTM(4, 4, 2, dropout=0.5), nn.MultiheadAttention(4, 2, dropout=0.5), nn.GRU(4, 4)])
    assert keep_all(model) == {"LSTM", "MultiheadAttention"}
    assert model[0].dropout == model[1].dropout == 0.0
