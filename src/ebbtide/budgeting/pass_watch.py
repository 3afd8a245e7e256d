"""Measures the peak of memory in each pass of one step.

[Note: measured passes] Torch tells when a layer's backward begins and not when it ends, so what is
measured as the backward of a layer includes the backward of the work before it, up to the layer
before; the first one of all is in the time between the passes. Each measured peak is compared with
the highest of the positions that it stands for.
"""

from __future__ import annotations

from typing import final

from ebbtide.memory.measured_memory import AbstractMemory
from ebbtide.planning.step_profile import StepProfile


@final
class PassWatch:
    """Measures one step; one of `ebbtide.engine.PassListener`.

    Args:
        memory: the memory that is measured. Its peak is reset at each begin of a pass.
        profile: the step, which says what work there is between layers.

    Attributes:
        begin_bytes: memory in use when the step began.
        peaks: the highest peak of each position of the step, in the numbers of
            `Prediction.peak_by_position`; a position that was not measured alone has none.
        reserved_peak_bytes: the peak of the whole step, of all that nobody else could use.
    """

    def __init__(self, memory: AbstractMemory, profile: StepProfile) -> None:
        self._memory = memory
        self._profile = profile
        self._calls = [index for index, each in enumerate(profile.layers) if not each.between]
        self._loss = len(profile.layers)
        self.peaks: dict[int, int] = {}
        memory.return_freed()
        self.begin_bytes = memory.now_bytes()
        self.reserved_peak_bytes = 0
        memory.reset_peak()
        self._position = 0

    def covered(self, position: int) -> list[int]:
        """Return the positions that a measured one stands for. See [Note: measured passes]."""
        layers, last = self._profile.layers, 2 * self._loss
        if position < self._loss:
            return [position]
        index = last - position if position > self._loss else len(layers)
        before = index - 1
        found = [position]
        if before >= 0 and layers[before].between:
            found.append(last - before)
        return found

    def begin_forward_of(self, layer: int) -> None:
        self._enter(self._calls[layer])

    def end_forward_of(self, layer: int) -> None:
        index = self._calls[layer] + 1
        if index == self._loss or self._profile.layers[index].between:
            self._enter(index)

    def begin_backward_of(self, layer: int) -> None:
        self._enter(2 * self._loss - self._calls[layer])

    def end_forward(self) -> None:
        """Note that the model's forward has ended: the work between the passes begins."""
        self._enter(self._loss)

    def finish(self) -> None:
        """Note that the step has ended."""
        self._enter(self._position)

    @property
    def is_whole(self) -> bool:
        """Whether the forward and the backward of all layers were measured."""
        wanted = {*self._calls, *(2 * self._loss - index for index in self._calls)}
        return wanted <= self.peaks.keys()

    def _enter(self, position: int) -> None:
        peak_bytes = self._memory.peak_bytes()
        self.peaks[self._position] = max(self.peaks.get(self._position, 0), peak_bytes)
        reserved_bytes = self._memory.reserved_peak_bytes()
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, reserved_bytes)
        self._memory.return_freed()  # what is measured is what is in use
        self._memory.reset_peak()
        self._position = position


@final
class PassGuard:
    """Returns freed memory in a step that nobody measures, where there is no room for it.

    Args:
        memory: the memory.
        most_bytes: how much may be in use when a pass begins before freed memory is returned.
    """

    def __init__(self, memory: AbstractMemory, most_bytes: int) -> None:
        self._memory = memory
        self._most_bytes = most_bytes
        self._look()

    def begin_forward_of(self, layer: int) -> None:  # noqa: ARG002
        self._look()

    def end_forward_of(self, layer: int) -> None:
        """Do nothing: another layer's forward begins, or the model's ends."""

    def end_forward(self) -> None:
        self._look()

    def begin_backward_of(self, layer: int) -> None:  # noqa: ARG002
        self._look()

    def _look(self) -> None:
        if self._memory.now_bytes() > self._most_bytes:
            self._memory.return_freed()
