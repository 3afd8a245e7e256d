"""Races provoked: sleeps that let every copy, or every kernel, come late, and NaN in freed memory.

Whatever the engine lets go of too early is NaN before its last reader comes; whatever it reads too
early is not there yet. That this would be seen, the tests of missing waits show.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.devices import AcceleratorDevice, LaneEvent, WorkLane, accelerator
from gpu_bench import (
    DRY_RUN,
    KIB,
    OFFLOADED_BYTES,
    SIZE_BYTES,
    STORES,
    TIGHT,
    assert_at_rest,
    batch,
    can_sleep,
    finish_device,
    mean_square,
    needs_accelerator,
    needs_sleep,
    on_stream,
    orders,
    side_stream,
    take_step,
    tower,
    transfers_of,
)
from zoo import Snapshot, assert_bitwise_equal

SLEEP_CYCLES = 2_000_000  # a millisecond at 2 GHz: a copy of 512 KiB takes some 20 microseconds
SLEEP_S = 0.002
NUM_SPOILT = 32  # tensors of one size at once: more than a step ever frees

# ---- provocation --------------------------------------------------------------------------------


def doze(stream: torch.Stream | None = None) -> None:
    """Queue a kernel that does nothing, for long: on the current stream or another."""
    with on_stream(stream):
        torch.get_device_module()._sleep(SLEEP_CYCLES)


def spoil_free_memory(device: torch.device) -> None:
    """Queue NaN into what the allocator has free for an activation."""
    spoilt = [torch.full((SIZE_BYTES // 4,), math.nan, device=device) for _ in range(NUM_SPOILT)]
    del spoilt


def slow_copies(handle: ebbtide.OffloadHandle) -> None:
    """Let every copy stream sleep before and after each copy, every worker before each job."""
    transfers = transfers_of(handle)
    device = transfers.device
    if isinstance(device, AcceleratorDevice):
        device.copy_down = _sleepy_copy(device.copy_down, device._d2h.stream)
        device.copy_up = _sleepy_copy(device.copy_up, device._h2d.stream)
    stores = (transfers.store, getattr(transfers.store, "_disk", None))
    for store in stores:
        for name in ("_writer", "_reader"):
            lane = getattr(store, name, None)
            if isinstance(lane, WorkLane):
                lane.submit = _sleepy_submit(lane.submit)


def _sleepy_copy(copy: Callable[..., object], stream: torch.Stream) -> Callable[..., object]:
    def sleep_copy_sleep(target: Tensor, source: Tensor, *after: object) -> object:
        doze(stream)
        event = copy(target, source, *after)
        doze(stream)
        return event

    return sleep_copy_sleep


def _sleepy_submit(submit: Callable[..., LaneEvent]) -> Callable[..., LaneEvent]:
    def sleep_and_submit(
        work: Callable[[], None], then: Callable[[], None] | None = None
    ) -> LaneEvent:
        def sleep_and_work() -> None:
            time.sleep(SLEEP_S)
            work()

        return submit(sleep_and_work, then)

    return sleep_and_submit


def provoke(layers: nn.Sequential, *, slow: bool) -> None:
    """Spoil free memory after each layer's forward and before its backward.

    Args:
        layers: to be hooked, for good.
        slow: whether the stream that computes them sleeps first, so that the host runs ahead.
    """

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:  # noqa: ARG001
        if slow:
            doze()

    def after(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001
        spoil_free_memory(output.device)
        output.register_hook(before_backward)

    def before_backward(gradient: Tensor) -> None:
        if slow:
            doze()
        spoil_free_memory(gradient.device)

    for layer in layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)


# ---- what holds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rebuild", [False, True], ids=["moved", "rebuilt"])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("slow", ["copies", "compute", "both"])
def test_late_copies_and_late_kernels(
    slow: str, store: str, rebuild: bool, device: torch.device
) -> None:
    if DRY_RUN and slow != "copies":
        pytest.skip("means nothing on a CPU: its kernels have run when they are queued")
    if not DRY_RUN and not can_sleep(device):
        pytest.skip(f"torch.{device.type} has no _sleep: kernels of this device cannot sleep")
    model = tower(device)
    inputs = [batch(device, seed=seed) for seed in range(3)]
    expected = [take_step(model, x) for x in inputs]
    budget = "3MiB" if store == "tiered" else None  # half of it goes to disk
    provoke(model, slow=slow != "copies")
    policy = replace(TIGHT, rebuild=rebuild)
    with ebbtide.offload(model, activations=policy, store=store, host_budget=budget) as handle:
        if slow != "compute":
            slow_copies(handle)
        for x, plain in zip(inputs, expected, strict=True):
            assert_bitwise_equal(take_step(model, x), plain)
        stats = handle.stats
        assert stats.offloaded_bytes + stats.rebuilt_bytes == OFFLOADED_BYTES
        assert bool(stats.rebuilt_bytes) == rebuild
        assert_at_rest(handle)


@needs_sleep
def test_a_dropped_graph_leaves_its_host_memory_in_order(device: torch.device) -> None:
    """Backward breaks off and abandons reloads; the next forward writes where they still read."""
    model = tower(device)
    x = batch(device, seed=1)
    expected = take_step(model, x)
    provoke(model, slow=False)
    with ebbtide.offload(model, activations=TIGHT) as handle:
        slow_copies(handle)
        for seed in range(5):
            loss = mean_square(model(batch(device, seed=10 + seed)))
            # Only the last layer's gradients: what was prefetched for the others is dropped.
            torch.autograd.grad(loss, list(model[-1].parameters()))
            del loss
            assert_bitwise_equal(take_step(model, x), expected)
        assert_at_rest(handle)


@needs_accelerator
def test_threads_that_copy_at_once_keep_their_streams(device: torch.device) -> None:
    """Backward's thread and the one that reads the disk both queue copies up."""
    copying = AcceleratorDevice(device)
    target = [torch.zeros(64 * KIB, dtype=torch.uint8, device=device) for _ in range(2)]
    source = [torch.full((64 * KIB,), value, dtype=torch.uint8) for value in (1, 2)]
    zeroed = copying.compute_stream().record()  # else a kernel could put zeros over a copy

    def copy_up_often(number: int) -> bool:
        before = torch.accelerator.current_stream(device)
        for _ in range(2000):
            copying.copy_up(target[number], source[number], zeroed)
        return torch.accelerator.current_stream(device) == before

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(copy_up_often, range(2)))
    finally:
        sys.setswitchinterval(interval_s)
    copying.finish_copies()
    assert_bitwise_equal(
        {"0": target[0], "1": target[1]}, {"0": source[0].to(device), "1": source[1].to(device)}
    )


