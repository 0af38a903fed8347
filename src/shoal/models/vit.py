"""A vision transformer for small images in plain torch, written without a thought of parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.models.block import Block


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
        self.blocks = nn.ModuleList(Block(width, heads, dropout, 0.0, causal=False) for _ in range(layers))
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
