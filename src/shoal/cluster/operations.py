"""What ``cluster/bench.py`` times on one device: products, attention and element-wise functions, as in training.

A training step reads what many others wrote since, so that small inputs are no longer in the nearest cache: each call
takes the next of a ring of inputs. Products and functions are timed forward and backward through autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Blocks of the chain that kernel starts are timed on, and kernels of one: four forward; six back, and four that add to
#: its weights' gradients.
CHAIN, KERNELS = 16, 14
#: A ring's bytes, more than a core's own cache; and its longest.
RING_BYTES, RING = 32 * 2**20, 64

Call = Callable[[], object]


def ring(shape: tuple[int, ...], place: torch.device, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    """Gives the next of several tensors of a shape, which need gradients."""
    first = torch.randn(shape, device=place).to(dtype)
    count = max(2, min(RING, RING_BYTES // (first.numel() * first.element_size())))
    made = [first.clone().requires_grad_() for _ in range(count)]
    return cycle(made).__next__


def product(place: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> Call:
    """A linear layer's three products, as autograd makes them: of x (m, k) and w (n, k). The sum that is a bias's
    gradient is an element-wise kernel, and none of them."""
    m, k, n = shape
    x, back = ring((m, k), place, dtype), ring((m, n), place, dtype)
    w = torch.randn(n, k, device=place).to(dtype).requires_grad_()
    b = torch.zeros(n, device=place, dtype=dtype)

    def call() -> object:
        given = x()
        return torch.autograd.grad(F.linear(given, w, b), (given, w), back())

    return call


def attention(place: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], causal: bool) -> Call:
    """Attention of batch, heads, positions and width, forward and backward."""
    q, k, v, back = (ring(shape, place, dtype) for _ in range(4))

    def call() -> object:
        given = q(), k(), v()
        return torch.autograd.grad(F.scaled_dot_product_attention(*given, is_causal=causal), given, back())

    return call


#: Element-wise functions of rows, by the name under which a trace has them; what they take besides is theirs.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "softmax": lambda rows: F.softmax(rows, -1),
    "layer_norm": lambda rows, weight, bias: F.layer_norm(rows, rows.shape[-1:], weight, bias),
    "cross_entropy": lambda rows: F.cross_entropy(rows, _classes(rows), reduction="sum"),
}


#: Weights of a row's width that a function takes and whose gradients are worked out too.
WEIGHTS = {"layer_norm": 2}


def _classes(rows: Tensor) -> Tensor:
    return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)


def function(place: torch.device, name: str, shape: tuple[int, int]) -> tuple[Call, Call, int]:
    """A function's forward, its forward and backward, and the bytes that the forward reads and writes."""
    x, of = ring(shape, place), FUNCTIONS[name]
    weights = [torch.rand(shape[1], device=place, requires_grad=True) for _ in range(WEIGHTS.get(name, 0))]
    given = of(x(), *weights)
    back = torch.ones_like(given)

    def both() -> object:
        given = x(), *weights
        return torch.autograd.grad(of(*given), given, back)

    return (lambda: of(x(), *weights)), both, 4 * (shape[0] * shape[1] + given.numel())


def stream(place: torch.device, nbytes: int, fresh: bool) -> Call:
    """z = x * y in float32, which moves ``nbytes``; ``fresh``: z is allocated and x another one, as in training."""
    x, y = ring((nbytes // 12,), place), torch.rand(nbytes // 12, device=place)
    if fresh:
        return lambda: x() * y
    z, whole = torch.rand_like(y), x().detach()
    return lambda: torch.mul(whole, y, out=z)


class _Block(nn.Module):
    """A norm, a linear layer, a function and a sum, with views between them, as models have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.gelu = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        found = self.gelu(self.linear(self.norm(x)))
        return x + found.view(2, 2, 4).transpose(0, 1).transpose(0, 1).reshape(2, 8)


def chain(place: torch.device) -> tuple[Call, int]:
    """Forward and backward of blocks on a few numbers, and the kernels of both."""
    blocks = nn.Sequential(*(_Block() for _ in range(CHAIN))).to(place)
    x = torch.rand(2, 8, device=place, requires_grad=True)
    return (lambda: blocks(x).sum().backward()), CHAIN * KERNELS


def optimizer(place: torch.device, numel: int) -> tuple[Call, int]:
    """A step of a fused AdamW on 16 tensors of ``numel`` numbers in all, and how many they have."""
    weights = [nn.Parameter(torch.rand(numel // 16, device=place)) for _ in range(16)]
    for weight in weights:
        weight.grad = torch.rand_like(weight)
    return torch.optim.AdamW(weights, lr=1e-6, fused=True).step, numel // 16 * 16


def to_host(place: torch.device, nbytes: int) -> Call:
    """A copy to the host's memory."""
    source = torch.rand(nbytes // 4, device=place)
    target = torch.empty(nbytes // 4, pin_memory=place.type == "cuda")
    return lambda: target.copy_(source, non_blocking=True)
