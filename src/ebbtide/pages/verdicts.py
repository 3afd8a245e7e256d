"""The sentence that sums up a run for which nobody has made one."""

from __future__ import annotations

from ebbtide.pages.run_record import RunRecord
from ebbtide.units import format_size


def verdict_of(record: RunRecord) -> str:
    """Return the verdict of a record, or a sentence about the figures that it has."""
    if record.verdict:
        return record.verdict
    stats = record.stats
    if record.peak_bytes is not None:
        return _peak(record)
    if stats is not None and stats.num_saved:
        gone = stats.unique_bytes - stats.kept_bytes
        share = gone / (stats.unique_bytes or 1)
        return (
            f"{share:.0%} of what autograd saved left the device: {format_size(gone)} of "
            f"{format_size(stats.unique_bytes)}."
        )
    if record.events:
        return f"The step took {write_seconds(record.step_s or 0.0)}."
    return "No step has been recorded yet."


def _peak(record: RunRecord) -> str:
    memory = record.memory
    if memory is None:
        return f"Memory peaked at {format_size(record.peak_bytes or 0)}."
    owned = memory.samples[memory.peak].owned
    most = max(owned, key=lambda owner: owned[owner], default=None)
    words = f"Memory peaked at {format_size(memory.peak_bytes)} in {memory.peak_phase}"
    if most is None:
        return f"{words}."
    return f"{words}; the largest part of it, {format_size(owned[most])}, is {most.value}."


def describe_moves(record: RunRecord) -> str:
    """Return a sentence on what became of saved bytes; empty if nothing was saved."""
    stats = record.stats
    if stats is None or not stats.num_saved:
        return ""
    parts = [
        (stats.offloaded_bytes, "was offloaded"),
        (stats.rebuilt_bytes, "was rebuilt"),
        (stats.recomputed_bytes, "was recomputed"),
        (stats.packed_bytes, "was left out by packing"),
        (stats.kept_bytes, "stayed"),
    ]
    done = ", ".join(f"{format_size(size)} {what}" for size, what in parts if size)
    waited = (
        f"compute waited {write_seconds(stats.stall_s)} for copies"
        if stats.stall_s
        else "compute did not wait for copies"
    )
    saved = f"Of {format_size(stats.unique_bytes)} that autograd saved, "
    return f"{saved}{done or 'nothing was moved'}; {waited}."


def write_seconds(seconds: float) -> str:
    """Format seconds for people, such as 0.0123 as ``"12.3 ms"``."""
    for unit, per_s in (("s", 1.0), ("ms", 1e3)):
        if seconds * per_s >= 1:
            return f"{seconds * per_s:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0 s"
