"""The errors that ebbtide raises.

EbbtideError
├── PolicyError (ValueError)                    an argument cannot be honoured
├── ScheduleError (ValueError)                  a schedule cannot be read or run
├── BudgetError (ValueError)                    no plan fits into a memory budget
├── StoreFullError (OSError)                    a lower tier cannot take more bytes
├── SavedTensorModifiedError (RuntimeError)     a saved tensor was changed in place before backward
└── ForkedProcessError (RuntimeError)           a forked child needs what only its parent has
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from types import FrameType


class EbbtideError(Exception):
    """Base of every error that ebbtide raises on purpose."""


class PolicyError(EbbtideError, ValueError):
    """An argument, or its combination with other arguments or the model, cannot be honoured."""


class ScheduleError(EbbtideError, ValueError):
    """A schedule cannot be read, or it cannot be run; the message marks the faulty line."""


class BudgetError(EbbtideError, ValueError):
    """No plan fits into a memory budget; the message names the smallest one that a plan fits into.

    Attributes:
        smallest_bytes: that budget of device memory, in bytes.
        price: by what share a step within it is longer than one that keeps everything; None if that
            is not known.
    """

    def __init__(self, message: str, *, smallest_bytes: int, price: float | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.price = price


class StoreFullError(EbbtideError, OSError):
    """A store has no room for more bytes; the bytes stored before are not lost."""


class SavedTensorModifiedError(EbbtideError, RuntimeError):
    """A tensor that autograd saved was modified in place before backward needed it."""


class ForkedProcessError(EbbtideError, RuntimeError):
    """A forked child needs saved tensors or weights that only its parent process has."""


# ---- Warnings that point to the user's own code, each with a name that can be looked up ----
#
# Every warning of ebbtide goes through `warn_user`. The test of `docs/guides/messages.md` finds the
# calls of it, so that the page lists every warning and what to do about it.

_NOT_THE_USERS = frozenset({"contextlib", "ebbtide", "torch"})


def warn_user(cause: str, message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn about the line of the innermost code that is not torch's, ebbtide's or `contextlib`.

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


@functools.cache
def warn_of_untested(package: str, version: str, newest: str) -> None:
    """Warn once if a package is newer than what ebbtide was tested with.

    Args:
        package: its name.
        version: the version that is there.
        newest: the newest version that was tested, without its last number.
    """
    if [int(n) for n in re.findall(r"\d+", version)[:2]] > [int(n) for n in newest.split(".")]:
        warn_user(
            "untested-version",
            f"{package} {version} is newer than what this ebbtide was tested with, which is up to "
            f"{newest}; if something is off, try a newer ebbtide, or pip install "
            f'"{package}=={newest}.*"',
        )


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
