"""What `StepTiming` predicts is what the engine does in virtual time."""

from __future__ import annotations

import dataclasses
import random

import pytest
from torch import Tensor

from ebbtide import ActivationPolicy
from ebbtide.planning import (
    Decision,
    Hardware,
    LayerPlan,
    LayerProfile,
    Plan,
    SavedStorage,
    StepProfile,
    StepTiming,
    StorageUses,
    offload_first,
    open_windows,
    place,
)
from ebbtide.runtime.stats import watch_nodes
from engine_bench import EngineBench
from loops import BACKWARD_S, FORWARD_S, SIZE_BYTES
from test_timing import FAST, Run

LAYER = LayerProfile(
    name="",
    forward_s=FORWARD_S,
    backward_s=BACKWARD_S,
    storages=(SavedStorage(number=0, size_bytes=SIZE_BYTES),),
)


class PlannedRun(Run):
    """A step whose layers follow a plan, each for the one storage that it saves."""

    def __init__(self, plan: Plan, bandwidth_bytes_per_s: float) -> None:
        super().__init__(
            len(plan.layers), len(plan.layers), bandwidth_bytes_per_s, plan.max_inflight_bytes
        )
        profile = StepProfile(layers=(LAYER,) * len(plan.layers))
        placed = place(profile, plan)
        self.windows = placed.windows
        self.bench = EngineBench(
            self.device,
            self.store,
            plan.max_inflight_bytes,
            ActivationPolicy(min_bytes=SIZE_BYTES, rebuild=False),
            plan=placed.decisions,
            traced=True,
        )
        self.bench.transfers.bound(plan.max_inflight_bytes, self.windows)

    def begin_layer(self, number: int) -> None:
        if self.windows is None:
            return
        if not number:
            self.windows.begin_forward(self.bench.activations)
        self.windows.begin_forward_of(number, self.bench.activations)

    def end_layer(self, number: int, output: Tensor) -> None:
        windows, activations = self.windows, self.bench.activations
        if windows is None:
            return
        log = activations.scopes.current.forward
        windows.end_forward_of(number, activations)
        watch_nodes([output], lambda _: windows.begin_backward_of(number, activations, log))
        if number + 1 == self.num_layers:
            windows.end_forward(activations)


def make_hardware(bytes_per_s: float) -> Hardware:
    figures = {
        "device_memory_bytes": 10**12,
        "device_memory_bytes_per_s": 1e12,
        "matmul_fp32_flops": 1e12,
        "h2d_bytes_per_s": bytes_per_s,
        "d2h_bytes_per_s": bytes_per_s,
        "duplex_bytes_per_s": 2 * bytes_per_s,  # the simulated link is full duplex
        "link_latency_s": 0.0,
        "host_memory_bytes": 10**12,
        "pinned_limit_bytes": 10**12,
    }
    sources = dict.fromkeys(figures, "assumed: simulated")
    return Hardware(name="simulated", sources=sources, **figures)


@pytest.mark.parametrize(("num_layers", "offloaded"), [(8, 3), (8, 8), (12, 9), (20, 16)])
@pytest.mark.parametrize("tensors", [0, 1, 2, 4])
@pytest.mark.parametrize("speed", [2.0, 1.0, 0.5, 0.35, 0.175, 0.05])
def test_the_engine_takes_the_predicted_time_and_memory(
    num_layers: int, offloaded: int, tensors: int, speed: float
) -> None:
    bound_bytes = tensors * SIZE_BYTES
    run = Run(num_layers, offloaded, speed * FAST, bound_bytes)
    # The first step. Later ones begin with the copies that the step before has left under way.
    run.step()
    profile = StepProfile(layers=(LAYER,) * num_layers)
    plan = dataclasses.replace(offload_first(profile, offloaded), max_inflight_bytes=bound_bytes)
    got = StepTiming(profile, make_hardware(speed * FAST)).predict(plan)
    assert got.step_s == pytest.approx(run.step_s)
    assert got.exposed_copy_s == pytest.approx(run.bench.stats.stall_s)
    assert got.peak_bytes == run.bench.stats.peak_device_bytes
    assert got.host_peak_bytes == run.bench.stats.peak_host_bytes


@pytest.mark.parametrize("windows", ["none", "any", "opened"])
@pytest.mark.parametrize("seed", range(120))
def test_any_plan_takes_the_predicted_time_and_memory(seed: int, windows: str) -> None:
    rng = random.Random(seed)
    layers = tuple(
        LayerPlan(decisions=(rng.choice([Decision.KEEP, Decision.OFFLOAD]),))
        for _ in range(rng.randint(2, 14))
    )
    plan = Plan(layers=layers, max_inflight_bytes=rng.randint(0, 4) * SIZE_BYTES)
    speed = rng.choice([2.0, 1.0, 0.5, 0.35, 0.175, 0.05]) * FAST
    if windows == "any":
        sizes = tuple(rng.randint(0, 4) * SIZE_BYTES for _ in range(2 * len(layers) + 1))
        plan = dataclasses.replace(plan, windows=sizes)
    elif windows == "opened":
        profile = StepProfile(layers=(LAYER,) * len(layers))
        closed = dataclasses.replace(plan, windows=(0,) * (2 * len(layers) + 1))
        timing = StepTiming(profile, make_hardware(speed))
        peaks = timing.predict(closed).peak_by_position
        budget_bytes = max(peaks) + rng.randint(0, 4) * SIZE_BYTES
        plan = open_windows(plan, profile, StorageUses(profile), peaks, budget_bytes)
        assert timing.predict(plan).peak_bytes <= budget_bytes
    run = PlannedRun(plan, speed)
    run.step()
    got = StepTiming(StepProfile(layers=(LAYER,) * len(layers)), make_hardware(speed)).predict(plan)
    assert got.step_s == pytest.approx(run.step_s)
    if windows == "any":  # a layer saves at its end, and is predicted to from its begin
        assert got.peak_bytes >= run.bench.stats.peak_device_bytes
    else:
        assert got.peak_bytes == run.bench.stats.peak_device_bytes
    assert got.host_peak_bytes == run.bench.stats.peak_host_bytes
    assert run.bench.stats.offloaded_bytes == SIZE_BYTES * sum(
        layer.decisions == (Decision.OFFLOAD,) for layer in layers
    )
