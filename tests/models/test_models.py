"""The reference models: shapes, sizes, causality, starting loss, generation, and what they refuse."""

import math

import pytest
import torch
import torch.nn.functional as F

from shoal.core.errors import ConfigError
from shoal.models import GPT, ViT

pytestmark = pytest.mark.unit


def small(**changes):
    """A tiny GPT."""
    torch.manual_seed(0)
    return GPT(**{"vocabulary": 16, "width": 32, "layers": 2, "heads": 4, "context": 12} | changes)


def test_gpt_gives_logits_of_every_position():
    assert small()(torch.randint(16, (3, 9))).shape == (3, 9, 16)


def test_gpt_has_the_size_that_its_settings_say():
    width, layers, vocabulary, context = 384, 6, 256, 256
    block = 12 * width**2 + 13 * width  # projections and feed-forward with biases, two norms
    expected = layers * block + 2 * vocabulary * width + context * width + 2 * width
    model = GPT(vocabulary, width, layers, 6, context)
    assert sum(p.numel() for p in model.parameters()) == expected


def test_gpt_sees_no_later_token():
    model = small().eval()
    ids = torch.randint(16, (2, 12))
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 16
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_gpt_tells_positions_apart():
    logits = small().eval()(torch.full((1, 12), 3))
    assert not torch.allclose(logits[0, 0], logits[0, 5])


def test_gpt_starts_at_the_loss_of_a_uniform_guess():
    ids = torch.randint(16, (8, 12))
    loss = F.cross_entropy(small()(ids).flatten(0, 1), torch.randint(16, (96,)))
    assert loss.item() == pytest.approx(math.log(16), abs=0.1)


def test_gpt_is_the_same_under_the_same_seed():
    first, second = small(), small()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_gpt_head_is_untied_unless_asked():
    assert small().head.weight is not small().tokens.weight
    tied = small(tied=True)
    assert tied.head.weight is tied.tokens.weight


def test_gpt_dropout_acts_in_training_only():
    model, ids = small(dropout=0.5), torch.randint(16, (2, 12))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_every_gpt_parameter_gets_a_gradient():
    model = small()
    model(torch.randint(16, (4, 12))).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_gpt_learns_a_cycle():
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = torch.arange(13).repeat(4, 1) % 5
    for _ in range(40):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert model.generate(torch.tensor([0, 1]), 6, temperature=0).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_generate_goes_on_past_the_context():
    assert small().generate(torch.tensor([1]), 30).shape == (31,)


def test_generate_takes_a_batch_of_prefixes():
    prefixes = torch.randint(16, (3, 4))
    ids = small().generate(prefixes, 5)
    assert ids.shape == (3, 9)
    assert torch.equal(ids[:, :4], prefixes)


def test_generate_depends_on_its_generator_alone():
    model, prefix = small(dropout=0.5), torch.tensor([1, 2])
    texts = [model.generate(prefix, 20, 1.0, torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_generate_leaves_the_mode_as_it_was():
    model = small()
    model.generate(torch.tensor([1]), 1)
    assert model.training
    model.eval().generate(torch.tensor([1]), 1)
    assert not model.training


def test_gpt_refuses_a_sequence_beyond_its_context():
    with pytest.raises(ConfigError, match="a sequence of 13 tokens was given to a model with a context of 12"):
        small()(torch.zeros(1, 13, dtype=torch.long))


@pytest.mark.parametrize("make", [lambda: small(heads=5), lambda: ViT(width=32, heads=5)])
def test_models_refuse_heads_that_do_not_divide_the_width(make):
    with pytest.raises(ConfigError, match="5 heads were asked for with a width of 32"):
        make()


def test_vit_gives_logits_of_every_class():
    assert ViT(width=32, layers=2)(torch.rand(5, 8, 8)).shape == (5, 10)


def test_vit_cuts_an_image_into_its_patches_row_by_row():
    model = ViT(width=32, layers=1, patch=4)
    image = torch.arange(64.0).reshape(1, 8, 8)
    seen = []
    model.embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(image)
    assert seen[0].shape == (1, 4, 16)
    assert torch.equal(seen[0][0, 1], image[0, :4, 4:].flatten())
    assert torch.equal(seen[0][0, 2], image[0, 4:, :4].flatten())


def test_every_vit_parameter_gets_a_gradient():
    model = ViT(width=32, layers=2)
    model(torch.rand(4, 8, 8)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_vit_refuses_patches_that_do_not_divide_the_image():
    with pytest.raises(ConfigError, match="patches of 3 pixels were asked for on images of 8 pixels"):
        ViT(patch=3)
