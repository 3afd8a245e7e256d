"""Keeps what other code prints out of a command's own output."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Final

_STDOUT: Final = 1
_STDERR: Final = 2


@contextlib.contextmanager
def other_output_on_stderr() -> Iterator[None]:
    """Send what this process prints on standard output to standard error.

    A library may print past Python, as SciPy's solver does in some searches for whole numbers,
    and the code of a user's model may print what it likes. Standard output belongs to the
    command, whose report or JSON other programs read.
    """
    try:
        kept = os.dup(_STDOUT)
    except OSError:  # the process was started without standard output
        yield
        return
    try:
        _flush()
        try:
            os.dup2(_STDERR, _STDOUT)
        except OSError:  # without standard error: then such output has no other place to go
            yield
            return
        try:
            yield
        finally:
            _flush()
            os.dup2(kept, _STDOUT)
    finally:
        os.close(kept)


def _flush() -> None:
    """Write what Python and the C library have buffered."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # Windows has no CDLL(None)
        ctypes.CDLL(None).fflush(None)
