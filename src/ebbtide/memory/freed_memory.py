"""Returns memory that a process has freed to the system, so that its resident memory (RSS) falls.

[Note: freed but resident] A model on a CPU allocates its tensors with the C library's `malloc`.
When a tensor is freed, glibc keeps its memory for later allocations, up to 32 MiB a block, and the
system still counts it as resident. Offloading then frees memory that nobody else gets.

`malloc_trim` returns all pages in free blocks, wherever they lie. It changes no setting, so nothing
must be restored. A lower threshold for blocks of their own (`mallopt(M_MMAP_THRESHOLD)`) was
measured beside it: it makes every large tensor of the model pay for new pages, cannot be undone,
and has no effect in a process that has trained before, whose free blocks stay where they are.

`python -m benchmarks.rss` compares the ways.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import final

from ebbtide.units import format_size

_LOG = logging.getLogger(__name__)

LEAST_BYTES = 16 * 2**20
SHARE = 16
_LEAST_BUDGETED_BYTES = 2 * 2**20
_BUDGETED_SHARE = 128

# The user's own settings of when glibc returns memory, each as a variable and as a tunable.
_SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": "glibc.malloc.trim_threshold",
    "MALLOC_MMAP_THRESHOLD_": "glibc.malloc.mmap_threshold",
    "MALLOC_MMAP_MAX_": "glibc.malloc.mmap_max",
    "MALLOC_TOP_PAD_": "glibc.malloc.top_pad",
}


@final
class FreedMemory:
    """Says after how many moved bytes freed memory is to be returned.

    Returning memory costs time twice, now and when the memory is needed again. So it is done after
    every 16 MiB that were moved, or after 1/16 of the bytes in the store if that is more: the peak
    then exceeds that of an allocator that keeps nothing by about as much. Under a budget it is done
    after an eighth of that, where the budget has no room for what was freed.

    Attributes:
        is_returned: whether this process returns freed memory at all.
        has_room: says whether a budget has room for freed memory now; None: there is no budget.
    """

    def __init__(self) -> None:
        self.has_room: Callable[[], bool] | None = None
        self.is_returned = _refusal() is None
        self._moved_bytes = 0
        _log_once()

    def is_due(self, size_bytes: int, stored_bytes: int) -> bool:
        """Count moved bytes.

        Args:
            size_bytes: how many bytes have been moved now.
            stored_bytes: how many bytes are in the store.

        Returns:
            Whether to call `return_freed_memory` when they have arrived.
        """
        self._moved_bytes += size_bytes
        least_bytes, share = LEAST_BYTES, SHARE
        if self.has_room is not None:
            least_bytes, share = _LEAST_BUDGETED_BYTES, _BUDGETED_SHARE
        if self._moved_bytes < max(least_bytes, stored_bytes // share) or not self.is_returned:
            return False
        self._moved_bytes = 0
        return self.has_room is None or not self.has_room()


def return_freed_memory() -> None:
    """Return the free pages of the C library's allocator to the system.

    Any thread may call this. Other threads that allocate large blocks wait meanwhile. If the user
    has set when glibc returns memory, or the allocator is another one, this does nothing.
    """
    trim = _malloc_trim()
    if trim is not None and _refusal() is None:
        trim(0)


def decides_when_to_return() -> bool:
    """Whether ebbtide may say when glibc returns freed memory in this process."""
    return _refusal() is None


def describe() -> str:
    """Say in one sentence what is done about freed memory in this process."""
    refusal = _refusal()
    if refusal is not None:
        return f"Freed memory is not returned to the system by ebbtide: {refusal}."
    return (
        f"Freed memory is returned to the system by malloc_trim, after every "
        f"{format_size(LEAST_BYTES)} that are offloaded or reloaded, or 1/{SHARE} of the bytes in "
        f"the store if that is more; otherwise the resident memory (RSS) would not fall."
    )


@functools.cache
def _log_once() -> None:
    _LOG.info(describe())


@functools.cache
def _refusal() -> str | None:
    """Return why freed memory is not returned here; None if it is."""
    chosen = chosen_settings(os.environ)
    if chosen:
        return f"{' and '.join(chosen)} set when the C library returns it"
    if sys.platform != "linux":
        return f"on {sys.platform} the system's allocator decides when to return it"
    if _malloc_trim() is None:
        return "this C library is not glibc, and its own allocator decides when to return it"
    owner = _owner_of_malloc()
    if owner is not None:
        return f"{owner} has replaced the C library's allocator and decides when to return it"
    return None


def chosen_settings(environment: Mapping[str, str]) -> list[str]:
    """Return the settings in an environment that say when glibc returns freed memory."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    named = {item.partition("=")[0] for item in tunables.split(":")}
    chosen = [variable for variable in _SETTINGS if variable in environment]
    return chosen + [tunable for tunable in _SETTINGS.values() if tunable in named]


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # musl, macOS; Windows has no CDLL(None)
        return None
    function.argtypes = (ctypes.c_size_t,)
    return function


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _owner_of_malloc() -> str | None:
    """Return the library that has replaced glibc's `malloc`, such as jemalloc; None if none has."""
    files = []
    try:
        library = ctypes.CDLL(None)
        for name in ("malloc", "gnu_get_libc_version"):
            info = _SymbolInfo()
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p)
            library.dladdr(address, ctypes.byref(info))
            files.append(info.file)
    except (OSError, AttributeError):
        return None
    malloc, glibc = files
    if malloc is None or glibc is None or malloc == glibc:
        return None
    return os.path.basename(os.fsdecode(malloc))
