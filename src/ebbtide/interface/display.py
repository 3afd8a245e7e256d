"""Short texts for objects that a console shows; `ebbtide.interface.notebook` has the HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
