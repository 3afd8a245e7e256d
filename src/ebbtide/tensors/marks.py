"""Marks tensors that must not be offloaded, without setting an attribute on them."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.interface.arguments import refuse
from ebbtide.tensors.memory_parts import parts_of

# torch's weak reference to a storage keeps the storage's address from being reused, so while the
# reference is in this table, no other storage has that address.
_marked: dict[int, StorageWeakRef] = {}
_purge_at = 64


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Keep these tensors and all their views on the device when autograd saves them.

    A mark lasts as long as the tensor's storage. For a wrapper subclass (a DTensor, a quantized
    tensor) and for a sparse tensor its inner tensors are marked.

    Args:
        tensors: the tensors to mark; None is skipped.

    Raises:
        PolicyError: an argument is something else.

    Source: Transformer Engine, `mark_not_offload`.
    """
    global _purge_at
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            refuse("each argument of mark_not_offload", "a tensor or None", tensor)
        for part in () if tensor is None else parts_of(tensor):
            storage = part.untyped_storage()
            _marked[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    if len(_marked) > _purge_at:
        for address in [key for key, mark in _marked.items() if mark.expired()]:  # type: ignore[no-untyped-call]
            del _marked[address]
        _purge_at = max(64, 2 * len(_marked))


def is_marked(storage: torch.UntypedStorage) -> bool:
    """Whether saved tensors of a storage must stay on the device."""
    return storage._cdata in _marked
