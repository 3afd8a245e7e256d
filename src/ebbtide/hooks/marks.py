"""Marks on tensors that are not to be offloaded, without an attribute on any of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# A weak reference pins a storage's address, so while it is here no other storage has that address.
_marked: dict[int, StorageWeakRef] = {}
_purge_at = 64


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Let these tensors stay on the device when autograd saves them, and all views of them.

    A mark lasts as long as the tensor's storage. Of a wrapper (a DTensor, a quantized tensor) the
    data are marked.

    Args:
        tensors: any; None is passed over.

    Source: Transformer Engine, `mark_not_offload`.
    """
    global _purge_at
    for tensor in tensors:
        for part in () if tensor is None else _parts(tensor):
            storage = part.untyped_storage()
            _marked[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    if len(_marked) > _purge_at:
        for address in [key for key, mark in _marked.items() if mark.expired()]:  # type: ignore[no-untyped-call]
            del _marked[address]
        _purge_at = max(64, 2 * len(_marked))


def is_marked(storage: torch.UntypedStorage) -> bool:
    """Whether what is saved of a storage is to stay."""
    return storage._cdata in _marked


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif hasattr(tensor, "get_data_tensors"):  # Transformer Engine's
        parts = list(tensor.get_data_tensors())
    else:
        yield tensor
        return
    for part in parts:
        if isinstance(part, torch.Tensor):
            yield from _parts(part)
