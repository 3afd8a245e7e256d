"""Packs tensors without loss before their offload: masks to bits, indices to a narrower type.

A packing is named by a type: `torch.bool` means that each byte of a mask becomes one bit, and an
integer type is the narrower type that 8-byte integers are converted to.
"""

from __future__ import annotations

import torch
from torch import Tensor

PACKED = frozenset({torch.bool, torch.int64})
"""The types of tensors that can be packed."""

_BITS = 8
_NARROW = (torch.uint8, torch.int16, torch.int32)


def find_packing(tensor: Tensor, storage: torch.UntypedStorage) -> torch.dtype | None:
    """Return a packing for the whole storage of a tensor; None if it should not be packed.

    A mask is packed on any device. Indices are packed only on a CPU: their packing depends on their
    values, and the host would have to wait for an accelerator to read them.

    Args:
        tensor: the saved tensor.
        storage: its storage.
    """
    whole = tensor if tensor._base is None else tensor._base
    if whole.dtype is not tensor.dtype or whole.nbytes != storage.nbytes():
        return None
    if tensor.dtype is torch.bool:
        return torch.bool
    if tensor.dtype is torch.int64 and tensor.device.type == "cpu":
        numbers = torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage)
        least, most = numbers.aminmax()
        for dtype in _NARROW:
            limits = torch.iinfo(dtype)
            if limits.min <= int(least) and int(most) <= limits.max:
                return dtype
    return None


def bytes_of(storage: torch.UntypedStorage, no_bytes: Tensor) -> Tensor:
    """Return a storage's bytes as a tensor, which keeps the storage alive.

    Args:
        storage: any storage.
        no_bytes: an empty uint8 tensor on the storage's device.

    Shape:
        (size_bytes,), uint8.
    """
    return no_bytes.new(storage)  # the fastest way, and the oldest


def gather(tensor: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return a view's elements, packed, as bytes. The handle keeps the conj and neg bits."""
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    plain.set_(tensor.untyped_storage(), tensor.storage_offset(), size, tensor.stride())
    packed = plain.clone(memory_format=torch.contiguous_format)
    return packed.view(-1).view(torch.uint8)


def pack(flat: Tensor, packing: torch.dtype) -> Tensor:
    """Pack the bytes of a storage.

    Shape:
        flat: (size_bytes,), uint8.
        Returns: (packed_bytes,), uint8.
    """
    if packing is not torch.bool:
        return flat.view(torch.int64).to(packing).view(torch.uint8)
    rest = -flat.numel() % _BITS
    if rest:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    return (flat.ne(0).view(-1, _BITS) * _weights(flat)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, packing: torch.dtype, size_bytes: int) -> Tensor:
    """Return the bytes of a storage as they were before `pack`.

    Shape:
        packed: (packed_bytes,), uint8.
        Returns: (size_bytes,), uint8.
    """
    if packing is not torch.bool:
        return packed.view(packing).to(torch.int64).view(torch.uint8)[:size_bytes]
    bits = (packed.unsqueeze(1) & _weights(packed)).ne(0)
    return bits.view(-1)[:size_bytes].view(torch.uint8)


def _weights(like: Tensor) -> Tensor:
    return torch.tensor([1 << bit for bit in range(_BITS)], dtype=torch.uint8, device=like.device)
