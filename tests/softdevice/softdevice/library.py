"""Loads the compiled device into this process, and calls it."""

from __future__ import annotations

import atexit
import importlib

import torch

from softdevice import build

NAME = "softdevice"
ORDERS = ("threads", "compute-first", "copies-first", "random:SEED")
CYCLES_PER_US = 200  # the kernels here take ten times as long as those of a GPU at 2 GHz

_loaded = False
_order = "threads"


def load(order: str = "threads") -> None:
    """Register the device with torch, for as long as the process lives.

    Args:
        order: of execution, one of `ORDERS`.

    Raises:
        softdevice.build.NoCompilerError: it is not built yet, and there is no compiler.
        RuntimeError: there is no such order.
    """
    global _loaded
    if not _loaded:
        # Shapes of results come from torch's meta kernels, many of which are Python.
        importlib.import_module("torch._meta_registrations")
        torch.ops.load_library(build.build())
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, importlib.import_module("softdevice.device_module"))
        torch.utils.generate_methods_for_privateuse1_backend()
        torch.ops.softdevice.initialise()
        atexit.register(torch.ops.softdevice.shut_down)
        _loaded = True
    choose_order(order)


def is_loaded() -> bool:
    """Whether this process has the device."""
    return _loaded


def choose_order(order: str) -> None:
    """Finish what is queued, and run what is queued from now on in another order.

    "random:SEED" begins its random choices anew each time, so that a test can be run again.
    """
    global _order
    torch.ops.softdevice.choose_order(order)
    _order = order


def order() -> str:
    """Return the order of execution in force."""
    return _order


def sleep(cycles: int) -> None:
    """Queue a kernel that does nothing, for long, as `torch.cuda._sleep` does.

    The order "threads" sleeps. In all others a stream that sleeps lets other streams go first.
    """
    torch.ops.softdevice.sleep(cycles // CYCLES_PER_US)


def capacity() -> int:
    """Return how much memory the device has, in bytes."""
    return torch.ops.softdevice.capacity()


def set_capacity(size_bytes: int) -> None:
    """Set how much memory the device has. What is allocated already stays allocated."""
    torch.ops.softdevice.set_capacity(size_bytes)


def num_jobs_run() -> int:
    """Return how many jobs have run since the order was chosen."""
    return torch.ops.softdevice.num_jobs_run()


def operators_run_at_once() -> list[str]:
    """Return the operators that ran while the host waited, because nothing told their shapes."""
    return torch.ops.softdevice.operators_run_at_once().split()
