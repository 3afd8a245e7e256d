"""A stand-in for Makani's spherical Fourier neural operator: waves travel around the globe.

Makani is not on the package index. This has the structure of its networks and their setting for
checkpoints, in plain torch: encoder, blocks of a filter on the sphere and an MLP, decoder.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ebbtide

HEIGHT, WIDTH, MODES, CHANNELS, BATCH = 48, 96, 24, 32, 4
OWN_CHECKPOINTS = False
CHECKPOINTING_LEVEL = 3 if OWN_CHECKPOINTS else 0  # 3 recomputes each block
torch.manual_seed(0)


def legendre(height: int, modes: int) -> tuple[Tensor, Tensor]:
    """Return the orthonormal functions of latitude, (order, degree, latitude), and the weights."""
    nodes, weights = np.polynomial.legendre.leggauss(height)
    values = np.zeros((modes, modes, height))
    values[0, 0] = (1 / (4 * np.pi)) ** 0.5
    for m in range(1, modes):
        ratio = ((2 * m + 1) / (2 * m)) ** 0.5
        values[m, m] = -ratio * (1 - nodes**2) ** 0.5 * values[m - 1, m - 1]
    for m in range(modes):
        for l in range(m + 1, modes):  # noqa: E741
            a = ((4 * l * l - 1) / (l * l - m * m)) ** 0.5
            b = (((l - 1) ** 2 - m * m) / (4 * (l - 1) ** 2 - 1)) ** 0.5 if l > 1 else 0.0
            values[m, l] = a * (
                nodes * values[m, l - 1] - b * values[m, max(l - 2, 0)] * (l > m + 1)
            )
    return torch.tensor(values, dtype=torch.float32), torch.tensor(weights, dtype=torch.float32)


FUNCTIONS, WEIGHTS = legendre(HEIGHT, MODES)


def to_harmonics(x: Tensor) -> Tensor:
    rings = 2 * torch.pi / WIDTH * torch.fft.rfft(x)[..., :MODES]
    return torch.einsum("bchm,mlh->bclm", rings, (FUNCTIONS * WEIGHTS).to(rings.dtype))


def from_harmonics(coefficients: Tensor) -> Tensor:
    rings = torch.einsum("bclm,mlh->bchm", coefficients, FUNCTIONS.to(coefficients.dtype))
    return torch.fft.irfft(rings, n=WIDTH) * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.InstanceNorm2d(CHANNELS, affine=True) for _ in range(2)])
        filters = torch.randn(CHANNELS, CHANNELS, MODES, dtype=torch.complex64)
        self.filters = nn.Parameter(filters / CHANNELS)
        wide = 2 * CHANNELS
        self.mlp = nn.Sequential(
            nn.Conv2d(CHANNELS, wide, 1), nn.GELU(), nn.Conv2d(wide, CHANNELS, 1)
        )
        self.skip = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        coefficients = torch.einsum("bilm,iol->bolm", to_harmonics(self.norms[0](x)), self.filters)
        filtered = nn.functional.gelu(from_harmonics(coefficients) + self.skip(x))
        return x + self.mlp(self.norms[1](filtered))


class Operator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(1, CHANNELS, 1), nn.Conv2d(CHANNELS, 1, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        for block in self.blocks:
            if CHECKPOINTING_LEVEL >= 3:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return x + self.decoder(hidden)


model = Operator()
handle = ebbtide.offload(model)

optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# Rossby-Haurwitz waves: a harmonic of degree l turns by an angle that falls with l (l + 1).
degree, order = torch.arange(MODES)[:, None], torch.arange(MODES)
turn = torch.exp(2j * order / (1 + degree * (degree + 1)))
losses = []
for _ in range(3):
    waves = torch.randn(BATCH, 1, MODES, MODES, dtype=torch.complex64) * (degree >= order)
    waves = waves / (1 + degree)
    loss = (model(from_harmonics(waves)) - from_harmonics(waves * turn)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
