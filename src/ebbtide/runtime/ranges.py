"""Ranges in the user's own profiler, named by what ebbtide does and for which layer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import final

import torch
from torch.profiler import record_function

_NO_RANGE = contextlib.nullcontext()


@final
@dataclass(frozen=True)
class Layer:
    """One call of a module.

    Attributes:
        index: in forward order, from 0.
        name: of the module.
    """

    index: int
    name: str


def profiler_range(
    what: str, layer: Layer | None
) -> contextlib.AbstractContextManager[object | None]:
    """A range such as ``ebbtide::offload 3 blocks.3``, if a profiler is running here."""
    if not torch._C._autograd._profiler_enabled():
        return _NO_RANGE
    name = "" if layer is None else f" {layer.index} {layer.name}"
    return record_function(f"ebbtide::{what}{name}")
