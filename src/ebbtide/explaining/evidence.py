"""The figures of a step that its explanation rests on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from ebbtide.ownership.holders import HeldTensor
from ebbtide.policy import ActivationPolicy
from ebbtide.reports.inspection import Inspection
from ebbtide.tracing.step_memory import MemorySample, Owner, StepMemory
from ebbtide.transfers.stats import StepStats

ACTIVATIONS = frozenset(
    {
        *(Owner.KEPT, Owner.LEAVING, Owner.REFERENCED),
        *(Owner.RELOADED, Owner.REBUILT, Owner.RECOMPUTED),
    }
)
"""Owners of bytes that an offloader could have somewhere else."""

TRAINED = frozenset({Owner.PARAMETERS, Owner.GRADIENTS, Owner.OPTIMIZER, Owner.WEIGHTS})
"""Owners of bytes that rest on the host with `WeightPolicy`."""


@final
@dataclass(frozen=True)
class Evidence:
    """What is known of the last finished step, and of the offload.

    Attributes:
        stats: its statistics.
        num_steps: number of finished steps.
        inspection: what became of each storage.
        memory: memory by owner; None if the step was not recorded.
        policy: what was to be offloaded.
        min_bytes: the smallest storage that leaves.
        follows_schedule: whether a schedule says what leaves.
        wanted_again: number of storages that a second backward needs.
        num_unrecorded: number of forwards without grad mode since the offload began.
        replaced_by: what has taken the place of the model's forward; empty if nothing has.
        compiled: names of compiled modules that contain layers.
        on_cpu: whether the model computes in host memory.
        total_bytes: all memory of the device.
        held: tensors that were offloaded and that the program held when backward began.
        offloads_weights: whether weights rest elsewhere.
        plan_keeps_all: whether there is a plan, and it keeps everything.
        plan_peak_bytes: the peak that the plan predicts, if there is one.
    """

    stats: StepStats
    num_steps: int
    inspection: Inspection
    memory: StepMemory | None
    policy: ActivationPolicy
    min_bytes: int
    follows_schedule: bool = False
    wanted_again: int = 0
    num_unrecorded: int = 0
    replaced_by: str = ""
    compiled: tuple[str, ...] = ()
    on_cpu: bool = False
    total_bytes: int = 0
    held: tuple[HeldTensor, ...] = ()
    offloads_weights: bool = False
    plan_keeps_all: bool = False
    plan_peak_bytes: int | None = None

    @property
    def peak(self) -> MemorySample | None:
        """The phase in which memory was highest."""
        return None if self.memory is None else self.memory.samples[self.memory.peak]

    @property
    def own_bytes(self) -> int:
        """The peak without what was there before the step and is none of training's business."""
        peak = self.peak
        return 0 if peak is None else peak.peak_bytes - peak.owned.get(Owner.OTHER, 0)

    def at_peak(self, *owners: Owner) -> int:
        """Return the bytes of some owners at the peak; 0 where it was not recorded."""
        return 0 if self.peak is None else total(self.peak, owners)

    @property
    def small_bytes(self) -> int:
        """Bytes of saved tensors that stay because they are small."""
        kept = (each for each in self.inspection.storages if each.decision == "keep")
        return max(0, self.stats.kept_bytes - sum(each.size_bytes for each in kept))


def total(sample: MemorySample, owners: Iterable[Owner]) -> int:
    """Return the bytes of some owners in a phase."""
    return sum(sample.owned.get(owner, 0) for owner in owners)


def find_limit(evidence: Evidence) -> tuple[int, str] | None:
    """Return the smallest peak that moving activations could reach, and the phase that has it.

    In no phase can memory be lower than all that is not activations. In a layer's backward the
    largest storage that this layer saved must be there, too. Where memory that was freed counts,
    it could have been returned.

    Returns:
        Bytes and the name of the phase; None if the step was not recorded.
    """
    if evidence.memory is None:
        return None
    largest: dict[str, int] = {}
    for each in evidence.inspection.storages:
        name = f"B{each.layer}.m{each.microbatch}" if each.microbatch else f"B{each.layer}"
        largest[name] = max(largest.get(name, 0), each.size_bytes)
    found = []
    for sample in evidence.memory.samples:
        activation_bytes = total(sample, ACTIVATIONS)
        needed_bytes = min(activation_bytes, largest.get(sample.phase, 0))
        movable_bytes = activation_bytes - needed_bytes
        if evidence.memory.counts_freed:
            movable_bytes += sample.owned.get(Owner.PASSED, 0)
        found.append((sample.peak_bytes - movable_bytes, sample.phase))
    return max(found)
