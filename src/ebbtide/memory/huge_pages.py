"""Says whether torch allocates large tensors on a CPU in huge pages, and makes the best of it.

[Note: huge pages] What is offloaded on a CPU is returned to the system, and the memory is taken
again, page by page, for the next tensors. With pages of 4 KiB that can take as long as the training
itself; pages of 2 MiB halve it (`python -m benchmarks.rss`). Linux gives huge pages to whom it is
asked by, and torch asks for tensors of 2 MiB or more if `THP_MEM_ALLOC_ENABLE` is set when it
allocates for the first time in a process. That is for the user to decide: memory is often lower
with huge pages, too, and in some programs it is much higher (TRL's trainer, by a half).

[Note: reused blocks] For huge pages torch aligns tensors to 4 KiB, and glibc 2.36 does not find the
hole that the last one of the same size has left. It takes memory from the end of the heap, and
returns the end of the heap whenever enough of it is free: pages come and go without end. A
convolutional net took twice as long so, without any offload. So, with huge pages, the end of the
heap is not returned by itself any more while a model on a CPU is offloaded, and blocks up to 32 MiB
come from the heap, as they do after a while anyway. ebbtide returns freed memory itself, see
[Note: freed but resident].

[Note: blocks of their own] What an operator frees while it runs may be reused by it or not, as it
fits; a convolution's backward took between 70 and 120 MiB for the same tensors. Where a budget has
no room for that, blocks of 1 MiB or more are mapped one by one, unless one that was freed before
fits. They return to the system when they are freed, so resident memory is what is in use. The heap
grows by no more than is asked for then, because large blocks would fit into the rest. All that
takes time for new pages, so it is done in passes without room only. It cannot be undone quite,
because glibc stops to adapt its thresholds; what is set then is what it adapts them to where
tensors are large.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Final, final

import torch

from ebbtide.memory.freed_memory import decides_when_to_return

VARIABLE: Final = "THP_MEM_ALLOC_ENABLE"
_LARGE_BYTES: Final = 2 * 2**20  # torch asks for huge pages from this size on,
_ALIGNMENT: Final = 4096  # and then aligns the tensor to this
_MOST_REUSED_BYTES: Final = 32 * 2**20  # the most that glibc takes from the heap,
_LEAST_MAPPED_BYTES: Final = 2**20  # and the least that is mapped where there is no room
_MMAP_THRESHOLD: Final = -3  # larger blocks are mapped, and returned when they are freed
_TRIM_THRESHOLD: Final = -1  # how much of the heap's end may be free
_TOP_PAD: Final = -2  # how much the heap grows by beyond what is asked for:
_MOST_GROWN_BYTES: Final = 64 * 2**20  # this with huge pages,
_LEAST_GROWN_BYTES: Final = 128 * 2**10  # and this, which is what glibc begins with, elsewhere
_SETTINGS: Final = {  # of mallopt(3), by their numbers there
    _MMAP_THRESHOLD: _MOST_REUSED_BYTES,
    _TRIM_THRESHOLD: 2**31 - 1,
    _TOP_PAD: _MOST_GROWN_BYTES,
}


@functools.cache
def reuse_blocks() -> None:
    """Have glibc reuse blocks if torch asks for huge pages. See [Note: reused blocks]."""
    if decides_when_to_return() and has_huge_pages():
        library = ctypes.CDLL(None)
        for setting, value in _SETTINGS.items():
            library.mallopt(setting, value)


@final
class _LargeBlocks:
    """Whether large blocks are mapped one by one in this process. See [Note: blocks of their own].

    Attributes:
        are_mapped: whether they are.
    """

    def __init__(self) -> None:
        self.are_mapped = False

    def map(self, mapped: bool) -> None:
        """Map large blocks one by one from now on, or have them reused.

        Args:
            mapped: whether to map them.
        """
        if mapped is self.are_mapped or not decides_when_to_return():
            return
        self.are_mapped = mapped
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LEAST_MAPPED_BYTES if mapped else _MOST_REUSED_BYTES)
        if has_huge_pages():
            library.mallopt(_TOP_PAD, _LEAST_GROWN_BYTES if mapped else _MOST_GROWN_BYTES)
        else:
            library.mallopt(_TRIM_THRESHOLD, 2 * _MOST_REUSED_BYTES)


large_blocks: Final = _LargeBlocks()


@functools.cache
def has_huge_pages() -> bool:
    """Whether torch asks for huge pages in this process."""
    tensors = [torch.empty(_LARGE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2)]
    return sys.platform == "linux" and all(not each.data_ptr() % _ALIGNMENT for each in tensors)


def describe_pages() -> str:
    """Say in one sentence whether torch asks for huge pages, and if not, how it would."""
    if has_huge_pages():
        reused = " and reused when they are freed" if decides_when_to_return() else ""
        return f"Tensors of 2 MiB or more are in huge pages where the system has them{reused}."
    if sys.platform != "linux":
        return "Huge pages are asked for on Linux only."
    if os.environ.get(VARIABLE) == "1":
        return (
            f"Tensors are in small pages: {VARIABLE}=1 was set after torch had allocated memory. "
            f"Set it before Python starts."
        )
    return (
        f"Tensors are in small pages, and taking returned memory again is slow. With {VARIABLE}=1 "
        f"set before Python starts it takes about half as long; in some programs memory is higher."
    )
