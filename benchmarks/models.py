"""Models that benchmarks train: a transformer, a Fourier neural operator and a UNet.

All are written in plain torch, so that they run wherever torch does. The first two consist of an
input layer, a list of equal blocks and an output layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stack(nn.Module):
    """An input layer, equal blocks and an output layer.

    Attributes:
        lift: the input layer.
        blocks: the layers that the modes offload or recompute.
        output: the output layer.
    """

    def __init__(self, lift: nn.Module, blocks: list[nn.Module], output: nn.Module) -> None:
        super().__init__()
        self.lift = lift
        self.blocks = nn.ModuleList(blocks)
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


@final
class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP.

    Args:
        width: width of the residual stream.
        num_heads: number of attention heads that share the width.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = self.qkv(self.norm1(x)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer(num_layers: int, width: int, num_heads: int, vocabulary: int) -> Stack:
    """Build a causal language model without position encoding; its output is logits.

    Shape:
        input: (batch, length), int64. output: (batch, length, vocabulary).
    """
    blocks: list[nn.Module] = [TransformerBlock(width, num_heads) for _ in range(num_layers)]
    return Stack(nn.Embedding(vocabulary, width), blocks, nn.Linear(width, vocabulary, bias=False))


@final
class SpectralConv(nn.Module):
    """A convolution that multiplies the lowest Fourier modes by weights.

    Args:
        channels: number of input channels, and of output channels.
        modes: number of Fourier modes kept in each direction.
        dimensions: number of spatial dimensions, 2 or 3.

    Source:
        Li et al., Fourier Neural Operator for Parametric Partial Differential Equations (2021),
        equation 4.
    """

    def __init__(self, channels: int, modes: int, dimensions: int) -> None:
        super().__init__()
        self.modes = modes
        size = (channels, channels, *[modes] * (dimensions - 1), modes // 2 + 1)
        self.weight = nn.Parameter(torch.randn(size, dtype=torch.cfloat) / channels)
        self.bias = nn.Parameter(torch.zeros(channels, *[1] * dimensions))

    def forward(self, x: Tensor) -> Tensor:
        dims = tuple(range(2, x.dim()))
        spectrum = torch.fft.fftshift(torch.fft.rfftn(x, dim=dims, norm="forward"), dim=dims[:-1])
        kept = [slice(None), slice(None)]
        for n in spectrum.shape[2:-1]:
            kept.append(slice((n - self.modes) // 2, (n - self.modes) // 2 + self.modes))
        kept.append(slice(0, self.modes // 2 + 1))
        out = torch.zeros_like(spectrum)
        out[tuple(kept)] = torch.einsum("bi...,io...->bo...", spectrum[tuple(kept)], self.weight)
        out = torch.fft.ifftshift(out, dim=dims[:-1])
        return torch.fft.irfftn(out, s=x.shape[2:], dim=dims, norm="forward") + self.bias


@final
class FNOBlock(nn.Module):
    """A block as in neuraloperator: spectral convolution, linear skip, MLP with a gated skip."""

    def __init__(self, channels: int, modes: int, dimensions: int) -> None:
        super().__init__()
        ones = [1] * dimensions
        self.spectral = SpectralConv(channels, modes, dimensions)
        self.skip = nn.Conv1d(channels, channels, 1, bias=False)
        self.gate = nn.Parameter(torch.ones(1, channels, *ones))
        self.narrow, self.widen = (
            nn.Conv1d(channels, channels // 2, 1),
            nn.Conv1d(channels // 2, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        gated = self.gate * x
        y = F.gelu(self.spectral(x) + self.skip(x.flatten(2)).view_as(x))
        mixed = self.widen(F.gelu(self.narrow(y.flatten(2)))).view_as(y)
        return F.gelu(mixed + gated)


@final
class Pointwise(nn.Module):
    """Two linear layers applied to the channels at every point."""

    def __init__(self, inner: int, hidden: int, outer: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(inner, hidden, 1), nn.Conv1d(hidden, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.gelu(self.first(x.flatten(2))))
        return y.view(y.shape[0], y.shape[1], *x.shape[2:])


def fno(channels: int, modes: int, dimensions: int, num_layers: int = 4) -> Stack:
    """Build a Fourier neural operator that maps one field to another.

    Shape:
        input: (batch, 1, *spatial), float32. output: the same.
    """
    blocks: list[nn.Module] = [FNOBlock(channels, modes, dimensions) for _ in range(num_layers)]
    return Stack(Pointwise(1, 2 * channels, channels), blocks, Pointwise(channels, 2 * channels, 1))


@final
class UNet(nn.Module):
    """Three stages down, one in the middle and three up, which read what those down gave.

    Args:
        stage: builds a stage from the numbers of its input and output channels.
        widths: channels of the stages down.
    """

    def __init__(
        self, stage: Callable[[int, int], nn.Module], widths: tuple[int, int, int]
    ) -> None:
        super().__init__()
        a, b, c = widths
        self.downs = nn.ModuleList([stage(1, a), stage(a, b), stage(b, c)])
        self.middle = stage(c, c)
        self.ups = nn.ModuleList([stage(2 * c, b), stage(2 * b, a), stage(2 * a, a)])
        self.head = nn.Conv2d(a, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.ups:
            x = F.interpolate(x, scale_factor=2.0)
            x = up(torch.cat([x, skips.pop()], dim=1))
        return self.head(x)  # type: ignore[no-any-return]
