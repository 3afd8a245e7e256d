"""diffusers: a UNet learns to remove noise from smooth random fields, as in diffusion models."""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel

import ebbtide

SIZE, BATCH = 64, 8
torch.manual_seed(0)

frequency = torch.fft.fftfreq(SIZE, 1 / SIZE)
wavenumber = (frequency[:, None] ** 2 + frequency**2).sqrt().clamp(min=1)

model = UNet2DModel(
    sample_size=SIZE,
    in_channels=1,
    out_channels=1,
    block_out_channels=(32, 64, 64),
    layers_per_block=2,
    down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
handle = ebbtide.offload(model)

scheduler = DDPMScheduler()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
losses = []
for _ in range(3):
    spectra = torch.fft.fft2(torch.randn(BATCH, 1, SIZE, SIZE)) / wavenumber**2
    fields = torch.fft.ifft2(spectra).real
    fields = fields / fields.std()
    noise = torch.randn_like(fields)
    timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (BATCH,))
    noisy = scheduler.add_noise(fields, noise, timesteps)
    loss = F.mse_loss(model(noisy, timesteps).sample, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
