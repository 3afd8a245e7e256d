"""A GPT and a Llama in plain torch, as far as memory and time depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@final
@dataclass(frozen=True, kw_only=True)
class LanguageModelShape:
    """The shape of a causal language model.

    Args:
        width: width of the residual stream.
        num_layers: number of blocks.
        num_heads: number of query heads, which share the width.
        num_kv_heads: number of key and value heads.
        inner_width: width inside the MLP.
        vocabulary: number of tokens.
    """

    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    inner_width: int
    vocabulary: int


def _gpt(width: int, num_layers: int, num_heads: int) -> LanguageModelShape:
    return LanguageModelShape(
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        inner_width=4 * width,
        vocabulary=50257,
    )


def _llama(
    width: int, num_layers: int, heads: tuple[int, int], inner_width: int, vocabulary: int
) -> LanguageModelShape:
    return LanguageModelShape(
        width=width,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        inner_width=inner_width,
        vocabulary=vocabulary,
    )


GPT_SHAPES: Final = {
    "124m": _gpt(768, 12, 12),
    "350m": _gpt(1024, 24, 16),
    "774m": _gpt(1280, 36, 20),
    "1.5b": _gpt(1600, 48, 25),
    "2.7b": _gpt(2560, 32, 32),
    "6.7b": _gpt(4096, 32, 32),
    "13b": _gpt(5120, 40, 40),
}
"""Source: GPT-2 (Radford et al. 2019), and from 2.7b on table 2.1 of GPT-3 (arXiv:2005.14165)."""

LLAMA_SHAPES: Final = {
    "1b": _llama(2048, 16, (32, 8), 8192, 128256),
    "3b": _llama(3072, 28, (24, 8), 8192, 128256),
    "7b": _llama(4096, 32, (32, 32), 11008, 32000),
    "8b": _llama(4096, 32, (32, 8), 14336, 128256),
    "13b": _llama(5120, 40, (40, 40), 13824, 32000),
    "70b": _llama(8192, 80, (64, 8), 28672, 128256),
}
"""Source: Llama 2 (7b and 13b, arXiv:2307.09288) and Llama 3 (arXiv:2407.21783; 3.2 for 1b, 3b)."""


@final
class _Attention(nn.Module):
    """Causal attention, by query heads that share key and value heads."""

    def __init__(self, shape: LanguageModelShape, *, rotary: bool, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.rotary = rotary
        head_width = shape.width // shape.num_heads
        self.q = nn.Linear(shape.width, shape.width, bias=bias)
        self.k = nn.Linear(shape.width, shape.num_kv_heads * head_width, bias=bias)
        self.v = nn.Linear(shape.width, shape.num_kv_heads * head_width, bias=bias)
        self.out = nn.Linear(shape.width, shape.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
        k = self.k(x).view(batch, length, self.num_kv_heads, -1).transpose(1, 2)
        v = self.v(x).view(batch, length, self.num_kv_heads, -1).transpose(1, 2)
        if self.rotary:
            q, k = _rotate(q), _rotate(k)
        shared = self.num_heads // self.num_kv_heads
        if shared > 1:
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return y


def _rotate(x: Tensor) -> Tensor:
    """Rotate pairs of numbers by angles that grow with the position.

    Source: RoFormer, Su et al. 2021, arXiv:2104.09864.
    """
    length, width = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.outer(torch.arange(length, device=x.device), rates)
    cosine = torch.cat([angles, angles], -1).cos().to(x.dtype)
    sine = torch.cat([angles, angles], -1).sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


@final
class _GptBlock(nn.Module):
    """Attention and an MLP with GELU, each after a norm."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = _Attention(shape, rotary=False, bias=True)
        self.up = nn.Linear(shape.width, shape.inner_width)
        self.down = nn.Linear(shape.inner_width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        inner: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + inner


@final
class _LlamaBlock(nn.Module):
    """Rotary attention and an MLP with a SiLU gate, each after an RMS norm."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention = _Attention(shape, rotary=True, bias=False)
        self.gate = nn.Linear(shape.width, shape.inner_width, bias=False)
        self.up = nn.Linear(shape.width, shape.inner_width, bias=False)
        self.down = nn.Linear(shape.inner_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        inner: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + inner


@final
class LanguageModel(nn.Module):
    """A causal language model that returns its loss.

    Args:
        shape: its shape.
        length: number of positions; None: no learned positions, but rotary ones, as in a Llama.
        num_blocks: number of blocks if not that of the shape.
    """

    def __init__(
        self, shape: LanguageModelShape, length: int | None, *, num_blocks: int | None = None
    ) -> None:
        super().__init__()
        kind = _LlamaBlock if length is None else _GptBlock
        norm = nn.RMSNorm if length is None else nn.LayerNorm
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if length is None else nn.Embedding(length, shape.width)
        count = shape.num_layers if num_blocks is None else num_blocks
        self.blocks = nn.ModuleList(kind(shape) for _ in range(count))
        self.norm = norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if length is not None:
            self.head.weight = self.tokens.weight  # GPT-2 ties them

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss.

        Shape:
            tokens: (batch, length), int64.
            targets: the same.
        """
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
