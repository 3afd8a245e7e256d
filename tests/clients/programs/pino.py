"""A physics-informed neural operator: an FNO trained on the residual of Helmholtz's equation."""

import torch
from neuralop.models import FNO
from torch import Tensor

import ebbtide

SIZE, BATCH = 64, 8
torch.manual_seed(0)

frequency = torch.fft.fftfreq(SIZE, 1 / SIZE)
squared = frequency[:, None] ** 2 + frequency**2


def residual(u: Tensor, f: Tensor) -> Tensor:
    """Return u - laplace u / 10 - f on a torus, with derivatives by Fourier transform."""
    laplace = torch.fft.ifft2(-squared * torch.fft.fft2(u)).real
    return u - laplace / 10 - f


model = FNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32, n_layers=6)
handle = ebbtide.offload(model)

optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    spectra = torch.fft.fft2(torch.randn(BATCH, 1, SIZE, SIZE)) / (1 + squared)
    force = 10 * torch.fft.ifft2(spectra).real
    loss = residual(model(force), force).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
