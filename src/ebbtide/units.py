"""Parse byte counts such as ``"24GiB"`` and format them, such as ``"1.7 GiB"``."""

from __future__ import annotations

import re
from fractions import Fraction

from ebbtide.errors import PolicyError

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size_bytes(size: int | str, *, name: str = "size") -> int:
    """Parse a byte count.

    Args:
        size: number of bytes as an int, or text such as ``"24GiB"`` or ``"1.5 GB"``; a fraction of
            a byte is cut off.
        name: name of the number in error messages.

    Returns:
        The size in bytes.

    Raises:
        PolicyError: ``size`` is negative or cannot be read.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise PolicyError(f'{name} must be a number of bytes or text like "24GiB", got {size!r}')
    if isinstance(size, int):
        if size < 0:
            raise PolicyError(f"{name} must not be negative, got {size}")
        return size
    match = _SIZE.fullmatch(size)
    if match is None or match[2].lower() not in _UNITS:
        raise PolicyError(
            f"{name}={size!r} cannot be read as bytes; write a number and one of "
            f'B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, such as "24GiB"'
        )
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def format_size(size_bytes: int) -> str:
    """Format a byte count for people, such as 1830 as ``"1.8 KiB"``."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    size = size_bytes / 1024
    for unit in ("KiB", "MiB"):
        if abs(size) < 1023.95:  # a larger size would round to 1024.0, which is 1 of the next unit
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
