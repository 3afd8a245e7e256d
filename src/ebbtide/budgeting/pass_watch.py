"""Measures the peak of memory in each pass of one step, or guards it.

[Note: measured passes] Torch tells when a layer's backward begins and not when it ends, so what is
measured as the backward of a layer includes the backward of the work before it, up to the layer
before; the first one of all is in the time between the passes. Each measured peak is compared with
the highest of the positions that it stands for.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import final

from ebbtide.memory.measured_memory import AbstractMemory
from ebbtide.planning.step_profile import StepProfile


class AbstractPasses(abc.ABC):
    """Follows the passes of one step; one of `ebbtide.engine.PassListener`.

    Args:
        profile: the step, which says what work there is between layers.
    """

    def __init__(self, profile: StepProfile) -> None:
        self._profile = profile
        self._calls = [index for index, each in enumerate(profile.layers) if not each.between]
        self._loss = len(profile.layers)

    @abc.abstractmethod
    def _enter(self, position: int) -> None:
        """Note that a position begins, in the numbers of `Prediction.peak_by_position`."""

    def begin_forward_of(self, layer: int) -> None:
        if layer < len(self._calls):  # a model may call its layers more often than in other steps
            self._enter(self._calls[layer])

    def end_forward_of(self, layer: int) -> None:
        index = self._calls[layer] + 1 if layer < len(self._calls) else 0
        if index and (index == self._loss or self._profile.layers[index].between):
            self._enter(index)

    def begin_backward_of(self, layer: int) -> None:
        if layer < len(self._calls):
            self._enter(2 * self._loss - self._calls[layer])

    def end_forward(self) -> None:
        """Note that the model's forward has ended: the work between the passes begins."""
        self._enter(self._loss)


@final
class PassWatch(AbstractPasses):
    """Measures one step.

    Args:
        memory: the memory that is measured. Its peak is reset at each begin of a pass.
        profile: the step.
        finish_copies: waits for the copies that are under way; called at each begin of a pass. None
            where the host sees how far they are.

    Attributes:
        begin_bytes: memory in use when the step began.
        peaks: the highest peak of each position of the step, in the numbers of
            `Prediction.peak_by_position`; a position that was not measured alone has none.
        growth: by how much memory grew in each of these positions.
        reserved_peak_bytes: the peak of the whole step, of all that nobody else could use.
    """

    def __init__(
        self,
        memory: AbstractMemory,
        profile: StepProfile,
        finish_copies: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(profile)
        self._memory = memory
        self._finish_copies = finish_copies or (lambda: None)
        self.peaks: dict[int, int] = {}
        self.growth: dict[int, int] = {}
        self._finish_copies()
        memory.reuse_freed(False)
        memory.return_freed()
        self.begin_bytes = self._entered_bytes = memory.now_bytes()
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
        grown_bytes = peak_bytes - self._entered_bytes
        self.growth[self._position] = max(self.growth.get(self._position, 0), grown_bytes)
        reserved_bytes = self._memory.reserved_peak_bytes()
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, reserved_bytes)
        self._finish_copies()
        self._memory.return_freed()  # what is measured is what is in use
        self._entered_bytes = self._memory.now_bytes()
        self._memory.reset_peak()
        self._position = position


@final
class PassGuard(AbstractPasses):
    """Returns freed memory at the begin of a pass that would not fit into a limit otherwise.

    Returning memory costs time twice, now and when the memory is needed again. So it stays where
    the limit leaves room for it.

    Args:
        memory: the memory.
        profile: the step.
        limit_bytes: how much may be in use.
        growth: by how much memory grows in each position. One that is not there is taken to grow
            like the one that grows most.
        times: freed memory stays in a pass that could grow this many times as much. What a pass
            frees may not be reused by it.
    """

    def __init__(
        self,
        memory: AbstractMemory,
        profile: StepProfile,
        limit_bytes: int,
        growth: Mapping[int, int],
        times: float,
    ) -> None:
        super().__init__(profile)
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._times = times
        self._growth = growth
        self._most_bytes = max(growth.values(), default=0)
        self._enter(0)

    def has_room(self) -> bool:
        """Whether freed memory may stay in the pass that runs.

        A pass may have less in use than when it began and still be before its peak.
        """
        growth_bytes = self._growth.get(self._position, self._most_bytes)
        from_bytes = max(self._memory.now_bytes(), self._entered_bytes)
        return from_bytes + self._times * growth_bytes <= self._limit_bytes

    def _enter(self, position: int) -> None:
        self._position, self._entered_bytes = position, 0
        has_room = self.has_room()
        self._memory.reuse_freed(has_room)  # see [Note: blocks of their own] in `huge_pages`
        if not has_room:
            self._memory.return_freed()
        self._entered_bytes = self._memory.now_bytes()
