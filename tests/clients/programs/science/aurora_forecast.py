"""Aurora: a small one learns how waves travel eastwards around the globe."""

from datetime import datetime

import torch
from aurora import AuroraSmallPretrained, Batch, Metadata
from torch import Tensor

import ebbtide

HEIGHT, WIDTH, STEP = 64, 128, 4  # the waves travel by STEP cells of longitude between two states
LEVELS = (250, 500, 850)
OWN_CHECKPOINTS = False  # True: Aurora recomputes its layers, and little is left to offload
torch.manual_seed(0)

latitude = torch.linspace(87, -87, HEIGHT)
longitude = torch.linspace(0, 360, WIDTH + 1)[:-1]
north, east = torch.fft.fftfreq(HEIGHT, 1 / HEIGHT)[:, None], torch.fft.fftfreq(WIDTH, 1 / WIDTH)
low_pass = torch.exp(-(north**2 + east**2) / 32)


def waves(*leading: int) -> Tensor:
    """Return smooth random fields of unit variance, small towards the poles."""
    noise = torch.randn(*leading, HEIGHT, WIDTH)
    smooth = torch.fft.ifft2(torch.fft.fft2(noise) * low_pass).real
    return smooth / smooth.std() * torch.cos(latitude.deg2rad())[:, None]


def winds(stream: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """Return the zonal and the meridional wind of a stream function."""
    u, v = torch.gradient(stream, dim=-2)[0], torch.gradient(stream, dim=-1)[0]
    return size * u, size * v


def history(field: Tensor, start: int, count: int) -> Tensor:
    """Return ``count`` states from ``start`` on: (batch, time, ..., latitude, longitude)."""
    return torch.stack([field.roll((start + at) * STEP, -1) for at in range(count)], dim=1)


stream, surface, moisture = waves(2, len(LEVELS)), waves(2), waves(2, len(LEVELS))
u, v = winds(stream, 30.0)
base_temperature = torch.tensor([220.0, 250.0, 280.0])[:, None, None]
atmosphere = {
    "z": 1e3 * stream + torch.tensor([1e5, 5.4e4, 1.4e4])[:, None, None],
    "u": u,
    "v": v,
    "t": base_temperature - 5 * stream,
    "q": 1e-3 * (1 + 0.2 * moisture),
}
ground = {"2t": 285 + 5 * surface, "msl": 1e5 + 1e3 * stream[:, -1]}
ground["10u"], ground["10v"] = u[:, -1] / 3, v[:, -1] / 3
land = {"lsm": (waves() > 0).float(), "z": 1e3 * waves().relu(), "slt": torch.ones(HEIGHT, WIDTH)}


def state(start: int, count: int) -> Batch:
    return Batch(
        surf_vars={name: history(field, start, count) for name, field in ground.items()},
        static_vars=land,
        atmos_vars={name: history(field, start, count) for name, field in atmosphere.items()},
        metadata=Metadata(latitude, longitude, (datetime(2020, 6, 1, 12),) * 2, LEVELS),
    )


model = AuroraSmallPretrained(
    embed_dim=64,
    num_heads=4,
    encoder_depths=(2, 2),
    encoder_num_heads=(2, 4),
    decoder_depths=(2, 2),
    decoder_num_heads=(4, 2),
)
if OWN_CHECKPOINTS:
    model.configure_activation_checkpointing()
handle = ebbtide.offload(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(3):
    prediction = model(state(step, 2))
    target = state(step + 2, 1).normalise(model.surf_stats)
    found = prediction.normalise(model.surf_stats)
    errors = [(found.surf_vars[name] - target.surf_vars[name]).abs().mean() for name in ground]
    errors += [
        (found.atmos_vars[name] - target.atmos_vars[name]).abs().mean() for name in atmosphere
    ]
    loss = torch.stack(errors).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
