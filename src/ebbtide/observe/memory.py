"""Records what memory holds in each phase of a step, by owner.

A phase is a pass of a layer, or what lies between two passes. Its peak comes from the allocator or
the kernel. What the peak consists of is put together from three sources:

- Saved tensors come and go through the account, which notes each change here.
- Parameters, gradients, optimizer state, inputs and outputs are counted at the begin of each phase.
- What is left is either there when the phase begins, such as what one layer passes to the next, or
  it comes with the running operation: its temporaries, and what it makes.

[Note: the moment of the peak] Nobody tells when within a phase memory was highest. The saved
tensors of the phase are taken as they were when they were most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from ebbtide.devices.device import AbstractEvent, Origin
from ebbtide.observe.owners import TensorOwners
from ebbtide.runtime.events import Owner
from ebbtide.stores.measured_memory import AbstractMemory
from ebbtide.units import format_size, text_block

# ---- What memory held in one step: over time, and at its peak, by owner ----

IDLE: Final = frozenset({Owner.OTHER, Owner.MAPPED})
"""Owners of what was in memory before the step and is none of training's business."""


@final
@dataclass(frozen=True)
class MemorySample:
    """Memory in one phase of a step.

    A phase is a pass of a layer, or what lies between two passes.

    Attributes:
        phase: such as ``"F3"``, ``"B3"``, ``"forward outside layers"``, ``"loss"`` or
            ``"optimizer step"``.
        begin_s: begin of the phase, in seconds since the step began.
        end_s: its end.
        owned: bytes of each owner at the peak of the phase. They add up to ``peak_bytes``.
        peak_bytes: the peak of the phase, as the allocator or the kernel counts it.
    """

    phase: str
    begin_s: float
    end_s: float
    owned: Mapping[Owner, int]
    peak_bytes: int

    @property
    def idle_bytes(self) -> int:
        """Bytes of the peak that were there before the step, without training's own."""
        return sum(self.owned.get(owner, 0) for owner in IDLE)


