"""Warnings that point to the user's own code, each with a name that can be looked up.

Every warning of ebbtide goes through `warn_user`. The test of `docs/guides/messages.md` finds the
calls of it, so that the page lists every warning and what to do about it.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_NOT_THE_USERS = frozenset({"ebbtide", "torch"})


def warn_user(cause: str, message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn about the line of the innermost code that is neither torch's nor ebbtide's.

    The caller sees to it that it warns once for each model.

    Args:
        cause: the name of the warning, such as ``"other-hooks"``. It ends the text, and it is a
            heading in `docs/guides/messages.md`.
        message: what has happened, and what to do about it.
        category: the class of the warning.
    """
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and _package_of(frame) in _NOT_THE_USERS:
        frame = frame.f_back
        level += 1
    warnings.warn(f"{message} [ebbtide: {cause}]", category, stacklevel=level)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
