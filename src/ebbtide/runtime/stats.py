"""What a step saved and moved, counted while it ran."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import final

from ebbtide.units import format_size


@final
@dataclass(frozen=True)
class StepStats:
    """One finished step: from its first forward until autograd held nothing of it any more.

    Every forward that begins before the graphs of the step are gone belongs to it, so two
    microbatches in flight are one step. Before the first step has finished all fields are zero.

    Attributes:
        saved_bytes: every save counted, as a copy of each saved tensor would move them.
        unique_bytes: after sharing storages, without parameters: kept_bytes + offloaded_bytes.
        parameter_bytes: saves that are a parameter or buffer, a view of one or its cast copy.
        kept_bytes: unique bytes that stayed on the device.
        offloaded_bytes: unique bytes copied to a lower tier.
        reloaded_bytes: bytes copied back.
        peak_device_bytes: most bytes of saved tensors on the device at once, those of copies under
            way included, parameters excluded.
        peak_host_bytes: most offloaded bytes in the host tier at once.
        peak_disk_bytes: most offloaded bytes in the disk tier at once.
        num_saved: tensors saved.
        num_offloaded: storages (or gathered views) offloaded.
        late_reloads: reloads that were not complete when backward asked for them.
        stall_s: host seconds spent waiting for copies.
    """

    saved_bytes: int = 0
    unique_bytes: int = 0
    parameter_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    peak_disk_bytes: int = 0
    num_saved: int = 0
    num_offloaded: int = 0
    late_reloads: int = 0
    stall_s: float = 0.0

    def __str__(self) -> str:
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            text = format_size(value) if field.name.endswith("_bytes") else f"{value:,}"
            if field.name == "stall_s":
                text = f"{value:.3f} s"
            lines.append(f"{field.name:<18} {text:>12}")
        return "\n".join(lines)


@final
class StepMeter:
    """The counters of the step that is running."""

    def __init__(self) -> None:
        self.saved_bytes = 0
        self.parameter_bytes = 0
        self.kept_bytes = 0
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0
        self.peak_device_bytes = 0
        self.peak_stored_bytes = 0
        self.num_saved = 0
        self.num_offloaded = 0
        self.late_reloads = 0
        self.stall_s = 0.0

    def freeze(self, tier: str) -> StepStats:
        """The finished step's figures. ``tier``: where the store keeps bytes, `host` or `disk`."""
        return StepStats(
            saved_bytes=self.saved_bytes,
            unique_bytes=self.kept_bytes + self.offloaded_bytes,
            parameter_bytes=self.parameter_bytes,
            kept_bytes=self.kept_bytes,
            offloaded_bytes=self.offloaded_bytes,
            reloaded_bytes=self.reloaded_bytes,
            peak_device_bytes=self.peak_device_bytes,
            peak_host_bytes=self.peak_stored_bytes if tier == "host" else 0,
            peak_disk_bytes=self.peak_stored_bytes if tier == "disk" else 0,
            num_saved=self.num_saved,
            num_offloaded=self.num_offloaded,
            late_reloads=self.late_reloads,
            stall_s=self.stall_s,
        )