# ---- several compute streams --------------------------------------------------------------------


def _gradients_of(loss: Tensor, model: nn.Module) -> Snapshot:
    found = torch.autograd.grad(loss, list(model.parameters()))
    return {str(number): gradient for number, gradient in enumerate(found)}


@needs_sleep
def test_forwards_on_two_streams(device: torch.device) -> None:
    """The second forward must not give the first one's memory back before it has been copied."""
    model = tower(device)
    inputs = [batch(device, seed=seed) for seed in range(2)]
    expected = [_gradients_of(mean_square(model(x)), model) for x in inputs]
    streams = [side_stream(device) for _ in inputs]
    with ebbtide.offload(model, activations=TIGHT) as handle:
        slow_copies(handle)
        losses = []
        for x, stream in zip(inputs, streams, strict=True):
            with on_stream(stream):
                losses.append(mean_square(model(x)))
        for stream in streams:
            with on_stream(stream):
                spoil_free_memory(device)
        for loss, stream, plain in zip(losses, streams, expected, strict=True):
            with on_stream(stream):
                got = _gradients_of(loss, model)
            finish_device(device)
            assert_bitwise_equal(got, plain)
        del losses, loss
        assert_at_rest(handle)


class Branches(nn.Module):
    """Two towers, layer by layer beside each other, the second on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.second = tower(device), tower(device)
        self.head = tower(device, num_layers=1)
        self.side = torch.Stream(device=device)

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream(x.device)
        self.side.wait_stream(main)
        first = second = x
        for one, other in zip(self.first, self.second, strict=True):
            first = one(first)
            with on_stream(self.side):
                second = other(second)
        main.wait_stream(self.side)
        return self.head(first + second)


@needs_sleep
@pytest.mark.parametrize("late", ["first", "second"])
def test_branches_on_two_streams(late: str, device: torch.device) -> None:
    """What came back for one stream's kernels must not be reused by another before they ran."""
    model, x = Branches(device), batch(device)
    layers = [*model.first, *model.second]
    provoke(model.first, slow=late == "first")
    provoke(model.second, slow=late == "second")
    expected = take_step(model, x)
    assert_bitwise_equal(take_step(model, x), expected)
    for _ in orders(device):
        with ebbtide.offload(model, layers=layers, activations=TIGHT) as handle:
            for _ in range(3):
                got = take_step(model, x)
                finish_device(device)
                assert_bitwise_equal(got, expected)
            assert_at_rest(handle)


