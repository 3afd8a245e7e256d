"""Asks torch to allocate large tensors on a CPU in huge pages.

[Note: huge pages] What is offloaded on a CPU is returned to the system, and the memory is taken
again, page by page, for the next tensors. With pages of 4 KiB that can take as long as the training
itself; with pages of 2 MiB it takes little (`python -m benchmarks.rss`). Linux gives huge pages to
whom it is asked by, and torch asks for tensors of 2 MiB or more if `THP_MEM_ALLOC_ENABLE` is set
when it allocates for the first time in a process. So `import ebbtide` sets it, has torch read it,
and removes it again. A value that the user has set stays.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import torch

_VARIABLE: Final = "THP_MEM_ALLOC_ENABLE"
_LARGE_BYTES: Final = 2 * 2**20  # torch asks for huge pages from this size on,
_ALIGNMENT: Final = 4096  # and then aligns the tensor to this


def ask_for_huge_pages() -> None:
    """Have torch ask for huge pages, unless the user has decided. See [Note: huge pages].

    It has no effect if torch has allocated a tensor on the CPU before.
    """
    if sys.platform != "linux" or _VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = "1"
    try:
        torch.empty(1, device="cpu")
    finally:
        del os.environ[_VARIABLE]


def has_huge_pages() -> bool:
    """Whether torch asks for huge pages in this process."""
    tensors = [torch.empty(_LARGE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2)]
    return sys.platform == "linux" and all(not each.data_ptr() % _ALIGNMENT for each in tensors)


def describe_pages() -> str:
    """Say in one sentence whether torch asks for huge pages, and if not, how it would."""
    if has_huge_pages():
        return "Tensors of 2 MiB or more are allocated in huge pages where the system has them."
    if sys.platform != "linux":
        return "Huge pages are asked for on Linux only."
    if _VARIABLE in os.environ:
        return f"{_VARIABLE}={os.environ[_VARIABLE]} keeps torch from asking for huge pages."
    return (
        "Tensors are allocated in small pages, and taking returned memory again is slow: torch had "
        "allocated memory before ebbtide was imported. Import ebbtide before any tensor is made."
    )
