"""Plain PyTorch models of the zoo, written without a thought of parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Perceptron(nn.Module):
    """A deep multi-layer perceptron."""

    def __init__(self, width: int = 16, depth: int = 4, classes: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(12, width)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)]
        )
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of x: [B, 12]."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


class Seq2Seq(nn.Module):
    """torch's own transformer, with a causal mask."""

    def __init__(self, width: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.both = nn.Transformer(width, 4, 2, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the target's places; source, target: [B, T, D]."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=source.dtype)
        return self.head(self.both(source, target, tgt_mask=mask, tgt_is_causal=True))


class MixerBlock(nn.Module):
    """Mixes places, then channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(places, 8), nn.GELU(), nn.Linear(8, places))
        self.along = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]."""
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021) on images [B, 1, 8, 8] in patches of 4 x 4."""

    def __init__(self, width: int = 16, depth: int = 2, classes: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.blocks = nn.ModuleList([MixerBlock(4, width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Convolutions(nn.Module):
    """Two convolutions with group normalisation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, C, H, W]."""
        return F.silu(self.second(F.silu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015): what is seen on the way down is read again on the way up."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1, self.down2 = Convolutions(1, width), Convolutions(width, 2 * width)
        self.middle = Convolutions(2 * width, 2 * width)
        self.up2, self.up1 = Convolutions(4 * width, width), Convolutions(2 * width, width)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, 1, 8, 8]."""
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        x = F.interpolate(self.middle(F.max_pool2d(coarse, 2)), scale_factor=2)
        x = F.interpolate(self.up2(torch.cat([x, coarse], 1)), scale_factor=2)
        return self.last(self.up1(torch.cat([x, fine], 1)))


class Spectral(nn.Module):
    """A Fourier layer: the lowest frequencies through complex weights, kept as pairs, all through a linear layer."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(modes, width, width, 2) / width)
        self.around = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, D]."""
        low = torch.fft.rfft(x, dim=1)[:, : self.modes]
        low = torch.einsum("bmi,mio->bmo", low, torch.view_as_complex(self.weight))
        return F.gelu(torch.fft.irfft(low, n=x.shape[1], dim=1) + self.around(x))


class Fourier(nn.Module):
    """A Fourier neural operator in one dimension (Li et al. 2021)."""

    def __init__(self, width: int = 8, modes: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.lift = nn.Linear(1, width)
        self.layers = nn.ModuleList([Spectral(width, modes) for _ in range(depth)])
        self.down = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, 1]."""
        x = self.lift(x)
        for layer in self.layers:
            x = layer(x)
        return self.down(x)
