"""Traces of real streams: times from the device's own clock, and the file for Perfetto."""

import json
from pathlib import Path

import pytest
import torch

import ebbtide
from ebbtide import Trace
from gpu_bench import (
    DRY_RUN,
    INFLIGHT,
    OFFLOADED_BYTES,
    SIZE_BYTES,
    STORES,
    TIGHT,
    batch,
    take_step,
    tower,
)


def _trace(device: torch.device, store: str) -> tuple[Trace, ebbtide.StepStats]:
    model, x = tower(device), batch(device)
    with ebbtide.offload(model, activations=TIGHT, store=store, trace=True) as handle:
        for _ in range(2):
            take_step(model, x)
        return handle.trace, handle.stats


@pytest.mark.parametrize("store", STORES)
def test_copies_take_time_in_their_lanes(store: str, device: torch.device) -> None:
    trace, stats = _trace(device, store)
    offloads = [event for event in trace.events if event.what == "offload"]
    reloads = [event for event in trace.events if event.what == "reload"]
    assert {event.lane for event in offloads} == {"disk" if DRY_RUN else "d2h"}
    lanes = {event.lane for event in reloads}
    assert lanes <= ({"disk"} if DRY_RUN else {"h2d", "disk"})
    assert DRY_RUN or "h2d" in lanes
    assert all(event.duration_s > 0 for event in offloads + reloads)
    assert all(event.size_bytes == SIZE_BYTES for event in offloads + reloads)
    assert sum(event.size_bytes for event in offloads) == stats.offloaded_bytes


def test_copies_lie_within_the_step(device: torch.device) -> None:
    """The host's clock and the device's agree: nothing comes back before it has left."""
    trace, _ = _trace(device, "auto")
    passes = [event for event in trace.events if event.what in ("forward", "backward")]
    assert [event.label for event in passes] == [
        *(f"F{number}" for number in range(6)),
        *(f"B{number}" for number in reversed(range(6))),
    ]
    assert all(event.duration_s > 0 for event in passes)
    for number in range(6):
        moved = [event for event in trace.events if event.layer == number]
        left = min(event.begin_s for event in moved if event.what == "offload")
        back = [event.begin_s for event in moved if event.what == "reload"]
        assert passes[number].begin_s <= left <= min(back, default=left)
        assert max(back, default=left) <= passes[11 - number].end_s
    # The last layer's copies down may not have been complete when backward asked for them.
    assert all(any(e.what == "reload" and e.layer == n for e in trace.events) for n in range(5))


def test_saved_as_chrome_json(device: torch.device, tmp_path: Path) -> None:
    trace, _ = _trace(device, "auto")
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads >= ({"compute", "disk"} if DRY_RUN else {"compute", "d2h", "h2d"})
    copies = [event for event in events if event.get("cat") in ("offload", "reload")]
    # Everything goes down, and up again but for what was not gone yet.
    assert len(copies) >= 2 * OFFLOADED_BYTES // SIZE_BYTES - INFLIGHT
    assert all(event["ph"] == "X" and event["dur"] > 0 for event in copies)
