"""Which position of a step each of its parts belongs to."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Final, NamedTuple, TypeVar, final

from ebbtide.planning.profiling.storage_ledger import Part

Value = TypeVar("Value", int, float)

OUTSIDE: Final = -1
"""Index of the layer of what comes before the first and after the last pass."""


class Position(NamedTuple):
    """A position of the step: see [Note: positions] in `planning.step_profile`.

    Attributes:
        backward: whether it comes after the loss.
        layer: index of the layer; `OUTSIDE` for what comes before the first and after the last
            pass, and the number of layers for the loss.
    """

    backward: bool
    layer: int


@final
class StepPositions:
    """Gives the parts of a step their positions.

    Args:
        num_calls: number of calls of layers.
        saving: the parts of the forward that save something.
        between: whether work between layers that saves something is a layer of its own.

    Attributes:
        parts: the parts of the forward that are layers of the profile, in order.
        indices: their numbers.
    """

    def __init__(self, num_calls: int, saving: Container[Part], *, between: bool) -> None:
        self._num_calls = num_calls
        self.parts = list(self._layer_parts(saving if between else ()))
        self.indices = {part: index for index, part in enumerate(self.parts)}

    def _layer_parts(self, saving: Container[Part]) -> Iterator[Part]:
        for index in range(-1, self._num_calls):
            inside = Part(backward=False, layer=index, inside=True)
            if index >= 0:
                yield inside
            after = inside._replace(inside=False)
            if after in saving:
                yield after

    def position(self, part: Part) -> Position:
        """Return the position of a part."""
        index = self.indices.get(part._replace(backward=False))
        if index is None:
            if part.layer == self._num_calls - 1:  # the loss
                return Position(False, len(self.parts))
            around = Part(backward=False, layer=part.layer, inside=True)
            index = self.indices.get(around, OUTSIDE)
        return Position(part.backward, index)

    def gather(
        self, values: Mapping[Part, Value], combine: Callable[[Value, Value], Value]
    ) -> dict[Position, Value]:
        """Return one value for each position that has any, from those of its parts."""
        found: dict[Position, Value] = {}
        for part, value in values.items():
            position = self.position(part)
            found[position] = combine(found[position], value) if position in found else value
        return found

    def passes(self) -> Iterator[Position]:
        """Yield the positions F0, F1, ..., the loss, ..., B1, B0."""
        count = len(self.parts)
        yield from (Position(False, index) for index in range(count + 1))
        yield from (Position(True, index) for index in reversed(range(count)))
