"""A torch device in software: `tests/softdevice`, described in docs/internals/softdevice.md.

Importing this package loads nothing. `load` builds the device if need be and registers it with
torch as "softdevice", which cannot be undone in this process.
"""

from softdevice.library import (
    ORDERS,
    capacity,
    choose_order,
    is_loaded,
    load,
    num_jobs_run,
    operators_run_at_once,
    order,
    set_capacity,
    sleep,
)

__all__ = [
    "ORDERS",
    "capacity",
    "choose_order",
    "is_loaded",
    "load",
    "num_jobs_run",
    "operators_run_at_once",
    "order",
    "set_capacity",
    "sleep",
]
