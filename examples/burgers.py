"""Scientific computing: learns the solution operator of the one-dimensional viscous Burgers equation.

u_t + u u_x = nu u_xx, periodic on [0, 1): from u(x, 0) to u(x, 1). Reports the relative L2 error on held-out states.
After Li et al., "Fourier neural operator for parametric partial differential equations", arXiv:2010.08895.

shoal train examples/burgers.py
shoal train examples/burgers.py --mesh pipeline=2,shard=2 --workers 4
"""

from typing import ClassVar

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def initial_states(number, points, seed):
    """Smooth random periodic states (number, points), float64: few Fourier modes with falling amplitudes."""
    generator = torch.Generator().manual_seed(seed)
    modes = torch.arange(1, 6, dtype=torch.float64)
    phase = torch.rand(number, 5, generator=generator, dtype=torch.float64) * 2 * torch.pi
    size = torch.randn(number, 5, generator=generator, dtype=torch.float64) / modes
    x = torch.arange(points, dtype=torch.float64) / points
    return (size[:, :, None] * torch.sin(2 * torch.pi * modes[:, None] * x + phase[:, :, None])).sum(1) * 0.5


def solve(u, viscosity, steps=400):
    """u(x, 1): Fourier in space (2/3 rule), in time exact for diffusion with Heun's method for the rest."""
    points, dt = u.shape[-1], 1.0 / steps
    k = 2 * torch.pi * torch.fft.rfftfreq(points, 1.0 / points, dtype=torch.float64)
    kept = (k <= k.max() * 2 / 3).to(torch.float64)
    decay = torch.exp(-viscosity * k**2 * dt)

    def advection(v):
        state = torch.fft.irfft(v * kept, n=points)
        return -0.5j * k * torch.fft.rfft(state**2)

    v = torch.fft.rfft(u)
    for _ in range(steps):
        first = advection(v)
        ahead = decay * (v + dt * first)
        v = decay * (v + 0.5 * dt * first) + 0.5 * dt * advection(ahead)
    return torch.fft.irfft(v, n=points)


class Spectral(nn.Module):
    """Multiplies the lowest Fourier modes by learnt matrices (real, imaginary), beside a linear map in space."""

    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.real = nn.Parameter(torch.randn(modes, width, width) / width)
        self.imaginary = nn.Parameter(torch.randn(modes, width, width) / width)
        self.local = nn.Linear(width, width)

    def forward(self, u):
        points = u.shape[1]
        spectrum = torch.fft.rfft(u, dim=1)[:, : self.modes]
        a, b = spectrum.real, spectrum.imag
        real = torch.einsum("bmi,mio->bmo", a, self.real) - torch.einsum("bmi,mio->bmo", b, self.imaginary)
        imaginary = torch.einsum("bmi,mio->bmo", a, self.imaginary) + torch.einsum("bmi,mio->bmo", b, self.real)
        mixed = torch.fft.irfft(torch.complex(real, imaginary), n=points, dim=1)
        return u + nn.functional.gelu(mixed + self.local(u))


class Operator(nn.Module):
    """(B, points) -> (B, points)."""

    def __init__(self, width, modes, layers):
        super().__init__()
        self.lift = nn.Linear(2, width)
        self.blocks = nn.ModuleList([Spectral(width, modes) for _ in range(layers)])
        self.project = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 1))

    def forward(self, u):
        x = torch.linspace(0, 1, u.shape[1] + 1, dtype=u.dtype, device=u.device)[:-1].expand_as(u)
        h = self.lift(torch.stack([u, x], dim=-1))
        for block in self.blocks:
            h = block(h)
        return self.project(h).squeeze(-1)


class Job(shoal.Job):
    """Sizes for about a minute on two CPU cores."""

    defaults: ClassVar[dict] = {"epochs": 20, "global_batch": 32}

    width: int = 32
    modes: int = 12
    layers: int = 4
    points: int = 64
    samples: int = 512
    held_out: int = 128
    viscosity: float = 0.02
    lr: float = 3e-3

    def model(self):
        return Operator(self.width, self.modes, self.layers)

    def _states(self, number, seed):
        before = initial_states(number, self.points, seed)
        after = solve(before, self.viscosity)
        dtype = torch.get_default_dtype()
        return TensorDataset(before.to(dtype), after.to(dtype))

    def data(self):
        return self._states(self.samples, 1)

    def eval_data(self):
        return self._states(self.held_out, 2)

    def loss(self, output, targets):
        return shoal.Loss(relative_error(output, targets).sum(), len(targets))

    def metrics(self, output, targets):
        return {"relative_l2": shoal.Loss(relative_error(output, targets).sum(), len(targets))}

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def lr_schedule(self, optimizer, steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)


def relative_error(output, targets):
    """||output - targets|| / ||targets|| of each sample."""
    return (output - targets).norm(dim=1) / targets.norm(dim=1)
