"""Small models as users write them: overwriting, functions of their own, experts, frozen and tied weights, states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.varied.shapes import Block, C, D, Feed, V, Words
from torch import nn


class InPlace(Words):
    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 32), nn.Linear(32, D)

        def forward(self, x):
            h = self.up(self.norm(x))
            h.mul_(0.5).add_(0.1).relu_()
            y = self.down(h)
            y += x
            y[:, 0] = y[:, 0] * 2
            return y

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
            x.mul_(0.9)
        return self.head(x)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


class RowNorm(torch.autograd.Function):
    """Normalises the last dimension, by hand."""

    @staticmethod
    def forward(ctx, x):
        n = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x, n)
        return x / n

    @staticmethod
    def backward(ctx, grad):
        x, n = ctx.saved_tensors
        return grad / n - x * (grad * x).sum(-1, keepdim=True) / n**3


class Custom(Words):
    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(D, 32), nn.Linear(32, D)

        def forward(self, x):
            return x + self.down(Swish.apply(self.up(RowNorm.apply(x))))


class CustomInside(Words):
    """A hand-written function over the divided dimension."""

    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(D, 32), nn.Linear(32, D)

        def forward(self, x):
            return x + self.down(RowNorm.apply(self.up(x)))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(V, D, mode="mean")
        self.blocks = nn.ModuleList(Feed() for _ in range(3))
        self.out = nn.Linear(D, C)

    def forward(self, ids):
        x = self.bag(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class TopK(Words):
    """Mixture of experts, dense dispatch by masks: every expert runs on all tokens, weights are zero elsewhere."""

    class B(nn.Module):
        def __init__(self, experts=4, k=2):
            super().__init__()
            self.k, self.router = k, nn.Linear(D, experts)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D)) for _ in range(experts)
            )

        def forward(self, x):
            scores = self.router(x).softmax(-1)
            top, index = scores.topk(self.k, -1)
            gates = torch.zeros_like(scores).scatter(-1, index, top / top.sum(-1, keepdim=True))
            return x + sum(gates[..., e : e + 1] * expert(x) for e, expert in enumerate(self.experts))


class Stacked(Words):
    """Mixture of experts with stacked weights, by einsum."""

    class B(nn.Module):
        def __init__(self, experts=4):
            super().__init__()
            self.router = nn.Linear(D, experts)
            self.up, self.down = (
                nn.Parameter(torch.randn(experts, D, 32) / 4),
                nn.Parameter(torch.randn(experts, 32, D) / 6),
            )

        def forward(self, x):
            gates = self.router(x).softmax(-1)
            h = F.gelu(torch.einsum("btd,edh->bteh", x, self.up))
            return x + torch.einsum("bteh,ehd,bte->btd", h, self.down, gates)


class Sparse(Words):
    """Mixture with real dispatch: which tokens go where depends on data."""

    class B(nn.Module):
        def __init__(self, experts=2):
            super().__init__()
            self.router = nn.Linear(D, experts)
            self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(experts))

        def forward(self, x):
            flat = x.reshape(-1, D)
            gates = self.router(flat).softmax(-1)
            best = gates.argmax(-1)
            out = torch.zeros_like(flat)
            for e, expert in enumerate(self.experts):
                at = (best == e).nonzero().squeeze(-1)
                out = out.index_add(0, at, expert(flat[at]) * gates[at, e, None])
            return x + out.view_as(x)


class Parameters(nn.Module):
    """ParameterList and ParameterDict, used by index."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(V, D)
        self.ups = nn.ParameterList(nn.Parameter(torch.randn(32, D) / 4) for _ in range(3))
        self.downs = nn.ParameterList(nn.Parameter(torch.randn(32, D) / 6) for _ in range(3))
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(D)), "b": nn.Parameter(torch.zeros(V))})

    def forward(self, ids):
        x = self.tokens(ids)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + torch.relu(x @ up.T) @ down
        return F.linear(x * self.scales["a"], self.tokens.weight, self.scales["b"])


