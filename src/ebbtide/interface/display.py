"""Short texts and HTML tables for objects that a console or a notebook shows."""

from __future__ import annotations

import html
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


def html_table(title: str, rows: Iterable[Sequence[str]]) -> str:
    """Format rows of text as an HTML table."""
    lines = [f"<table><caption>{html.escape(title)}</caption>"]
    for row in rows:
        cells = "".join(f'<td style="text-align: left">{html.escape(cell)}</td>' for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def html_text(text: str) -> str:
    """Format text that is laid out in columns as HTML."""
    return f"<pre>{html.escape(text)}</pre>"
