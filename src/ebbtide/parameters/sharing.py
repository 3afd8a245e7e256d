"""Who else refers to the memory of a tensor: other tensors, NumPy arrays, other processes.

Values may be moved to other memory only where nobody could notice. What else refers to the memory
would not see later changes of the values any more, and its own changes would be lost.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ebbtide.tensors.memory_parts import parts_of


def count_users(tensor: torch.Tensor) -> int:
    """The reference count of a tensor's storage; see `ALONE`."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


ALONE = count_users(torch.empty(1, device="cpu"))
"""What `count_users` returns for a tensor that shares its memory with no other."""


_FROZEN = gc.get_freeze_count()
"""Of objects that Python itself has hidden from its collector, as 3.12 does when it starts."""


def find_shared(
    tensors: Sequence[torch.Tensor], *, aliases: int = 0, but_graphs: bool = False
) -> set[int]:
    """Find the tensors whose memory somebody else refers to.

    Args:
        tensors: distinct tensors. They may be parts of one storage if they do not overlap.
        aliases: how many tensors the caller has for each of them that share its memory.
        but_graphs: leave out what only autograd graphs refer to. Their values are from before, and
            they keep them. This looks at all tensors of the process where a graph may be.

    Returns:
        The positions of the tensors that share their memory.
    """
    by_storage: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(position)
    shared, perhaps = set(), {}
    for storage, positions in by_storage.items():
        first = tensors[positions[0]]
        users = count_users(first) - ALONE + 1 - len(positions) * (1 + aliases)
        between_processes = first.device.type == "cpu" and first.is_shared()  # type: ignore[no-untyped-call]
        if between_processes or _overlap([tensors[position] for position in positions]):
            shared.update(positions)
        elif users:
            perhaps[storage] = positions
    # What a program has hidden by `gc.freeze` cannot be looked at, and counts as sharing.
    if perhaps and but_graphs and gc.get_freeze_count() <= _FROZEN:
        gc.collect()  # a tensor that nobody can reach shares nothing
        seen = _storages_of_others(tensors)
        perhaps = {storage: found for storage, found in perhaps.items() if storage in seen}
    return shared.union(*perhaps.values())


def _storages_of_others(tensors: Sequence[torch.Tensor]) -> set[int]:
    known = {id(tensor) for tensor in tensors}
    found: set[int] = set()
    # Any tensor of the process is asked: lazy, sparse, fake, or of a class that refuses to be.
    with torch._C.DisableTorchFunction():
        for each, references in _count_references(gc.get_objects()):
            # What a graph has saved keeps its Python object, to which nothing in Python refers.
            if references > _UNREFERENCED and id(each) not in known:
                with contextlib.suppress(Exception):  # it has no memory, or raises all the same
                    parts = map(torch.Tensor.untyped_storage, parts_of(each))
                    found.update(part._cdata for part in parts)
    return found


def _count_references(objects: list[Any]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the tensors in a list, and how often Python refers to each."""
    for each in objects:
        if issubclass(type(each), torch.Tensor):
            yield each, sys.getrefcount(each) - (torch.Tensor._use_count(each) > 1)  # type: ignore[attr-defined]


_UNREFERENCED = next(_count_references([torch.empty(0, device="cpu")]))[1]
"""What `_count_references` yields for a tensor to which nothing but the list refers."""


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    ranges = sorted((tensor.data_ptr(), _end_of(tensor)) for tensor in tensors if tensor.numel())
    return any(end > begin for (_, end), (begin, _) in pairwise(ranges))


def _end_of(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def is_foreign(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in memory that torch has not allocated, such as that of a NumPy array.

    torch cannot say whether anybody else refers to it. Nobody does where torch or safetensors have
    mapped a file for this process alone, as they do to load weights.
    """
    storage = tensor.untyped_storage()
    if storage.resizable() or not storage.nbytes():
        return False
    return tensor.device.type != "cpu" or not _is_private_file(tensor.data_ptr())


def _is_private_file(address: int) -> bool:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        extent, mode, _, _, inode, *_ = line.split()
        begin, end = (int(part, 16) for part in extent.split("-"))
        if begin <= address < end:
            return mode.endswith("p") and inode != "0"
    return False
