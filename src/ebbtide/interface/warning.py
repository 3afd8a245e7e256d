"""Warnings that point to the user's own code."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_NOT_THE_USERS = frozenset({"ebbtide", "torch"})


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn about the line of the innermost code that is neither torch's nor ebbtide's.

    Args:
        message: the text.
        category: the class of the warning.
    """
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and _package_of(frame) in _NOT_THE_USERS:
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