class Nested(Words):
    """State goes through blocks as nested tuples and a dict."""

    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.gate = Block(), nn.Linear(D, D)

        def forward(self, state):
            x, (memory, info) = state
            x = self.block(x) + memory
            return x, (
                torch.tanh(self.gate(memory)) + memory,
                {"depth": info["depth"] + 1, "last": x.mean(1, keepdim=True)},
            )

    def forward(self, ids):
        x = self.tokens(ids)
        state = (x, (torch.zeros_like(x), {"depth": 0, "last": x[:, :1]}))
        for block in self.blocks:
            state = block(state)
        return self.head(state[0] + state[1][1]["last"] * state[1][1]["depth"])


class Dropping(Words):
    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.drop, self.last = (
                nn.Linear(D, 32),
                nn.Linear(32, D),
                nn.Dropout(0.2),
                nn.Dropout1d(0.3),
            )

        def forward(self, x):
            return x + self.last(self.drop(self.down(self.drop(torch.relu(self.up(x))))))


class Frozen(Words):
    """A frozen backbone with a new head and a frozen batch of norms."""

    def __init__(self):
        super().__init__()
        for p in (*self.tokens.parameters(), *self.blocks.parameters()):
            p.requires_grad_(False)


class HalfFrozen(Words):
    """The first half frozen, under no_grad."""

    def __init__(self):
        super().__init__()
        for p in (*self.tokens.parameters(), *self.blocks[:2].parameters()):
            p.requires_grad_(False)

    def forward(self, ids):
        with torch.no_grad():
            x = self.tokens(ids)
            for block in self.blocks[:2]:
                x = block(x)
        for block in self.blocks[2:]:
            x = block(x)
        return self.head(x)


class Lora(nn.Module):
    def __init__(self, inner, rank=2):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a, self.b = (
            nn.Parameter(torch.randn(rank, inner.in_features) / 4),
            nn.Parameter(torch.randn(inner.out_features, rank) / 4),
        )

    def forward(self, x):
        return self.inner(x) + (x @ self.a.T @ self.b.T) * 2.0


class Adapted(Words):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.attend.q, block.attend.v, block.feed.up = (
                Lora(block.attend.q),
                Lora(block.attend.v),
                Lora(block.feed.up),
            )


class Tied(Words):
    """Input and output tied, and the up projection tied to the down projection by transposing."""

    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(D, 32)
            self.bias = nn.Parameter(torch.zeros(D))

        def forward(self, x):
            return x + F.linear(torch.relu(self.up(x)), self.up.weight.t(), self.bias)

    def __init__(self):
        super().__init__()
        self.head.weight = self.tokens.weight


class Memory(Words):
    """State kept between batches in a buffer: a running mean that the forward reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, ids):
        x = self.tokens(ids)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        x = x - self.mean
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Hidden(Words):
    """State kept between batches in a plain attribute (truncated backpropagation through time)."""

    def __init__(self):
        super().__init__()
        self.state = None

    def forward(self, ids):
        x = self.tokens(ids)
        if self.state is not None:
            x = x + self.state
        for block in self.blocks:
            x = block(x)
        self.state = x.mean((0, 1)).detach()
        return self.head(x)


class Skipped(Words):
    """Which blocks run depends on training mode and a counter (stochastic depth by a fixed pattern)."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, ids):
        x = self.tokens(ids)
        self.calls += 1
        for at, block in enumerate(self.blocks):
            if self.training and (self.calls + at) % 3 == 0:
                continue
            x = block(x)
        return self.head(x)


class Masked(Words):
    """Additive attention with a mask made from ids, and pooling over what counts."""

    def __init__(self):
        super().__init__()
        self.score, self.kind = nn.Linear(D, 1), nn.Linear(D, C)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        weights = self.score(x).squeeze(-1).masked_fill(ids % 5 == 0, -1e9).softmax(-1)
        return self.kind(torch.einsum("bt,btd->bd", weights, x))


class Gated(Words):
    """GLU packed in one projection (chunk), rotary halves, RMSNorm written out, learned residual scales."""

    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.both, self.down = (
                nn.Parameter(torch.ones(D)),
                nn.Linear(D, 48, bias=False),
                nn.Linear(24, D, bias=False),
            )
            self.scale = nn.Parameter(torch.full((1,), 0.5))

        def forward(self, x):
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
            a, b = self.both(y).chunk(2, -1)
            return x + self.scale * self.down(F.silu(a) * b)
