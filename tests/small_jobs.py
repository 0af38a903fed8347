"""Small models, data and jobs of the engine's tests, and the plain one-process training they are held against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import PrivateAttr
from torch import Tensor, nn

from shoal.engine.build import Place, build
from shoal.engine.run import Hooks, Run
from shoal.engine.settings import RunSettings
from shoal.job import Job, Loss

VOCABULARY, WIDTH, POSITIONS, IGNORED = 37, 16, 12, -100


class Given(Job):
    """A job made of functions."""

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model(self):
        return self._given["model"]()

    def data(self):
        return self._given["data"]

    def loss(self, output, targets):
        return self._given["loss"](output, targets)

    def optimizer(self, model):
        return self._given["optimizer"](model)

    def lr_schedule(self, optimizer, steps):
        made = self._given.get("lr_schedule")
        return made(optimizer, steps) if made else None

    def eval_data(self):
        return self._given.get("eval_data")

    def metrics(self, output, targets):
        found = self._given.get("metrics")
        return found(output, targets) if found else {}

    def counts(self, inputs, targets):
        found = self._given.get("counts")
        return found(inputs, targets) if found else None

    def inputs(self, batch):
        found = self._given.get("inputs")
        return found(batch) if found else super().inputs(batch)


class GivenCollate(Given):
    """The same with a collate function."""

    def collate(self, samples):
        return self._given["collate"](samples)


def job(**given: Any) -> Given:
    """A job of ``model()``, ``data``, ``loss(output, targets)``, ``optimizer(model)``, and what else a Job has."""
    made = GivenCollate() if "collate" in given else Given()
    made._given = {"optimizer": sgd(1.0), **given}
    return made


def start(made: Job, out: Path, tell: Callable[[str], None] = lambda text: None, **settings: Any) -> Run:
    """This rank's run on the CPU, without what only costs time here. Collective."""
    settings = {"kernels": "default", "sinks": (), **settings}
    return build(made, RunSettings(out=str(out), **settings), Place(torch.device("cpu")), Hooks(tell=tell))


def sgd(lr: float, **more: Any) -> Callable[[nn.Module], Any]:
    """An optimizer function."""
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, **more)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest error of a tensor: max|a - b| / max(max|a|, 1e-3 x the largest such value over all tensors)."""
    assert found.keys() == wanted.keys()
    sizes = {name: float(tensor.abs().max()) for name, tensor in wanted.items()}
    floor = 1e-3 * max(sizes.values())
    return max(
        float((found[name] - tensor).abs().max()) / max(sizes[name], floor, 1e-300) for name, tensor in wanted.items()
    )


class Rows:
    """Map-style data over a list of samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Scalar(nn.Module):
    """One weight times the input."""

    def __init__(self, value: float = 1.0, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def mlp_rows(size: int, seed: int = 0) -> Rows:
    """(8 numbers, one of 4 classes)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 8, generator=generator)
    y = torch.randint(4, (size,), generator=generator)
    return Rows(list(zip(x, y, strict=True)))


def classes_loss(output: Tensor, targets: Tensor) -> Loss:
    return Loss(F.cross_entropy(output, targets, reduction="sum"), len(targets))


class Block(nn.Module):
    """Causal attention with fewer key than query heads, then a two-layer network; pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self.norm1(x)
        q = self.q(h).view(rows, length, 4, 4).transpose(1, 2)
        k, v = (
            part.view(rows, length, 2, 4).transpose(1, 2).repeat_interleave(2, dim=1)
            for part in self.kv(h).chunk(2, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, WIDTH)
        x = x + self.o(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LM(nn.Module):
    """A language model of two blocks; ``tied``: the head shares the embedding's weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(POSITIONS, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_rows(counts: list[int], seed: int = 0) -> Rows:
    """(tokens, targets) of 12 positions each, of which the first ``count`` count."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for count in counts:
        tokens = torch.randint(VOCABULARY, (POSITIONS + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[count:] = IGNORED
        samples.append((tokens[:-1], targets))
    return Rows(samples)


def token_loss(output: Tensor, targets: Tensor) -> Loss:
    total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return Loss(total, (targets != IGNORED).sum())


def stack(rows: Rows, ids: list[int]) -> tuple[Tensor, Tensor]:
    """The samples ``ids`` as one batch."""
    chosen = [rows[i] for i in ids]
    return torch.stack([x for x, _ in chosen]), torch.stack([y for _, y in chosen])
