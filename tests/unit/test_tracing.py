"""Traces: the events of a step, what is printed of them, and the file for Perfetto."""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import Trace, TraceEvent

KIB = 1024
ROWS, WIDTH = 256, 64  # one activation is 64 KiB


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(block(), block(), block())


# One activation in flight: all but the last have left when backward begins.
POLICY = ebbtide.ActivationPolicy(min_bytes=32 * KIB, max_inflight_bytes=64 * KIB, rebuild=False)


def offload(net: nn.Module, *, trace: bool = False) -> ebbtide.OffloadHandle:
    return ebbtide.offload(net, activations=POLICY, trace=trace)


def step(net: nn.Module, microbatches: int = 1) -> None:
    losses: list[Tensor] = [
        net(torch.randn(ROWS, WIDTH)).square().mean() for _ in range(microbatches)
    ]
    for loss in losses:
        loss.backward()


def of(trace: Trace, what: str) -> list[TraceEvent]:
    return [event for event in trace.events if event.what == what]


# Traces of real steps


def test_a_backward_that_reads_only_small_tensors_is_known_of() -> None:
    """A budget tells by it a step from a forward whose result was dropped."""
    net = model()
    large = ebbtide.ActivationPolicy(min_bytes=2**30, rebuild=False)
    with ebbtide.offload(net, activations=large, trace=True) as handle:
        for has_backward in (True, False, True):
            loss = net(torch.randn(ROWS, WIDTH)).square().mean()
            if has_backward:
                loss.backward()
            del loss
            gc.collect()
            assert handle.stats.num_saved
            assert handle._engine.had_backward is has_backward


def test_nothing_is_recorded_unless_asked_for() -> None:
    net = model()
    with offload(net) as handle:
        step(net)
        assert handle._engine.transfers.account.recorder is None
        with pytest.raises(ebbtide.PolicyError):
            _ = handle.trace


def test_every_layer_has_its_passes_in_order() -> None:
    net = model()
    with offload(net, trace=True) as handle:
        step(net)
        trace = handle.trace
    assert [event.label for event in of(trace, "forward")] == ["F0", "F1", "F2"]
    assert [event.label for event in of(trace, "backward")] == ["B2", "B1", "B0"]
    assert [event.name for event in of(trace, "forward")] == ["0", "1", "2"]
    passes = of(trace, "forward") + of(trace, "backward")
    for before, after in itertools.pairwise(passes):
        assert before.end_s <= after.begin_s


def test_bytes_agree_with_the_statistics() -> None:
    net = model()
    with offload(net, trace=True) as handle:
        step(net)
        trace, stats = handle.trace, handle.stats
    offloads, reloads = of(trace, "offload"), of(trace, "reload")
    assert sum(event.size_bytes for event in offloads) == stats.offloaded_bytes
    assert sum(event.size_bytes for event in reloads) == stats.reloaded_bytes
    assert len(offloads) == stats.num_offloaded
    # The first block saves its input; every block its output, which the next one saves again.
    assert [event.layer for event in offloads] == [0, 0, 1, 2]
    assert {event.lane for event in offloads + reloads} == {"disk"}
    assert all(event.begin_s <= event.end_s for event in trace.events)
    assert sum(event.duration_s for event in of(trace, "wait")) >= stats.stall_s


def test_microbatches_are_told_apart() -> None:
    net = model()
    with offload(net, trace=True) as handle:
        step(net, microbatches=2)
        labels = [event.label for event in handle.trace.events]
    assert {"F0", "B0", "F0.m1", "B0.m1", "offload 1", "offload 1.m1"} <= set(labels)


def test_only_the_last_step_is_held() -> None:
    net = model()
    with offload(net, trace=True) as handle:
        step(net)
        first = handle.trace
        step(net)
        assert handle.trace is not first
        assert handle.trace is handle.trace
        assert len(of(handle.trace, "forward")) == len(of(first, "forward"))


def test_a_traced_step_leaves_no_graph_behind() -> None:
    net = model()
    with offload(net, trace=True) as handle:
        gc.collect()
        gc.disable()
        try:
            loss = net(torch.randn(ROWS, WIDTH)).mean()
            del loss
            assert handle.inspect().in_flight.saved_tensors == 0
        finally:
            gc.enable()


def test_a_wrapped_forward_can_be_traced() -> None:
    net = model()
    wrapped = ebbtide.wrap_forward_with_offload(net.forward, activations=POLICY, trace=True)
    net.forward = wrapped  # type: ignore[method-assign]
    step(net)
    events = wrapped.handle.trace.events
    assert {event.what for event in events} >= {"offload", "reload"}
    assert {event.layer for event in events} == {None}
    wrapped.handle.detach()


# The file


def test_saved_file_opens_as_trace_events(tmp_path: Path) -> None:
    net = model()
    with offload(net, trace=True) as handle:
        step(net)
        handle.trace.save(tmp_path / "trace.json")
        trace = handle.trace
    document = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in document["traceEvents"] if event["ph"] not in ("M", "C")]
    assert [event["name"] for event in events] == [event.label for event in trace.events]
    for got, expected in zip(events, trace.events, strict=True):
        assert got["ts"] == pytest.approx(expected.begin_s * 1e6)
        assert got["args"]["size_bytes"] == expected.size_bytes
        if got["ph"] == "X":
            assert got["dur"] == pytest.approx(expected.duration_s * 1e6)
        else:
            assert got["ph"] == "i" and expected.what == "release"


def test_overlapping_events_of_a_lane_get_rows_of_their_own(tmp_path: Path) -> None:
    def threads(*spans: tuple[float, float]) -> list[int]:
        events = [TraceEvent("reload", "disk", begin, end) for begin, end in spans]
        Trace(events).save(tmp_path / "trace.json")
        saved = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        rows = [row for row in saved if row["ph"] == "X"]
        first = min(row["tid"] for row in rows)
        return [row["tid"] - first for row in rows]

    assert threads((0, 1), (1, 2)) == [0, 0]  # one after the other
    assert threads((0, 4), (1, 2), (3, 4)) == [0, 0, 0]  # nested
    assert threads((0, 2), (1, 3), (2, 4)) == [0, 1, 0]  # crossing
    assert threads((0, 1), (0, 4)) == [0, 0]  # nested, and begun together
    assert threads((0, 1 + 1e-12), (1, 2)) == [0, 0]  # crossing by rounding alone


# What is printed


def test_a_trace_prints_as_a_table() -> None:
    trace = Trace(
        [
            TraceEvent("forward", "compute", 0.0, 1.0, layer=0),
            TraceEvent("offload", "d2h", 1.0, 2.0, layer=0, size_bytes=3 * 2**20),
            TraceEvent("offload", "d2h", 2.0, 4.0, layer=1, size_bytes=2**20),
        ]
    )
    assert trace.duration_s == 4.0
    lines = str(trace).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["compute", "forward", "1", "0.0", "1.0000", "25%"],
        ["d2h", "offload", "2", "4.0", "3.0000", "75%"],
    ]
    assert max(map(len, lines)) <= 80
