"""Well-known architectures in small, with the module names and the nesting of their libraries.

Only what a search for layers looks at is here: classes, lists and weights. Those that are called
in a test have a working forward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Part(nn.Module):
    """A module whose forward no test calls."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Bottleneck(nn.Module):
    """torchvision's: three convolutions and a skip."""

    def __init__(self, inside: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inside != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + skip)


class ResNet(nn.Module):
    """torchvision's, with `depths` blocks in layer1 to layer4; (3, 4, 6, 3) is a ResNet-50."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inside = width
        for number, depth in enumerate(depths):
            wide = width * 2**number
            blocks = [Bottleneck(inside, wide, 1 if number == 0 else 2)]
            blocks += [Bottleneck(4 * wide, wide) for _ in range(depth - 1)]
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
            inside = 4 * wide
        self.fc = nn.Linear(inside, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean(dim=(2, 3)))


class Mlp(Part):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)


class Attention(Part):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)


class TransformerBlock(Part):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)


class PatchMerging(Part):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width)


class SwinStage(Part):
    """timm's: a list of blocks, and one linear map between stages."""

    def __init__(self, width: int, depth: int, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(width) for _ in range(depth))
        self.downsample = None if last else PatchMerging(width)


class Swin(Part):
    def __init__(self, depths: tuple[int, ...] = (2, 2, 6, 2)) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, 4)
        stages = [SwinStage(8 * 2**n, depth, n == 3) for n, depth in enumerate(depths)]
        self.layers = nn.ModuleList(stages)
        self.head = nn.Linear(64, 10)


class ConvNeXtBlock(Part):
    def __init__(self, width: int) -> None:
        super().__init__()
        conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.block = nn.Sequential(conv, nn.LayerNorm(width), up, nn.GELU(), down)


def convnext(depths: tuple[int, ...] = (3, 3, 9, 3)) -> nn.Module:
    """torchvision's: stem, stage, downsampling, stage, ... in one nn.Sequential."""
    features: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8))]
    for number, depth in enumerate(depths):
        width = 8 * 2**number
        features.append(nn.Sequential(*[ConvNeXtBlock(width) for _ in range(depth)]))
        if number + 1 < len(depths):
            down = nn.Conv2d(width, 2 * width, 2, 2)
            features.append(nn.Sequential(nn.LayerNorm(width), down))
    model = Part()
    model.features = nn.Sequential(*features)
    model.classifier = nn.Sequential(nn.LayerNorm(64), nn.Flatten(), nn.Linear(64, 10))
    return model


class ResnetBlock2D(Part):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.time_emb_proj = nn.Linear(16, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)


class Resampling(Part):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, 2, 1)


class PlainBlock2D(Part):
    """diffusers' DownBlock2D and UpBlock2D."""

    def __init__(self, inside: int, outside: int, depth: int = 2) -> None:
        super().__init__()
        resnets = [ResnetBlock2D(outside if n else inside, outside) for n in range(depth)]
        self.resnets = nn.ModuleList(resnets)
        self.resamplers = nn.ModuleList([Resampling(outside)])


class CrossAttnBlock2D(PlainBlock2D):
    """With attentions beside the ResNet blocks, called in turn."""

    def __init__(self, inside: int, outside: int, depth: int = 2) -> None:
        super().__init__(inside, outside, depth)
        self.attentions = nn.ModuleList(TransformerBlock(outside) for _ in range(depth))


class MidBlock2D(Part):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([TransformerBlock(width)])
        self.resnets = nn.ModuleList(ResnetBlock2D(width, width) for _ in range(2))


class DiffusersUNet(Part):
    """As UNet2DConditionModel: its lists are made before the block between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, 8, 3, padding=1)
        self.time_embedding = Mlp(16)
        self.down_blocks = nn.ModuleList(
            [CrossAttnBlock2D(8, 8), CrossAttnBlock2D(8, 16), PlainBlock2D(16, 16)]
        )
        self.up_blocks = nn.ModuleList(
            [PlainBlock2D(32, 16, 3), CrossAttnBlock2D(32, 16, 3), CrossAttnBlock2D(24, 8, 3)]
        )
        self.mid_block = MidBlock2D(16)
        self.conv_out = nn.Conv2d(8, 4, 3, padding=1)


class DoubleConv(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class Down(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(inside, outside))

    def forward(self, x: Tensor) -> Tensor:
        return self.maxpool_conv(x)


class Up(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inside, outside, 2, 2)
        self.conv = DoubleConv(2 * outside, outside)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([self.up(x), skip], dim=1))


class UNet(nn.Module):
    """The one that most code copies: blocks as attributes, and the ups defined in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = DoubleConv(3, 8)
        self.up1, self.up2 = Up(32, 16), Up(16, 8)
        self.down1, self.down2 = Down(8, 16), Down(16, 32)
        self.outc = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        full = self.inc(x)
        half = self.down1(full)
        return self.outc(self.up2(self.up1(self.down2(half), half), full))


class UNetOfLists(Part):
    """The other one: convolutions and upsamplings in one list, and a bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([DoubleConv(3, 8), DoubleConv(8, 16)])
        self.bottleneck = DoubleConv(16, 32)
        ups = [[nn.ConvTranspose2d(2 * w, w, 2, 2), DoubleConv(2 * w, w)] for w in (16, 8)]
        self.ups = nn.ModuleList([module for pair in ups for module in pair])


class Experts(Part):
    """A transformer block whose perceptron is one of four experts, beside each other in it."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        if attends:
            self.attn = Attention()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(Mlp() for _ in range(4))
