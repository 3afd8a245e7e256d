"""Parse byte counts such as ``"24GiB"`` and format them, such as ``"1.7 GiB"``."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Final

from ebbtide.errors import PolicyError

_UNITS: Final = {"b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z%]*)\s*", re.IGNORECASE)
_LEAST_BUDGET_BYTES: Final = 4096  # a page


def parse_size_bytes(size: int | str, *, name: str = "size", whole_bytes: int | None = None) -> int:
    """Parse a byte count, as users give it in Python and on the command line.

    Args:
        size: number of bytes as an int, or text such as ``"24GiB"``, ``"24G"``, which is the same,
            or ``"1.5 GB"``; a fraction of a byte is cut off. Text without a unit is refused, as
            "24" would be 24 bytes, which nobody means.
        name: name of the number in error messages.
        whole_bytes: of what ``"90%"`` is a share. None: shares are refused.

    Returns:
        The size in bytes.

    Raises:
        PolicyError: ``size`` is negative, a share above 100%, or cannot be read.
    """
    examples = '"24GiB"' if whole_bytes is None else '"24GiB" or "90%"'
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise PolicyError(f"{name} must be a number of bytes or text like {examples}, got {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise PolicyError(f"{name} must not be negative, got {size}")
        return size
    match = _SIZE.fullmatch(size)
    number, unit = ("", size) if match is None else (match[1], match[2].lower())
    if number and unit in _UNITS:
        return int(Fraction(number) * _UNITS[unit])
    if number and unit == "%" and whole_bytes is not None:
        share = Fraction(number) / 100
        if share > 1:
            raise PolicyError(f"{name}={size!r} is more than there is; write at most 100%")
        return int(share * whole_bytes)
    if number and not unit:
        raise PolicyError(f"{name}={size!r} has no unit; write {number}GiB, for example")
    raise PolicyError(
        f"{name}={size!r} cannot be read; write a number and one of "
        f"B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, such as {examples}"
    )


def parse_budget_bytes(
    budget: int | str, whole_bytes: int | None = 2**63, *, name: str = "budget"
) -> int:
    """Parse a budget, such as ``"24GiB"`` or ``"90%"``.

    Args:
        budget: see `parse_size_bytes`.
        whole_bytes: of what ``"90%"`` is a share. The default is for a check before that is known.
            None: shares are refused.
        name: name of the budget in error messages.

    Raises:
        PolicyError: it cannot be read, or is less than 4 KiB, which nobody means: 24 is 24 bytes.
    """
    size_bytes = parse_size_bytes(budget, name=name, whole_bytes=whole_bytes)
    if size_bytes < _LEAST_BUDGET_BYTES:
        raise PolicyError(f'{name}={budget!r} is {size_bytes} bytes; write a size such as "24GiB"')
    return size_bytes


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


def format_seconds(duration_s: float) -> str:
    """Format a duration for people with three digits, such as 0.0123 as ``"12.3 ms"``."""
    value, unit = duration_s, "s"
    for smaller in ("ms", "us"):
        if value >= 1 or not value:
            break
        value, unit = value * 1e3, smaller
    return f"{three_digits(value)} {unit}" if value else "0 s"


def three_digits(value: float) -> str:
    """Format a number of 1 or more with three digits, or all of them before the point."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


# ---- Short texts for objects that a console shows ----

_LONGEST = 4


def brief(name: str, facts: Iterable[str]) -> str:
    """Format an object's state for its `repr`, such as ``<OffloadHandle: attached, 4 layers>``."""
    return f"<{name}: {', '.join(facts)}>"


def labelled(facts: Mapping[str, str]) -> list[str]:
    """Format facts for `brief`, such as ``"store: disk"``."""
    return [f"{what}: {text}" for what, text in facts.items()]


def few(names: Sequence[str]) -> str:
    """List names, or the first few of many."""
    more = len(names) - _LONGEST
    return ", ".join(names[:_LONGEST]) + (f" and {more} more" if more > 0 else "")


def count(number: int, what: str) -> str:
    """Format a count, such as ``"1 layer"`` and ``"2 layers"``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# ---- Colours, and the text that notebooks show ----

# The palette of Okabe and Ito, whose colours colour-blind readers can tell apart, a violet and a
# slate. What becomes of a storage has the colour of the event that does it.
COLOURS: Final = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "rebuild": "#CC79A7",
    "recompute": "#F0E442",
    "wait": "#D55E00",
    "offload": "#E69F00",
    "reload": "#009E73",
    "keep": "#7B5EA7",
    "step": "#1F2937",
    "other": "#999999",
}


def text_block(text: str) -> str:
    """Return text that is laid out in columns as HTML, which a notebook shows as it is printed."""
    return f"<pre>{html.escape(text)}</pre>"
