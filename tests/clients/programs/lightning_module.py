"""Lightning: a LightningModule whose convolutional net learns to run the heat equation."""

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ebbtide

SIZE, TIME = 64, 2e-3
torch.manual_seed(0)

# Each Fourier mode k of a temperature decays as exp(-|2 pi k|^2 t).
frequency = 2 * torch.pi * torch.fft.fftfreq(SIZE, 1 / SIZE)
decay = torch.exp(-(frequency[:, None] ** 2 + frequency**2) * TIME)
initial = torch.randn(48, 1, SIZE, SIZE)
final = torch.fft.ifft2(torch.fft.fft2(initial) * decay).real


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 5, padding=2, padding_mode="circular")
        self.second = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(x)))


class HeatSolver(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [Block(32) for _ in range(5)]
        self.net = nn.Sequential(nn.Conv2d(1, 32, 1), *blocks, nn.Conv2d(32, 1, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        before, after = batch
        loss = F.mse_loss(self.net(before), after)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


model = HeatSolver()
handle = ebbtide.offload(model)

trainer = lightning.Trainer(
    max_steps=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(initial, final), batch_size=16))
losses = model.losses
