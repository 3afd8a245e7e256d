"""One line on standard error that says what is under way, and is written over by the next."""

from __future__ import annotations

import os
import sys
from typing import Final

_WIDTH: Final = 79


def show_status(what: str) -> None:
    """Show on a terminal what is under way; "" clears the line. Elsewhere nothing is printed."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return
    text = f"{what[: _WIDTH - 4]} ..." if what else ""
    print(f"\r{'':<{_WIDTH}}\r{text}", end="", file=sys.stderr, flush=True)
