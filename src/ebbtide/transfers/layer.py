"""Identifies one call of a layer, and names ranges in the user's own profiler after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch.profiler import record_function

Result = TypeVar("Result")

is_profiling = torch._C._autograd._profiler_enabled
"""Whether a profiler runs. Code that runs for every tensor asks before it calls `in_range`."""


@final
@dataclass(frozen=True)
class Layer:
    """One call of a layer's module in a forward.

    Attributes:
        index: number of the call in the forward, from 0.
        name: qualified name of the module.
    """

    index: int
    name: str


def in_range(
    what: str, layer: Layer | None, work: Callable[..., Result], *arguments: Any
) -> Result:
    """Call ``work``, inside a range such as ``ebbtide::offload 3 blocks.3`` if a profiler runs."""
    if not is_profiling():
        return work(*arguments)
    name = "" if layer is None else f" {layer.index} {layer.name}"
    with record_function(f"ebbtide::{what}{name}"):
        return work(*arguments)