class ReadTwice(nn.Module):
    """A GELU's result that two streams read, in forward and so in backward.

    Backward comes to the side stream first, which rebuilds or recomputes the result there, then to
    the main one, then to the side stream again, where freed memory is spoilt.
    """

    def __init__(self, device: torch.device, late: str) -> None:
        super().__init__()
        self.layer, self.late = tower(device, num_layers=1), late
        self.side = torch.Stream(device=device)

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream(x.device)
        hidden = self.layer(x)
        self.side.wait_stream(main)
        with on_stream(self.side):
            last = x.square()
            last.register_hook(lambda _: spoil_free_memory(x.device))
        first = hidden.square()
        with on_stream(self.side):
            second = hidden.square()
            if self.late == "side":
                second.register_hook(lambda _: doze(self.side))
        if self.late == "main":
            first.register_hook(lambda _: doze())
        main.wait_stream(self.side)
        return first + second + last


@needs_sleep
@pytest.mark.parametrize("late", ["side", "main"])
@pytest.mark.parametrize("again", ["rebuilt", "recomputed"])
def test_a_value_computed_again_on_another_stream(
    again: str, late: str, device: torch.device
) -> None:
    """Backward on this stream must not read what the other stream has not computed yet.

    Nor may the other stream use its memory before this one has read it.
    """
    model, x = nn.Sequential(ReadTwice(device, late)), batch(device)
    expected = take_step(model, x)
    policy = replace(TIGHT, rebuild=True)
    if again == "recomputed":
        policy = replace(policy, mode="recompute")
    for _ in orders(device):
        with ebbtide.offload(model, layers=[model[0]], activations=policy) as handle:
            for _ in range(3):
                spoil_free_memory(device)
                got = take_step(model, x)
                finish_device(device)
                assert_bitwise_equal(got, expected)
            stats = handle.stats
            count = {"rebuilt": 1, "recomputed": 2}[again]  # the linear map's result is saved, too
            assert stats.rebuilt_bytes + stats.recomputed_bytes == count * SIZE_BYTES
            assert_at_rest(handle)


# ---- what does not hold -------------------------------------------------------------------------


def _copy_down_at_once(handle: ebbtide.OffloadHandle, patch: pytest.MonkeyPatch) -> None:
    device = transfers_of(handle).device
    copy = device.copy_down
    patch.setattr(device, "copy_down", lambda target, source, *_: copy(target, source))


def _copy_up_at_once(handle: ebbtide.OffloadHandle, patch: pytest.MonkeyPatch) -> None:
    device = transfers_of(handle).device
    copy = device.copy_up
    # The first of the events is the allocation's, the other one the end of the copy down.
    patch.setattr(device, "copy_up", lambda target, source, _, *after: copy(target, source, *after))


def _release_at_once(handle: ebbtide.OffloadHandle, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accelerator._AcceleratorEvent, "query", lambda _: True)
    slow_copies(handle)


def _compute_at_once(handle: ebbtide.OffloadHandle, patch: pytest.MonkeyPatch) -> None:
    wait = accelerator._AcceleratorStream.wait

    def wait_unless_compute(stream: object, event: object) -> None:
        if stream.lane != "compute":
            wait(stream, event)

    patch.setattr(accelerator._AcceleratorStream, "wait", wait_unless_compute)
    slow_copies(handle)


@pytest.mark.parametrize(
    ("break_it", "slow"),
    [
        (_copy_down_at_once, True),
        (_copy_up_at_once, True),
        (_release_at_once, False),
        (_compute_at_once, False),
    ],
)
@needs_sleep
def test_a_missing_wait_is_seen(
    break_it: Callable[[ebbtide.OffloadHandle, pytest.MonkeyPatch], None],
    slow: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shows = [order for order in orders(device) if _differs(break_it, slow, device, monkeypatch)]
    assert shows, "the step was right without the wait"


def _differs(
    break_it: Callable[[ebbtide.OffloadHandle, pytest.MonkeyPatch], None],
    slow: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> bool:
    """Whether a step with a missing wait has other numbers than a plain step."""
    model = tower(device)
    x = batch(device)
    expected = take_step(model, x)
    provoke(model, slow=slow)
    with ebbtide.offload(model, activations=TIGHT, store="host") as handle:
        # The first two steps page-lock memory, for which the host waits. They have other inputs:
        # what they leave in memory must not be right by chance.
        for seed in (1, 2):
            take_step(model, batch(device, seed=seed))
        finish_device(device)
        break_it(handle, monkeypatch)
        got = take_step(model, x)
        finish_device(device)
        monkeypatch.undo()
    try:
        assert_bitwise_equal(got, expected)
    except AssertionError:
        return True
    return False
