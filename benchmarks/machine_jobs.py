"""The jobs of ``this_machine.py``: three that the planner's constants were fitted on, and three that they were not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.models.gpt import GPT
from shoal.models.vit import ViT

ROWS = 4096


class Pairs:
    """Inputs with their targets."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Translations(Pairs):
    """Sentences with another language's, whose every word is to be told from those before."""

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        said = self.targets[index]
        return {"source": self.inputs[index], "target": said[:-1]}, said[1:]


def tokens(vocabulary: int, positions: int) -> Pairs:
    """Random text."""
    ids = _ids(vocabulary, positions + 1)
    return Pairs(ids[:, :-1], ids[:, 1:])


def pictures(size: int, classes: int) -> Pairs:
    """Random images and classes."""
    generator = torch.Generator().manual_seed(0)
    return Pairs(
        torch.rand(ROWS, size, size, generator=generator), torch.randint(classes, (ROWS,), generator=generator)
    )


def _ids(vocabulary: int, positions: int, seed: int = 0) -> Tensor:
    return torch.randint(vocabulary, (ROWS, positions), generator=torch.Generator().manual_seed(seed))


# Those that constants were fitted on


class Deep(shoal.Job):
    """A narrow language model of many layers."""

    def model(self):
        return GPT(256, 96, 8, 4, 64)

    def data(self):
        return tokens(256, 64)

    def loss(self, output, targets):
        total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
        return shoal.Loss(total, targets.numel())

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-4)


class Wide(Deep):
    """A wide language model of few layers and many words."""

    def model(self):
        return GPT(2048, 192, 4, 4, 64)

    def data(self):
        return tokens(2048, 64)


class Image(Deep):
    """A vision transformer."""

    def model(self):
        return ViT(classes=64, width=128, layers=4, heads=4, size=16, patch=2)

    def data(self):
        return pictures(16, 64)

    def loss(self, output, targets):
        return shoal.Loss(F.cross_entropy(output, targets, reduction="sum"), len(targets))


# Those that they were not


class GatedBlock(nn.Module):
    """A Llama's block: heads that share keys and values, rotary positions, a gated feed-forward layer, no biases."""

    def __init__(self, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm_attention, self.norm_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, shared * self.size, bias=False)
        self.v = nn.Linear(width, shared * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, D]; cos, sin: [T, d]."""
        y = self.norm_attention(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (part * cos + _turned(part) * sin for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm_feed(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat([-other, one], dim=-1)


class GatedModel(nn.Module):
    """A small Llama [B, T] -> [B, T, V]."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, positions: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GatedBlock(width, heads, heads // 2, 432) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(positions), 1e4 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [B, T]."""
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class Gated(Deep):
    """A small Llama."""

    def model(self):
        return GatedModel(1000, 160, 6, 8, 64)

    def data(self):
        return tokens(1000, 64)


class MixerBlock(nn.Module):
    """Mixes places, then channels (Tolstikhin et al. 2021, https://arxiv.org/abs/2105.01601)."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm_across, self.norm_along = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(places, 256), nn.GELU(), nn.Linear(256, places))
        self.along = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]."""
        x = x + self.across(self.norm_across(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norm_along(x))


class MixerModel(nn.Module):
    """Grey images [B, S, S] in patches of 4 x 4 -> class logits [B, C]."""

    def __init__(self, classes: int, width: int, layers: int, size: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(MixerBlock((size // 4) ** 2, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """images: [B, S, S]."""
        x = self.embed(images.unfold(1, 4, 4).unfold(2, 4, 4).flatten(3).flatten(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Mixer(Image):
    """An MLP-Mixer: no attention."""

    def model(self):
        return MixerModel(100, 192, 6, 32)

    def data(self):
        return pictures(32, 100)


class TranslatorModel(nn.Module):
    """torch's own transformer, encoder and decoder: [B, S], [B, T] -> [B, T, V]."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.both = nn.Transformer(width, 4, layers, layers, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the target's places."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.both(self.words(source), self.words(target), tgt_mask=mask, tgt_is_causal=True))


class Translator(Deep):
    """An encoder and a decoder."""

    def model(self):
        return TranslatorModel(512, 128, 3)

    def data(self):
        return Translations(_ids(512, 48), _ids(512, 41, seed=1))


JOBS: dict[str, type[shoal.Job]] = {
    "deep": Deep, "wide": Wide, "image": Image, "gated": Gated, "mixer": Mixer, "translator": Translator
}  # fmt: skip
#: What no constant was fitted on.
NEW = ("gated", "mixer", "translator")
