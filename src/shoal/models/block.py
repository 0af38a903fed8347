"""A transformer's block in plain torch, written without a thought of parallelism."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ConfigError


class Attention(nn.Module):
    """Self-attention with packed projections, ``causal``: to earlier positions only; [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, *, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"{heads} heads were asked for with a width of {width}, which they do not divide; "
                "change the width to a multiple of the heads"
            )
        self.heads = heads
        self.dropout, self.causal = dropout, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """What each position takes from the others; x: [B, T, D]."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention, then a feed-forward layer of four times the width; [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads, attention_dropout, causal=causal)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Both residual branches; x: [B, T, D]."""
        x = x + self.drop(self.attention(self.norm_attention(x)))
        return x + self.drop(self.feed(self.norm_feed(x)))
