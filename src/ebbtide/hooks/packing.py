"""Lossless packing of what is about to leave: a mask's bytes to bits, indices to a narrow type."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ebbtide.runtime.records import AbstractPacking

PACKED = frozenset({torch.bool, torch.int64})
"""What `find_packing` looks at."""

_BITS = 8
_NARROW = (torch.uint8, torch.int16, torch.int32)


@final
class BitPacking(AbstractPacking):
    """A mask: one bit for each byte, for whether it is zero."""

    def pack(self, flat: Tensor) -> Tensor:
        rest = -flat.numel() % _BITS
        if rest:
            flat = torch.cat([flat, flat.new_zeros(rest)])
        return (flat.ne(0).view(-1, _BITS) * _weights(flat)).sum(1, dtype=torch.uint8)

    def unpack(self, packed: Tensor, size_bytes: int) -> Tensor:
        bits = (packed.unsqueeze(1) & _weights(packed)).ne(0)
        return bits.view(-1)[:size_bytes].view(torch.uint8)


@final
class NarrowPacking(AbstractPacking):
    """Whole numbers of eight bytes in a type that holds them all.

    Args:
        dtype: that type.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def pack(self, flat: Tensor) -> Tensor:
        return flat.view(torch.int64).to(self._dtype).view(torch.uint8)

    def unpack(self, packed: Tensor, size_bytes: int) -> Tensor:
        return packed.view(self._dtype).to(torch.int64).view(torch.uint8)[:size_bytes]


def find_packing(tensor: Tensor, storage: torch.UntypedStorage) -> AbstractPacking | None:
    """What packs all of a tensor's storage; None if nothing does, or not for free.

    A mask is packed on any device. Whether indices are small can only be known by looking, and an
    accelerator's host would have to wait for that: they are packed on a CPU.

    Args:
        tensor: what is saved.
        storage: the tensor's.
    """
    whole = tensor if tensor._base is None else tensor._base
    if whole.dtype is not tensor.dtype or whole.nbytes != storage.nbytes():
        return None
    if tensor.dtype is torch.bool:
        return BitPacking()
    if tensor.dtype is torch.int64 and tensor.device.type == "cpu":
        least, most = _all_numbers(storage).aminmax()
        for dtype in _NARROW:
            limits = torch.iinfo(dtype)
            if limits.min <= int(least) and int(most) <= limits.max:
                return NarrowPacking(dtype)
    return None


def _all_numbers(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage)


def _weights(like: Tensor) -> Tensor:
    return torch.tensor([1 << bit for bit in range(_BITS)], dtype=torch.uint8, device=like.device)
