"""What a study is about: a model, its batch and its loss, at any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch import Tensor, nn


class Task(NamedTuple):
    """One training step.

    Attributes:
        model: the model, on the meta device or on the CPU.
        batch: what it is called with.
        loss: computes the loss from what it returns; None: see `profile_with_fake_tensors`.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None = None


class Size(NamedTuple):
    """How large a step is.

    Attributes:
        length: points along each side of a grid, or tokens of a sequence; None if the task has no
            such number.
        batch: samples; None if the task has no such number.
    """

    length: int | None
    batch: int | None


@final
@dataclass(frozen=True, kw_only=True)
class TaskFamily:
    """A training step at all its sizes.

    Args:
        title: what it is, for people.
        build: makes the task of a size.
        size: the size that was asked for.
        length_name: ``"resolution"`` or ``"sequence"``; "" if the length is None.
        dimensions: dimensions of the grid; 1 for sequences; 0 if not known.
        length_step: the sizes that count are multiples of this.
        num_blocks: number of equal blocks in the middle of the model, if `build_short` is given.
        build_short: makes the task with fewer blocks than it has; None if it cannot.
    """

    title: str
    build: Callable[[Size], Task]
    size: Size
    length_name: str = ""
    dimensions: int = 1
    length_step: int = 1
    num_blocks: int = 0
    build_short: Callable[[Size, int], Task] | None = None

    def describe(self, size: Size) -> str:
        """Return a size in words, such as ``"512 x 512, batch 8"``."""
        parts = []
        if size.length is not None:
            parts.append(self.describe_length(size.length))
        if size.batch is not None:
            parts.append(f"batch {size.batch}")
        return ", ".join(parts)

    def describe_length(self, length: int) -> str:
        """Return a length in words, such as ``"512 x 512"``."""
        if self.length_name == "sequence":
            return f"{length} tokens"
        if not self.dimensions:
            return f"resolution {length}"
        return (
            f"{length} points"
            if self.dimensions == 1
            else " x ".join([str(length)] * self.dimensions)
        )
