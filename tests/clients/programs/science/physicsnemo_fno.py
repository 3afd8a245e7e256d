"""PhysicsNeMo's FNO: what becomes of a tracer that is carried along and diffuses."""

import torch
from physicsnemo.models.fno import FNO

import ebbtide

SIZE, BATCH = 128, 4
torch.manual_seed(0)

# On a torus, mode k is damped by |k|^2 and turned by k times the way that the wind has gone.
frequency = torch.fft.fftfreq(SIZE, 1 / SIZE)
squared = frequency[:, None] ** 2 + frequency**2
way = 0.7 * frequency[:, None] + 0.4 * frequency
evolution = torch.exp(-2e-3 * squared - 1j * way)

model = FNO(
    in_channels=1,
    out_channels=1,
    latent_channels=16,
    num_fno_layers=8,
    num_fno_modes=16,
    padding=8,
)
handle = ebbtide.offload(model)

optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    spectra = torch.fft.fft2(torch.randn(BATCH, 1, SIZE, SIZE)) * torch.exp(-squared / 64)
    before, after = torch.fft.ifft2(spectra).real, torch.fft.ifft2(spectra * evolution).real
    scale = before.std()
    loss = (model(before / scale) - after / scale).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
