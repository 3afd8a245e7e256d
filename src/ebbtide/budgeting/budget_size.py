"""Reads a budget, which is a number of bytes or a share of all memory."""

from __future__ import annotations

import re
from typing import Final

from ebbtide.errors import PolicyError
from ebbtide.units import parse_size_bytes

_SHARE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def parse_budget_bytes(budget: int | str, total_bytes: int) -> int:
    """Return a budget in bytes.

    Args:
        budget: bytes, text such as ``"24GiB"``, or a share of all memory such as ``"90%"``.
        total_bytes: all the memory that there is.

    Raises:
        PolicyError: it cannot be read, is 0, or is more than there is.
    """
    match = _SHARE.fullmatch(budget) if isinstance(budget, str) else None
    if match is not None:
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise PolicyError(f"budget={budget!r} is no share of the memory; write 1% to 100%")
        return int(share * total_bytes)
    if not isinstance(budget, int | str) or isinstance(budget, bool):
        raise PolicyError(
            f'budget must be a number of bytes or text like "24GiB" or "90%", got {budget!r}'
        )
    size_bytes = parse_size_bytes(budget, name="budget")
    if not size_bytes:
        raise PolicyError("budget must be more than 0 bytes")
    return size_bytes
