"""`torch.softdevice`: what torch expects of the module of a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from softdevice import library

_Device = torch.device | str | int | None

IN_SOFTWARE = True
"""Whoever measures must say so: times on this device mean nothing."""

TOTAL_BYTES = 8 * 2**30
"""The memory that the device has when it is loaded."""

_initialized = True
"""torch.utils.checkpoint asks for this before it keeps the state of the random numbers."""

Stream, Event = torch.Stream, torch.Event
_sleep, choose_order = library.sleep, library.choose_order

ORDERS_TO_TRY = ("threads", "compute-first", "copies-first", *(f"random:{n}" for n in range(4)))
"""For tests of what must go wrong: `choose_order` chooses one of them."""


def is_available() -> bool:
    return not _is_in_bad_fork()


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(torch.device("softdevice", 0) if device is None else device)


@contextlib.contextmanager
def device(_: _Device) -> Iterator[None]:
    """Make a device the current one. There is one."""
    yield


def get_device_name(_: _Device = None) -> str:
    return "an accelerator in software"


def synchronize(_: _Device = None) -> None:
    torch.accelerator.synchronize()


def current_stream(_: _Device = None) -> torch.Stream:
    return torch.accelerator.current_stream()


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one within the block."""
    before = current_stream()
    if stream is not None:
        set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


# ---- memory -------------------------------------------------------------------------------------


def host_register(address: int, size_bytes: int) -> None:
    """Page-lock memory where it is.

    Raises:
        OSError: a part of it is page-locked already.
    """
    if not torch.ops.softdevice.host_register(address, size_bytes):
        raise OSError(
            f"{size_bytes} bytes at {address:#x} are registered already, in part at least"
        )


def host_unregister(address: int) -> None:
    """Take `host_register` back.

    Raises:
        OSError: nothing is registered at this address.
    """
    if not torch.ops.softdevice.host_unregister(address):
        raise OSError(f"nothing is registered at {address:#x}")


_fraction = 1.0


def mem_get_info(_: _Device = None) -> tuple[int, int]:
    """The bytes that are not reserved, and all that the device has, as on CUDA."""
    usable_bytes = library.capacity()
    return usable_bytes - torch.accelerator.memory_reserved(), round(usable_bytes / _fraction)


def set_per_process_memory_fraction(fraction: float, _: _Device = None) -> None:
    """Set how much of its memory the device may use, as on CUDA."""
    global _fraction
    total_bytes = library.capacity() / _fraction
    _fraction = fraction
    library.set_capacity(round(fraction * total_bytes))


def get_per_process_memory_fraction(_: _Device = None) -> float:
    """Return how much of its memory the device may use, as on CUDA."""
    return _fraction


# ---- random numbers -----------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    torch.ops.softdevice.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(_: _Device = None) -> Tensor:
    return torch.ops.softdevice.get_rng_state()


def set_rng_state(new_state: Tensor, _: _Device = None) -> None:
    torch.ops.softdevice.set_rng_state(new_state)


# ---- the rest -----------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def _is_in_bad_fork() -> bool:
    return torch.ops.softdevice.is_forked()
