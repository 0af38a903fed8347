"""A decoder-only language model in plain torch, written without a thought of parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ConfigError


class Attention(nn.Module):
    """Causal self-attention with packed query, key and value projections; [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"{heads} heads were asked for with a width of {width}, which they do not divide; "
                "change the width to a multiple of the heads"
            )
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to earlier positions; x: [B, T, D]."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention, then a feed-forward layer of four times the width; [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Both residual branches; x: [B, T, D]."""
        x = x + self.drop(self.attention(self.norm_attention(x)))
        return x + self.drop(self.feed(self.norm_feed(x)))


class GPT(nn.Module):
    """Token ids [B, T] -> logits [B, T, V]. Learned positions, pre-norm blocks, a final norm, a linear head.

    ``tied`` makes the head share the token embedding's weight. Initial weights as in GPT-2 (Radford et al.
    2019, section 2.3): standard deviation 0.02, residual projections scaled by 1 / sqrt(2 * layers).
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        context: int,
        dropout: float = 0.0,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._start(layers)
        if tied:
            self.head.weight = self.tokens.weight

    def _start(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                residual = name.endswith(("attention.out.weight", "feed.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position; ids: [B, T] with T <= context."""
        length = ids.shape[1]
        if length > self.context:
            raise ConfigError(
                f"a sequence of {length} tokens was given to a model with a context of {self.context}; "
                "shorten the sequences or build the model with a larger context"
            )
        x = self.drop(self.tokens(ids) + self.positions.weight[:length])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(
        self, prefix_ids: Tensor, n: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """``prefix_ids`` [T] or [B, T] and ``n`` sampled tokens after it; temperature 0: the likeliest."""
        was_training = self.training
        self.eval()
        ids = prefix_ids if prefix_ids.dim() == 2 else prefix_ids[None]
        for _ in range(n):
            logits = self(ids[:, -self.context :])[:, -1].float()
            if temperature == 0:
                following = logits.argmax(dim=-1, keepdim=True)
            else:
                likelihood = (logits / temperature).softmax(dim=-1)
                following = torch.multinomial(likelihood, 1, generator=generator)
            ids = torch.cat([ids, following], dim=1)
        self.train(was_training)
        return ids if prefix_ids.dim() == 2 else ids[0]
