"""Statistics of a step: what it saved, kept, copied and waited for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, final

from ebbtide.devices.device import AbstractEvent, Origin
from ebbtide.interface.notebook import Share, bar, card, table
from ebbtide.units import format_size


@final
@dataclass(frozen=True)
class StepStats:
    """The statistics of one finished step; all fields are zero before the first step ends.

    A step lasts from its first forward until autograd holds none of its saved tensors. Every
    forward that begins before then belongs to it, so two microbatches in flight are one step.

    Attributes:
        saved_bytes: bytes that would move if each saved tensor were copied by itself; a storage
            that several saved tensors share counts several times.
        unique_bytes: bytes of the saved storages, each counted once, without parameters: kept_bytes
            + offloaded_bytes + rebuilt_bytes + packed_bytes + recomputed_bytes.
        parameter_bytes: bytes of saved tensors that are a parameter or buffer, a view of one or its
            cast copy; in a pipeline also the input of a stage, which the stage keeps in any case.
        kept_bytes: unique bytes that stayed on the device.
        offloaded_bytes: unique bytes copied to a lower tier.
        reloaded_bytes: bytes copied back to the device.
        rebuilt_bytes: unique bytes that were neither kept nor offloaded; backward computes them
            again.
        recomputed_bytes: unique bytes that were neither kept nor offloaded, because backward runs
            the forward of their layer again. The layer's inputs are not among them.
        packed_bytes: unique bytes that packing saved before the offload, such as seven eighths of a
            mask.
        weight_reload_bytes: bytes of offloaded weights copied to the device, for forward and for
            backward.
        gradient_bytes: bytes of the gradients of offloaded weights that were copied to the host.
        peak_device_bytes: most bytes of saved tensors on the device at once, including those whose
            copy is in flight and excluding parameters.
        peak_weight_bytes: most bytes of offloaded weights on the device at once.
        peak_host_bytes: most offloaded bytes in the host tier at once.
        peak_disk_bytes: most offloaded bytes in the disk tier at once.
        num_saved: number of saved tensors.
        num_offloaded: number of storages (or gathered views) offloaded.
        late_reloads: number of reloads, of activations or weights, that compute had to wait for.
        stall_s: seconds that compute waited for copies in either direction.
        host_capacity_bytes: host memory taken for the host tier, including offloaded weights and
            their gradients; page-locked if the model is on an accelerator. It is kept from step to
            step and freed on `detach`.
    """

    saved_bytes: int = 0
    unique_bytes: int = 0
    parameter_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    rebuilt_bytes: int = 0
    recomputed_bytes: int = 0
    packed_bytes: int = 0
    weight_reload_bytes: int = 0
    gradient_bytes: int = 0
    peak_device_bytes: int = 0
    peak_weight_bytes: int = 0
    peak_host_bytes: int = 0
    peak_disk_bytes: int = 0
    num_saved: int = 0
    num_offloaded: int = 0
    late_reloads: int = 0
    stall_s: float = 0.0
    host_capacity_bytes: int = 0

    def __str__(self) -> str:
        rows = self._rows()
        return "\n".join(f"{name:<19} {text:>12}  {words}".rstrip() for name, text, words in rows)

    def _repr_html_(self) -> str:
        return card("Statistics of a step", fate_bar(self), table((), self._rows(), numbers=[1]))

    def _rows(self) -> list[tuple[str, str, str]]:
        """Each figure's name, its value with a unit, and what it means."""
        rows = []
        for field in fields(self):
            value = getattr(self, field.name)
            text = format_size(value) if field.name.endswith("_bytes") else f"{value:,}"
            if field.name == "stall_s":
                text = f"{value:.3f} s"
            rows.append((field.name, text, _WORDS.get(field.name, "")))
        return rows


_WORDS: Final = {
    "saved_bytes": "saved by autograd, each saved tensor counted",
    "unique_bytes": "of these, without repeats and parameters",
    "parameter_bytes": "saved parameters and buffers, which stay in any case",
    "kept_bytes": "stayed on the device",
    "offloaded_bytes": "were copied to a lower tier",
    "reloaded_bytes": "came back for backward",
    "rebuilt_bytes": "were computed again in backward instead",
    "recomputed_bytes": "are of layers whose forward ran again in backward",
    "packed_bytes": "were left out by packing masks and indices",
    "weight_reload_bytes": "weights copied to the device",
    "gradient_bytes": "gradients of offloaded weights copied to the host",
    "peak_device_bytes": "most activations on the device at once",
    "peak_weight_bytes": "most offloaded weights on the device at once",
    "peak_host_bytes": "most activations in host memory at once",
    "peak_disk_bytes": "most activations on disk at once",
    "num_saved": "saved tensors",
    "num_offloaded": "copies to a lower tier",
    "late_reloads": "times that compute had to wait for a reload",
    "stall_s": "that compute waited for copies",
    "host_capacity_bytes": "host memory taken, kept for the next step",
}


def fate_bar(stats: StepStats | StepMeter) -> str:
    """Return a bar that shows what became of the bytes that a step saved, each storage once."""
    fates = {
        "keep": (stats.kept_bytes, "kept"),
        "offload": (stats.offloaded_bytes, "offloaded"),
        "rebuild": (stats.rebuilt_bytes, "rebuilt"),
        "recompute": (stats.recomputed_bytes, "recomputed"),
        "other": (stats.packed_bytes, "left out by packing"),
    }
    return bar(
        Share(kind, f"{format_size(size)} {words}", size) for kind, (size, words) in fates.items()
    )


_COUNTED = tuple(
    field.name
    for field in fields(StepStats)
    if field.name not in ("unique_bytes", "late_reloads", "stall_s")
)


@final
class StepMeter:
    """Counts for `StepStats` while a step runs; each counter has the name of its field there.

    Attributes:
        waits: for each wait of compute for a copy: its start, the event of the copy's completion,
            and whether the copy is a reload.
        had_backward: whether a backward has read an activation of the step.
    """

    def __init__(self) -> None:
        self.saved_bytes = 0
        self.parameter_bytes = 0
        self.kept_bytes = 0
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0
        self.rebuilt_bytes = 0
        self.recomputed_bytes = 0
        self.packed_bytes = 0
        self.weight_reload_bytes = 0
        self.gradient_bytes = 0
        self.peak_device_bytes = 0
        self.peak_weight_bytes = 0
        self.peak_host_bytes = 0
        self.peak_disk_bytes = 0
        self.num_saved = 0
        self.num_offloaded = 0
        self.host_capacity_bytes = 0
        self.had_backward = False
        self.waits: list[tuple[Origin, AbstractEvent, bool]] = []

    @property
    def unique_bytes(self) -> int:
        """Bytes of the saved storages, each counted once; see `StepStats`."""
        moved_bytes = self.offloaded_bytes + self.packed_bytes
        return self.kept_bytes + moved_bytes + self.rebuilt_bytes + self.recomputed_bytes

    def freeze(self) -> StepStats:
        """Return the statistics. The host waits until the device has finished the step."""
        late_s = [(event.since(before), is_reload) for before, event, is_reload in self.waits]
        return StepStats(
            **{name: getattr(self, name) for name in _COUNTED},
            unique_bytes=self.unique_bytes,
            late_reloads=sum(is_reload for seconds, is_reload in late_s if seconds > 0),
            stall_s=sum(seconds for seconds, _ in late_s if seconds > 0),
        )
