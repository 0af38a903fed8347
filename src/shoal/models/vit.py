"""A vision transformer for small images in plain torch, written without a thought of parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ConfigError


class Attention(nn.Module):
    """Self-attention over all patches, projections packed; [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"{heads} heads were asked for with a width of {width}, which they do not divide; "
                "change the width to a multiple of the heads"
            )
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to every patch; x: [B, T, D]."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention, then a feed-forward layer of four times the width; [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Both residual branches; x: [B, T, D]."""
        x = x + self.drop(self.attention(self.norm_attention(x)))
        return x + self.drop(self.feed(self.norm_feed(x)))


class ViT(nn.Module):
    """Grey images [B, size, size] -> class logits [B, classes] (Dosovitskiy et al. 2021, arXiv 2010.11929).

    The image is cut into ``patch`` x ``patch`` squares; a learned class token gathers what the head reads.
    """

    def __init__(
        self,
        classes: int = 10,
        width: int = 64,
        layers: int = 4,
        heads: int = 4,
        size: int = 8,
        patch: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if size % patch:
            raise ConfigError(
                f"patches of {patch} pixels were asked for on images of {size} pixels, which they do not "
                "divide; change the patch to a divisor of the image's size"
            )
        self.patch = patch
        self.embed = nn.Linear(patch * patch, width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class logits [B, classes]; images: [B, size, size]."""
        rows = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        patches = self.embed(rows.flatten(3).flatten(1, 2))
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
