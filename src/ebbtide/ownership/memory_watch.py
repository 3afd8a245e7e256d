"""Starts a record of memory with each step, and tells it of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch.optim import Optimizer

from ebbtide.devices.device import AbstractEvent, Origin
from ebbtide.memory.measured_memory import AbstractMemory
from ebbtide.ownership.memory_log import BETWEEN, OPTIMIZER, MemoryLog
from ebbtide.ownership.optimizer_steps import listen_to_optimizers
from ebbtide.ownership.tensor_owners import TensorOwners
from ebbtide.tracing.step_memory import StepMemory


@final
class MemoryWatch:
    """Records the memory of one step after another.

    Args:
        make_memory: returns the memory to measure. None: only saved tensors are counted.
        owners: counts what is not a saved tensor.
        settle: notes which saved tensors have died, without waiting.

    Attributes:
        log: the record of the step that runs, or ran last; None before the first.
    """

    def __init__(
        self,
        make_memory: Callable[[], AbstractMemory] | None,
        owners: TensorOwners,
        settle: Callable[[], None],
    ) -> None:
        self._settle = settle
        self._make_memory = make_memory
        self._memory: AbstractMemory | None = None
        self.owners = owners
        self.log: MemoryLog | None = None

    def begin_step(self, clock: Callable[[], AbstractEvent]) -> MemoryLog:
        """Begin the record of a step, and end that of the step before.

        Args:
            clock: records an event on the compute stream.
        """
        before = {}
        if self.log is None:
            self._memory = None if self._make_memory is None else self._make_memory()
            listen_to_optimizers(self)
        else:
            self.log.close()
            before = self.log.saved_after()
        self.owners.begin_step()
        self.log = MemoryLog(self._memory, self.owners, before, clock)
        return self.log

    def freeze(self, log: MemoryLog, origin: Origin) -> StepMemory:
        """Return what a record says. The host waits until the device has finished the step."""
        counted = "saved tensors" if self._memory is None else self._memory.name
        return log.freeze(origin, counted)

    def begin_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.log is not None and self.owners.note_optimizer(optimizer):
            self._settle()
            self.log.enter(OPTIMIZER)

    def end_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.log is not None and self.owners.note_optimizer(optimizer):
            self.owners.count_optimizers()
            self.owners.recount_gradients()
            self.log.enter(BETWEEN)
