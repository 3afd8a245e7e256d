"""Small models in plain torch for the parity tests."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Drawn = tuple[nn.Module, dict[str, Tensor]]


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm and an in-place ReLU, plus a skip."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.skip = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(hidden)) + self.skip(x))


class ConvNet(nn.Module):
    """A ResNet in small: stem, max pooling (which saves int64 indices), three blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.Sequential(
            ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 32, 1)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.stem(x)), inplace=True))
        return self.head(self.blocks(x).mean(dim=(2, 3)))


def convnet() -> Drawn:
    return ConvNet(), {"x": torch.randn(4, 3, 64, 64)}


def convnet_channels_last() -> Drawn:
    model, inputs = convnet()
    channels_last = torch.channels_last
    return model.to(memory_format=channels_last), {
        name: tensor.to(memory_format=channels_last) for name, tensor in inputs.items()
    }


class ConvBlock(nn.Sequential):
    """Convolution, group norm, SiLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, 3, padding=1),
            nn.GroupNorm(4, out_channels),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Two levels down and up; the outputs on the way down are used again on the way up."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        self.enter = ConvBlock(1, channels)
        self.down1 = ConvBlock(channels, 2 * channels)
        self.down2 = ConvBlock(2 * channels, 4 * channels)
        self.lift2 = nn.ConvTranspose2d(4 * channels, 2 * channels, 2, stride=2)
        self.up2 = ConvBlock(4 * channels, 2 * channels)
        self.lift1 = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.up1 = ConvBlock(2 * channels, channels)
        self.leave = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        full = self.enter(x)
        half = self.down1(F.avg_pool2d(full, 2))
        quarter = self.down2(F.avg_pool2d(half, 2))
        half = self.up2(torch.cat([self.lift2(quarter), half], dim=1))
        full = self.up1(torch.cat([self.lift1(half), full], dim=1))
        return self.leave(full)


def unet() -> Drawn:
    return UNet(), {"x": torch.randn(2, 1, 64, 64)}


class FeedForward(nn.Module):
    """Layer norm and a gated two-layer perceptron on a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.gate = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Recurrent(nn.Module):
    """One block called five times: one module, five layers."""

    def __init__(self, width: int, num_steps: int = 5) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.block = FeedForward(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_steps):
            x = self.block(x)
        return self.head(x)


def recurrent() -> Drawn:
    return Recurrent(64), {"x": torch.randn(4, 128, 64)}


class MixtureOfExperts(nn.Module):
    """Each token goes to the expert its router prefers; experts in `resting` are never asked.

    Change `resting` between two steps to have a branch that the first step did not have.
    """

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(FeedForward(width) for _ in range(num_experts))
        self.resting: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        for expert in self.resting:
            logits = logits.index_fill(-1, torch.tensor(expert, device=x.device), -torch.inf)
        weight, choice = logits.softmax(dim=-1).max(dim=-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero(as_tuple=True)
            if rows[0].numel():
                mixed = mixed.index_put(rows, expert(x[rows]) * weight[rows].unsqueeze(-1))
        return mixed


class MixtureNet(nn.Module):
    """Two mixtures of four experts each, of which one rests."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixtures = nn.ModuleList(MixtureOfExperts(width, 4) for _ in range(2))
        self.mixtures[0].resting = {3}
        self.mixtures[1].resting = {0}
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for mixture in self.mixtures:
            x = x + mixture(x)
        return self.head(x)


def mixture_of_experts() -> Drawn:
    return MixtureNet(64), {"x": torch.randn(4, 384, 64)}
