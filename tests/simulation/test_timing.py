"""Peaks and stalls in virtual time, from arithmetic."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ebbtide import ActivationPolicy, StepStats
from ebbtide.devices import Layer, SimulatedDevice
from ebbtide.stores import PinnedStore
from engine_bench import EngineBench
from loops import BACKWARD_S, FORWARD_S, SIZE_BYTES, Work

FAST = 2 * SIZE_BYTES / FORWARD_S  # bytes/s: a copy takes half a layer's forward
SLOWEST_HIDDEN = FAST / 2  # a forward
SLOW = FAST / 10  # five forwards, two and a half backwards


class Run:
    """A few steps of ``num_layers`` equal layers, of which the first ``offloaded`` leave."""

    def __init__(
        self,
        num_layers: int,
        offloaded: int,
        bandwidth_bytes_per_s: float,
        bound_bytes: int,
        *,
        scales: bool = False,
    ) -> None:
        self.device = SimulatedDevice(0, 0.0, bandwidth_bytes_per_s, timely=True)
        self.store = PinnedStore(self.device, slab_bytes=SIZE_BYTES)
        policy = ActivationPolicy(min_bytes=SIZE_BYTES, rebuild=False)
        self.bench = EngineBench(
            self.device, self.store, bound_bytes, policy, traced=True, scales=scales
        )
        self.num_layers, self.offloaded = num_layers, offloaded
        self.step_s = 0.0

    def step(self) -> Tensor:
        begin_s = self.device.now_s
        torch.manual_seed(0)
        x = torch.randn(SIZE_BYTES // 4, requires_grad=True)
        h = x * 1.0
        hooks, activations = self.bench.hooks, self.bench.activations
        assert hooks.begin()
        for number in range(self.num_layers):
            layer = Layer(number, f"blocks.{number}")
            self.begin_layer(number)
            activations.scopes.begin_layer(layer, offloads=number < self.offloaded)
            h = Work.apply(h, self.device)
            self.end_layer(number, h)
            activations.scopes.end_layer()
        hooks.end()
        h.backward(torch.ones_like(h))
        self.bench.transfers.poll()
        self.step_s = self.device.now_s - begin_s
        assert x.grad is not None
        return x.grad

    def begin_layer(self, number: int) -> None:
        """Called before each layer."""

    def end_layer(self, number: int, output: Tensor) -> None:
        """Called after each layer."""

    def steps(self, count: int = 3) -> StepStats:
        expected = self.plain()
        for _ in range(count):
            assert torch.equal(self.step(), expected)
        return self.bench.stats

    def plain(self) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(SIZE_BYTES // 4, requires_grad=True)
        h = x * 1.0
        for _ in range(self.num_layers):
            h = h.sin()
        h.backward(torch.ones_like(h))
        assert x.grad is not None
        return x.grad


@pytest.mark.parametrize(("num_layers", "offloaded"), [(8, 3), (8, 6), (20, 4), (20, 16)])
def test_peak_is_the_layers_that_stay_plus_what_is_in_flight(
    num_layers: int, offloaded: int
) -> None:
    run = Run(num_layers, offloaded, FAST, bound_bytes=2 * SIZE_BYTES)
    stats = run.steps()
    stay_bytes = (num_layers - offloaded) * SIZE_BYTES
    # At the end of forward all that stays is there. Backward begins, and the reloads of the two
    # layers that the bound allows begin while the last layer's activation still is.
    in_flight_bytes = min(2, offloaded) * SIZE_BYTES
    assert stats.peak_device_bytes == stay_bytes + in_flight_bytes
    assert stats.kept_bytes == stay_bytes
    assert stats.offloaded_bytes == stats.reloaded_bytes == offloaded * SIZE_BYTES
    assert stats.peak_host_bytes == offloaded * SIZE_BYTES


def test_fast_copies_are_never_late() -> None:
    run = Run(20, 16, FAST, bound_bytes=2 * SIZE_BYTES)
    stats = run.steps()
    assert stats.late_reloads == 0
    assert stats.stall_s == 0
    assert run.step_s == pytest.approx(20 * (FORWARD_S + BACKWARD_S))


def test_a_first_step_is_not_late_either() -> None:
    assert Run(20, 16, FAST, bound_bytes=2 * SIZE_BYTES).steps(1).late_reloads == 0


def test_slow_copies_give_the_same_numbers_later() -> None:
    run = Run(20, 16, SLOW, bound_bytes=2 * SIZE_BYTES)
    stats = run.steps()  # compares the gradients
    assert stats.late_reloads > 0
    assert stats.stall_s == pytest.approx(run.step_s - 20 * (FORWARD_S + BACKWARD_S))
    waits = [event for event in run.bench.recording.trace.events if event.what == "wait"]
    assert sum(event.duration_s for event in waits) == pytest.approx(stats.stall_s)
    # The link is never faster than its bandwidth: 16 layers down, then 16 up.
    assert run.step_s > 16 * SIZE_BYTES / SLOW


@pytest.mark.parametrize("tensors", [1, 2, 5])
def test_what_is_in_flight_stays_within_the_bound_however_slow_the_link(tensors: int) -> None:
    stats = Run(12, 12, SLOW, bound_bytes=tensors * SIZE_BYTES).steps()
    # The bound holds each way; when backward begins, the last offloads are still on their way.
    assert tensors * SIZE_BYTES <= stats.peak_device_bytes <= 2 * tensors * SIZE_BYTES


@pytest.mark.parametrize(("num_layers", "in_flight"), [(20, 5), (8, 3)])
def test_a_bound_that_scales_saves_memory_in_a_small_model_and_costs_no_time(
    num_layers: int, in_flight: int
) -> None:
    run = Run(num_layers, num_layers, SLOWEST_HIDDEN, bound_bytes=2**30, scales=True)
    first, second = run.steps(1), run.steps(1)
    # A copy down takes a forward, so hardly anything is on its way; then all comes back at once.
    assert first.peak_device_bytes == num_layers * SIZE_BYTES
    # A quarter of what the step moves, or else three tensors, as reloads; and the last copy down.
    assert second.peak_device_bytes <= (in_flight + 1) * SIZE_BYTES
    # What backward reads first is still there, or comes back while it waits, once.
    assert second.stall_s <= first.stall_s
    assert run.step_s == pytest.approx(num_layers * (FORWARD_S + BACKWARD_S))


def test_a_bound_that_scales_grows_with_larger_steps_up_to_the_setting() -> None:
    run = Run(8, 8, FAST, bound_bytes=6 * SIZE_BYTES, scales=True)
    bounds = []
    for num_layers in (8, 16, 4, 40, 4):
        run.num_layers = run.offloaded = num_layers
        run.steps(1)
        bounds.append(run.bench.transfers.reloads.bound_bytes // SIZE_BYTES)
    assert bounds == [3, 4, 4, 6, 6]  # three at least; a quarter of the largest; the setting


def test_lanes_overlap_compute() -> None:
    run = Run(20, 16, FAST, bound_bytes=2 * SIZE_BYTES)
    run.steps()
    trace = run.bench.recording.trace
    copies = [event for event in trace.events if event.what in ("offload", "reload")]
    assert len(copies) == 2 * 16
    assert {event.lane for event in copies} == {"d2h", "h2d"}
    assert all(event.duration_s == pytest.approx(SIZE_BYTES / FAST) for event in copies)
    assert all(event.duration_s == 0 for event in trace.events if event.what == "wait")


def test_the_users_profiler_shows_ranges_named_by_layer() -> None:
    run = Run(6, 4, FAST, bound_bytes=2 * SIZE_BYTES)
    run.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run.step()
    names = {event.key for event in profiler.key_averages() if event.key.startswith("ebbtide")}
    whats = ("offload", "release", "reload", "wait")
    assert names == {f"ebbtide::{what} {i} blocks.{i}" for what in whats for i in range(4)}


def test_a_copys_target_is_poisoned_until_the_copy_has_run() -> None:
    """Also where it holds values that were copied before."""
    device = SimulatedDevice(0, eagerness=0.0)
    target = device.allocate(16).zero_()
    source = torch.arange(16, dtype=torch.uint8)
    copied = device.copy_up(target, source, device.compute_stream().record())
    assert target.eq(0xFF).all()
    copied.synchronize()
    assert torch.equal(target, source)
