"""Lays out the reports of all commands: plain text of 80 columns, whatever reads it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table

from ebbtide.units import three_digits

WIDTH: Final = 80
INDENT: Final = 2


def render(*parts: RenderableType) -> str:
    """Return parts one below the other as plain text, without spaces at the ends of lines."""
    console = Console(
        file=io.StringIO(), width=WIDTH, color_system=None, highlight=False, markup=False,
        emoji=False,
    )  # fmt: skip
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def indented(part: RenderableType, by: int = INDENT) -> Padding:
    """Return a part that begins some columns to the right; text wraps there."""
    return Padding(part, (0, 0, 0, by))


def labelled(
    rows: Iterable[tuple[str, str]], label_width: int, *, indent: int = INDENT
) -> RenderableType:
    """Return texts that wrap beside their labels."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(min_width=label_width, no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return indented(table, indent)


def columns(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: int = 1,
    gap: int = 1,
    widths: Sequence[int] = (),
    indent: int = INDENT,
) -> RenderableType:
    """Return a table without lines.

    Args:
        heads: the heads of the columns.
        rows: the cells; a row may end early.
        left: how many of the first columns are flush left. The others are numbers, flush right,
            but for columns without a head.
        gap: spaces between columns.
        widths: the least widths of the first columns.
        indent: columns before the table.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="none")
    for number, head in enumerate(heads):
        width = widths[number] if number < len(widths) else None
        table.add_column(
            head,
            justify="left" if number < left or not head else "right",
            min_width=width,
            overflow="fold",  # rather than cut what does not fit
        )
    for row in rows:
        table.add_row(*row)
    return indented(table, indent)


def scaled(value: float, unit: str = "") -> str:
    """Return a number with a prefix and a unit, such as ``165 GFLOP/s``."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{three_digits(value / size)} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()