@final
@dataclass(frozen=True)
class StepMemory:
    """The memory of one step; it prints as a table.

    Attributes:
        counted: what was counted, such as ``"resident memory (RSS) of the process"``.
        samples: the phases of the step in their order.
        peak: index in ``samples`` of the phase in which memory was highest.
        reserved_peak_bytes: the peak of what nobody else could use. It is more than the peak where
            an allocator keeps blocks that were freed.
        counts_freed: whether memory that was freed counts as long as it is not returned to the
            system, as it does in a process's resident memory.
    """

    counted: str
    samples: tuple[MemorySample, ...]
    peak: int
    reserved_peak_bytes: int
    counts_freed: bool = False

    @property
    def peak_bytes(self) -> int:
        """The peak of the step."""
        return self.samples[self.peak].peak_bytes

    def describe_peak(self) -> str:
        """Return the height of the peak above idle memory, its whole height, and its phase."""
        sample = self.samples[self.peak]
        whole, phase = format_size(sample.peak_bytes), sample.phase
        if not sample.idle_bytes:
            return f"{whole}, in {phase}"
        above = format_size(sample.peak_bytes - sample.idle_bytes)
        return f"{above} above idle, {whole} in all, in {phase}"

    def _repr_html_(self) -> str:
        return text_block(str(self))

    def __str__(self) -> str:
        lines = [f"the peak is {self.describe_peak()}; {self.counted}"]
        lines += [f"  {size:>10} {share:>5}  {owner}" for size, share, owner in self._rows()]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return size, share and name of each owner at the peak; what was idle comes last."""
        sample = self.samples[self.peak]
        owners = sorted(sample.owned, key=lambda owner: owner in IDLE)
        return [
            (format_size(size), f"{size / (sample.peak_bytes or 1):.0%}", owner.value)
            for owner in owners
            if (size := sample.owned[owner])
        ]


# ---- Records it while the step runs ----

BEGIN = "forward outside layers"
LOSS = "loss"
BACKWARD = "backward outside layers"
OPTIMIZER = "optimizer step"
BETWEEN = "between steps"
_COUNTED = frozenset({Owner.INPUTS, Owner.OUTPUTS, Owner.REFERENCED})
_AFTER_FORWARD = (LOSS, OPTIMIZER, BETWEEN)


@final
@dataclass(eq=False, slots=True)
class _Phase:
    name: str
    mark: AbstractEvent
    begin_bytes: int
    standing: Mapping[Owner, int]
    changes: list[tuple[Owner, int]] = field(default_factory=list)  # bytes that came, or went
    peak_bytes: int = 0
    reserved_bytes: int = 0
    end: AbstractEvent | None = None


@final
class MemoryLog:
    """Records the phases of one step.

    Args:
        memory: the memory that is measured. Its peak is reset at each begin of a phase. None: only
            saved tensors are counted.
        owners: counts what is not a saved tensor.
        before: the saved tensors of earlier steps that are still there, by owner.
        clock: records an event on the compute stream.
    """

    def __init__(
        self,
        memory: AbstractMemory | None,
        owners: TensorOwners,
        before: Mapping[Owner, int],
        clock: Callable[[], AbstractEvent],
    ) -> None:
        self._memory = memory
        self._owners = owners
        self._before = before
        self._clock = clock
        begin_bytes = self._mapped_bytes = 0
        if memory is not None:
            self._mapped_bytes = memory.mapped_bytes()
            memory.return_freed()  # or a CPU's resident memory would hide what the step takes
            begin_bytes = memory.now_bytes()
            memory.reset_peak()
        self._phase = _Phase(BEGIN, clock(), begin_bytes, owners.count())
        self._phases = [self._phase]

    @property
    def num_phases(self) -> int:
        """Number of phases that have begun."""
        return len(self._phases)

    def change(self, owner: Owner, size_bytes: int, address: int | None = None) -> None:
        """Note bytes that came or left; see `ebbtide.runtime.events.MemoryListener`."""
        changes = self._phase.changes
        changes.append((owner, size_bytes))
        if address is None:
            return
        if size_bytes < 0:
            self._owners.disown(address)
            return
        claimed = self._owners.claim(address)
        if claimed is not None:
            changes.append((claimed[0], -claimed[1]))

    def note_reference(self, storage: torch.UntypedStorage) -> None:
        """Note a storage that has no reader left within ebbtide; the program may hold it still."""
        self._owners.note_storage(Owner.REFERENCED, storage)

    def enter_forward(self) -> None:
        """Note that a forward begins, perhaps within another one or in the middle of a step."""
        name = self._phase.name
        if name in (*_AFTER_FORWARD, BACKWARD) or name.startswith("B"):
            self.enter(BEGIN)

    def leave_forward(self) -> None:
        """Note that the model's forward has ended."""
        self.enter(LOSS)

    def enter_backward(self) -> None:
        """Note that a backward begins to read saved tensors, perhaps those of a layer."""
        if self._phase.name in _AFTER_FORWARD:
            self.enter(BACKWARD)

    def note_values(self, owner: Owner, values: Any) -> None:
        """Note whose the tensors in some values are, from the begin of this phase on."""
        self._owners.note(owner, values)
        self._phase.standing = self._owners.count()

    def enter(self, name: str, mark: AbstractEvent | None = None) -> None:
        """Note that a phase begins, and that the one before it has ended.

        Args:
            name: its name.
            mark: event on the compute stream at its begin; None records one.
        """
        mark = self._clock() if mark is None else mark
        self._close(mark)
        if self._phase.name == LOSS:
            self._owners.recount_gradients()  # the program may have freed them before backward
        begin_bytes = 0 if self._memory is None else self._memory.now_bytes()
        self._phase = _Phase(name, mark, begin_bytes, self._owners.count())
        self._phases.append(self._phase)

    def close(self) -> None:
        """Note that the step has ended, with all that follows it."""
        if self._phase.end is None:
            self._close(self._clock())

    def _close(self, mark: AbstractEvent) -> None:
        phase, memory = self._phase, self._memory
        phase.end = mark
        if memory is not None:
            phase.peak_bytes = memory.peak_bytes()
            phase.reserved_bytes = memory.reserved_peak_bytes()
            memory.reset_peak()

    def saved_after(self) -> dict[Owner, int]:
        """Return the saved tensors that are there at the end, by owner."""
        owned = Counter(self._before)
        for phase in self._phases:
            _carry_over(owned, phase)
        return {owner: size_bytes for owner, size_bytes in owned.items() if size_bytes}

    def freeze(self, origin: Origin, counted: str) -> StepMemory:
        """Return what was recorded. The host waits until the device has finished the step.

        Args:
            origin: the begin of the step, from which times are counted.
            counted: what was counted, in words.
        """
        # What memory held before the step, and none of the model's: libraries, and the rest.
        known_bytes = sum(self._phases[0].standing.values()) + sum(self._before.values())
        idle_bytes = max(0, self._phases[0].begin_bytes - known_bytes)
        mapped_bytes = min(idle_bytes, self._mapped_bytes)
        idle = {Owner.MAPPED: mapped_bytes, Owner.OTHER: idle_bytes - mapped_bytes}
        owned = Counter(self._before)
        samples: list[MemorySample] = []
        for phase in self._phases:
            if phase.end is None:
                break
            most = _most(owned, phase)
            known_bytes = sum(phase.standing.values()) + sum(owned.values()) + idle_bytes
            passed_bytes = max(0, phase.begin_bytes - known_bytes)
            measured = self._memory is not None
            sample = _sample(phase, most, idle, passed_bytes, origin, measured=measured)
            samples.append(sample)
            _carry_over(owned, phase)
        counts_freed = self._memory is not None and self._memory.keeps_freed
        return StepMemory(
            counted=counted,
            samples=tuple(samples),
            peak=_find_peak(samples, counts_freed=counts_freed),
            reserved_peak_bytes=max(phase.reserved_bytes for phase in self._phases),
            counts_freed=counts_freed,
        )


