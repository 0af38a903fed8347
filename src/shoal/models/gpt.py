"""A decoder-only language model in plain torch, written without a thought of parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.models.block import Block


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
        self.blocks = nn.ModuleList(Block(width, heads, dropout, dropout, causal=True) for _ in range(layers))
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
