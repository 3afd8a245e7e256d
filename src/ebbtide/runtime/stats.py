"""What a step saved and moved, counted while it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import final

from ebbtide.devices.device import AbstractEvent, Origin
from ebbtide.units import format_size


@final
@dataclass(frozen=True)
class StepStats:
    """One finished step: from its first forward until autograd held nothing of it any more.

    Every forward that begins before the graphs of the step are gone belongs to it, so two
    microbatches in flight are one step. Before the first step has finished all fields are zero.

    Attributes:
        saved_bytes: every save counted, as a copy of each saved tensor would move them.
        unique_bytes: after sharing storages, without parameters: kept_bytes + offloaded_bytes +
            rebuilt_bytes + packed_bytes.
        parameter_bytes: saves that are a parameter or buffer, a view of one or its cast copy; in a
            pipeline also the input of a stage, which the stage keeps whether it is saved or not.
        kept_bytes: unique bytes that stayed on the device.
        offloaded_bytes: unique bytes copied to a lower tier.
        reloaded_bytes: bytes copied back.
        rebuilt_bytes: unique bytes neither kept nor moved: backward computes them again.
        packed_bytes: unique bytes that packing took off what was offloaded: of a mask, seven in
            eight.
        peak_device_bytes: most bytes of saved tensors on the device at once, those of copies under
            way included, parameters excluded.
        peak_host_bytes: most offloaded bytes in the host tier at once.
        peak_disk_bytes: most offloaded bytes in the disk tier at once.
        num_saved: tensors saved.
        num_offloaded: storages (or gathered views) offloaded.
        late_reloads: reloads that compute had to wait for.
        stall_s: seconds that compute waited for copies, down and up.
        host_capacity_bytes: host memory taken for the host tier, page-locked where the model is on
            an accelerator; it is kept from step to step, and given back on `detach`.
    """

    saved_bytes: int = 0
    unique_bytes: int = 0
    parameter_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    rebuilt_bytes: int = 0
    packed_bytes: int = 0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    peak_disk_bytes: int = 0
    num_saved: int = 0
    num_offloaded: int = 0
    late_reloads: int = 0
    stall_s: float = 0.0
    host_capacity_bytes: int = 0

    def __str__(self) -> str:
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            text = format_size(value) if field.name.endswith("_bytes") else f"{value:,}"
            if field.name == "stall_s":
                text = f"{value:.3f} s"
            lines.append(f"{field.name:<19} {text:>12}")
        return "\n".join(lines)


@final
class StepMeter:
    """The counters of the step that is running.

    Attributes:
        waits: where compute began to wait, for what, and whether that was a reload.
    """

    def __init__(self) -> None:
        self.saved_bytes = 0
        self.parameter_bytes = 0
        self.kept_bytes = 0
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0
        self.rebuilt_bytes = 0
        self.packed_bytes = 0
        self.peak_device_bytes = 0
        self.peak_host_bytes = 0
        self.peak_disk_bytes = 0
        self.num_saved = 0
        self.num_offloaded = 0
        self.capacity_bytes = 0
        self.waits: list[tuple[Origin, AbstractEvent, bool]] = []

    def note_offload(self, size_bytes: int, stored_bytes: Mapping[str, int]) -> None:
        """Count an offload, after which the tiers hold ``stored_bytes``."""
        self.num_offloaded += 1
        self.offloaded_bytes += size_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, stored_bytes["host"])
        self.peak_disk_bytes = max(self.peak_disk_bytes, stored_bytes["disk"])

    def freeze(self) -> StepStats:
        """The finished step's figures; waits until the device has come so far."""
        late_s = [(event.since(before), is_reload) for before, event, is_reload in self.waits]
        return StepStats(
            saved_bytes=self.saved_bytes,
            unique_bytes=self.kept_bytes
            + self.offloaded_bytes
            + self.rebuilt_bytes
            + self.packed_bytes,
            parameter_bytes=self.parameter_bytes,
            kept_bytes=self.kept_bytes,
            offloaded_bytes=self.offloaded_bytes,
            reloaded_bytes=self.reloaded_bytes,
            rebuilt_bytes=self.rebuilt_bytes,
            packed_bytes=self.packed_bytes,
            peak_device_bytes=self.peak_device_bytes,
            peak_host_bytes=self.peak_host_bytes,
            peak_disk_bytes=self.peak_disk_bytes,
            num_saved=self.num_saved,
            num_offloaded=self.num_offloaded,
            late_reloads=sum(is_reload for seconds, is_reload in late_s if seconds > 0),
            stall_s=sum(seconds for seconds, _ in late_s if seconds > 0),
            host_capacity_bytes=self.capacity_bytes,
        )
