"""Keeps a line that SciPy's solver prints past Python out of a training script's output."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

_STRAY: Final = b"HighsMipSolverData::"  # how the solver's line begins
_LOCK: Final = threading.Lock()


class _Redirection(NamedTuple):
    """What it takes to have C's standard output go to memory."""

    libc: ctypes.CDLL
    stdout: ctypes.c_void_p  # the variable of the C library
    stream: int  # in memory; it is never closed, as another thread may be about to print to it
    text: ctypes.c_void_p
    num_bytes: ctypes.c_size_t


@contextlib.contextmanager
def without_stray_lines() -> Iterator[None]:
    """Drop the solver's own lines from standard output while the solver runs.

    In some searches for whole numbers, HiGHS prints a line about itself with C's ``puts``, whatever
    its options say. It would appear between the lines of a training script. In here, C's standard
    output goes to memory, and afterwards the other lines are printed that came there, in their
    order. What Python prints does not go this way, so it appears at once as ever.

    Without such a C library (Windows, macOS), nothing is changed.
    """
    redirection = _prepare()
    if redirection is None:
        yield
        return
    with _LOCK:
        libc, stdout, stream, text, num_bytes = redirection
        own = stdout.value
        stdout.value = stream
        try:
            yield
        finally:
            stdout.value = own
            libc.fflush(ctypes.c_void_p(stream))
            printed = ctypes.string_at(text.value, num_bytes.value) if text.value else b""
            libc.rewind(ctypes.c_void_p(stream))
            lines = printed.splitlines(keepends=True)
            others = b"".join(line for line in lines if not line.startswith(_STRAY))
            if others:
                libc.fwrite(others, 1, len(others), ctypes.c_void_p(own))


@functools.cache
def _prepare() -> _Redirection | None:
    """Return what redirects C's standard output; None where that cannot be done."""
    try:
        libc = ctypes.CDLL(None)
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.open_memstream.restype = ctypes.c_void_p
        text, num_bytes = ctypes.c_void_p(), ctypes.c_size_t()
        stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(num_bytes))
    except (AttributeError, TypeError, ValueError, OSError):
        return None
    return _Redirection(libc, stdout, stream, text, num_bytes) if stream else None