def _find_peak(samples: Sequence[MemorySample], *, counts_freed: bool) -> int:
    """Return the index of the phase with the highest peak.

    Args:
        samples: the phases.
        counts_freed: whether memory that was freed still counts. Then it stays as high as it was in
            the phase before, or seems to rise a little, so the first of nearly equal phases counts.
    """
    most_bytes = max(sample.peak_bytes for sample in samples)
    enough_bytes = 0.99 * most_bytes if counts_freed else most_bytes
    return next(i for i, sample in enumerate(samples) if sample.peak_bytes >= enough_bytes)


def _carry_over(owned: Counter[Owner], phase: _Phase) -> None:
    """Apply the changes of a phase, but for those of owners that are counted in each phase."""
    for owner, size_bytes in phase.changes:
        if owner not in _COUNTED:
            owned[owner] += size_bytes


def _most(before: Counter[Owner], phase: _Phase) -> Counter[Owner]:
    """Return the saved tensors of a phase when they were most; [Note: the moment of the peak]."""
    size_bytes = most_bytes = 0
    at = 0
    for number, (owner, changed_bytes) in enumerate(phase.changes, 1):
        if owner not in _COUNTED:
            size_bytes += changed_bytes
        if size_bytes >= most_bytes:
            most_bytes, at = size_bytes, number
    owned = Counter(before)
    for owner, changed_bytes in phase.changes[:at]:
        owned[owner] += changed_bytes
    return owned


def _sample(
    phase: _Phase,
    saved: Mapping[Owner, int],
    idle: Mapping[Owner, int],
    passed_bytes: int,
    origin: Origin,
    *,
    measured: bool,
) -> MemorySample:
    assert phase.end is not None
    owned = Counter(phase.standing)
    owned.update(saved)
    owned.update(idle)
    known_bytes = sum(owned.values())
    peak_bytes = phase.peak_bytes if measured else known_bytes
    rest_bytes = max(0, peak_bytes - known_bytes)
    owned[Owner.PASSED] = min(passed_bytes, rest_bytes)
    owned[Owner.RUNNING] = rest_bytes - owned[Owner.PASSED]
    # On a CPU pages that were never written are not resident, so less may be there than is known.
    missing_bytes = min(max(0, known_bytes - peak_bytes), owned[Owner.OTHER])
    owned[Owner.OTHER] -= missing_bytes
    begin_s = phase.mark.since(origin)
    return MemorySample(
        phase=phase.name,
        begin_s=begin_s,
        end_s=max(begin_s, phase.end.since(origin)),
        owned={owner: owned[owner] for owner in Owner if owned[owner]},
        peak_bytes=peak_bytes,
    )
