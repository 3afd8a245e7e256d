"""What the tests of the device share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

LONG = 20_000_000
"""Cycles: 100 ms in the order "threads"."""
PORTFOLIO = ("threads", "compute-first", "copies-first", *(f"random:{n}" for n in range(8)))
"""Orders of execution, of which one or the other shows a race."""


@contextlib.contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Queue on a stream within the block."""
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def pinned(*sizes: int, fill: float = 0.0) -> Tensor:
    """Page-locked memory of the host."""
    return torch.full(sizes, fill).pin_memory()


def on_the_host(values: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Copies that take no memory of the device."""
    return {name: value if value is None else value.cpu() for name, value in values.items()}
