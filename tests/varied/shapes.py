"""Small models as users write them: what passes between blocks, layers of many kinds, weights that are worked out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm

V, T, D, C = 40, 8, 16, 6  # vocabulary, positions, width, classes


class Feed(nn.Module):
    def __init__(self, d=D, h=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attend(nn.Module):
    def __init__(self, d=D, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.q, self.k, self.v, self.o = nn.LayerNorm(d), *(nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        y = self.norm(x)
        q, k, v = (f(y).view(b, t, self.heads, d // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.feed = Attend(), Feed()

    def forward(self, x):
        return self.feed(self.attend(x))


class Words(nn.Module):
    """Base: tokens -> blocks -> head."""

    B: type[nn.Module] = Block

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.blocks = nn.ModuleList(self.B() for _ in range(4))

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharedBlock(Words):
    """One submodule in every block."""

    def __init__(self):
        super().__init__()
        shared = Feed()
        for block in self.blocks:
            block.feed = shared


class CalledTwice(Words):
    """Every block is called twice, in order (universal transformer)."""

    def forward(self, ids):
        x = self.tokens(ids)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class Lists(Words):
    """Blocks pass a list of tensors on."""

    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Feed(), Feed()

        def forward(self, xs):
            first, second = xs
            return [self.a(first) + second, self.b(second)]

    def forward(self, ids):
        xs = [self.tokens(ids), self.tokens(ids.flip(1))]
        for block in self.blocks:
            xs = block(xs)
        return self.head(torch.cat([xs[0], xs[1]], 1)[:, :T])


class Dense(Words):
    """Every block reads all earlier ones' outputs (a growing list)."""

    def forward(self, ids):
        seen = [self.tokens(ids)]
        for block in self.blocks:
            seen.append(block(torch.stack(seen).mean(0)))
        return self.head(sum(seen))


class ConvText(nn.Module):
    """conv1d over words, with batch norm and pooling."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(V, D)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(D, D, 3, padding=1), nn.BatchNorm1d(D), nn.ReLU()) for _ in range(3)
        )
        self.out = nn.Linear(D, C)

    def forward(self, ids):
        x = self.tokens(ids).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(F.adaptive_max_pool1d(x, 1).squeeze(-1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.rnn = nn.Embedding(V, D), nn.LSTM(D, D, 2, batch_first=True, bidirectional=True)
        self.out = nn.Sequential(nn.Linear(2 * D, 32), nn.Tanh(), nn.Linear(32, C))

    def forward(self, ids):
        y, (h, c) = self.rnn(self.tokens(ids))
        return self.out(y.mean(1)) + self.out(torch.cat([h[-2], h[-1]], -1))


class Cells(nn.Module):
    """A GRU cell unrolled in Python; state is a list."""

    def __init__(self):
        super().__init__()
        self.tokens, self.cells, self.out = (
            nn.Embedding(V, D),
            nn.ModuleList(nn.GRUCell(D, D) for _ in range(2)),
            nn.Linear(D, V),
        )

    def forward(self, ids):
        x = self.tokens(ids)
        state = [x.new_zeros(len(ids), D) for _ in self.cells]
        given = []
        for t in range(ids.shape[1]):
            step = x[:, t]
            for at, cell in enumerate(self.cells):
                state[at] = step = cell(step, state[at])
            given.append(step)
        return self.out(torch.stack(given, 1))


class Groups(nn.Module):
    """Images: GroupNorm, depthwise and strided convolutions, flatten."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, 8),
                nn.Conv2d(8, 8, 3, padding=1, groups=8),
                nn.SiLU(),
                nn.Conv2d(8, 16, 1),
                nn.SiLU(),
                nn.Conv2d(16, 8, 1),
            )
            for _ in range(3)
        )
        self.out = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 32), nn.ReLU(), nn.Linear(32, C))

    def forward(self, x):
        x = F.avg_pool2d(self.stem(x), 2)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class Auxiliary(Words):
    """Several outputs in a dict with a nested tuple; auxiliary losses from the middle."""

    def __init__(self):
        super().__init__()
        self.early, self.kind = nn.Linear(D, V), nn.Linear(D, C)

    def forward(self, ids):
        x, middle = self.tokens(ids), []
        for at, block in enumerate(self.blocks):
            x = block(x)
            if at % 2 == 0:
                middle.append(x)
        return {
            "logits": self.head(x),
            "more": (self.early(middle[0]), [self.kind(middle[1].mean(1))], x.pow(2).mean()),
        }


class LazyBuffer(Words):
    """Buffers built at the first forward: a mask and positions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", None, persistent=False)
        self.place = nn.Linear(D, D)

    def forward(self, ids):
        if self.positions is None or len(self.positions) < ids.shape[1]:
            at = torch.arange(ids.shape[1], device=ids.device)[:, None] / 10000 ** (torch.arange(0, D, 2) / D)
            self.positions = torch.cat([at.sin(), at.cos()], -1).to(self.head.weight.dtype)
        x = self.tokens(ids) + self.place(self.positions[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WeightNorm(Words):
    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = parametrizations.weight_norm(nn.Linear(D, 32))
            self.down = nn.Linear(32, D)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


class Parametrized(Words):
    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.square, self.down = nn.Linear(D, D), nn.Linear(D, D)
            parametrize.register_parametrization(self.square, "weight", Symmetric())

        def forward(self, x):
            return x + self.down(torch.tanh(self.square(x)))


class Spectral(Words):
    """spectral_norm keeps a state that each training forward changes."""

    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = spectral_norm(nn.Linear(D, 32)), nn.Linear(32, D)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))


class Branches(nn.Module):
    """Two towers of different depth; their product; a learned temperature; unused parameter."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(12, D), nn.Tanh(), *(Feed() for _ in range(2)))
        self.right = nn.Sequential(nn.Linear(12, D), nn.Tanh(), *(Feed() for _ in range(3)))
        self.scale, self.unused, self.out = nn.Parameter(torch.tensor(1.5)), nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x):
        a, b = F.normalize(self.left(x), dim=-1), F.normalize(self.right(x.flip(-1)), dim=-1)
        return self.out(a * b * self.scale.exp())
