"""The errors ebbtide raises, one small tree.

EbbtideError
├── PolicyError (ValueError)                    an argument cannot be honoured
├── ScheduleError (ValueError)                  a schedule cannot be read or run
├── StoreFullError (OSError)                    a lower tier cannot take more bytes
└── SavedTensorModifiedError (RuntimeError)     a saved tensor was changed in place before backward
"""

from __future__ import annotations


class EbbtideError(Exception):
    """Base of every error that ebbtide raises on purpose."""


class PolicyError(EbbtideError, ValueError):
    """An argument, or its combination with this model, cannot be honoured."""


class ScheduleError(EbbtideError, ValueError):
    """A schedule cannot be read, or what it says cannot be run; the message marks the line."""


class StoreFullError(EbbtideError, OSError):
    """A store cannot take the bytes; nothing that was saved before is lost."""


class SavedTensorModifiedError(EbbtideError, RuntimeError):
    """A tensor that autograd saved was modified in place before backward needed it."""
