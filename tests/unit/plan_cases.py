"""Steps and machines to plan for, and every plan that there is for a short step."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from hypothesis import strategies as st
from torch import nn

from ebbtide.planning import (
    Decision,
    Hardware,
    LayerMode,
    LayerPlan,
    LayerProfile,
    Plan,
    PlannedStep,
    SavedStorage,
    StepProfile,
    StepTiming,
    StorageId,
)
from ebbtide.planning.contest import inflight_choices
from ebbtide.runtime.layers import find_layers
from ebbtide.tools.fake_profile import profile_with_fake_tensors

MB = 10**6


def make_link(
    down_mb_per_s: float,
    up_mb_per_s: float | None = None,
    both_mb_per_s: float | None = None,
    latency_s: float = 0.0,
    computes_on_host: bool = False,
    copy_cost_s_per_mb: float | None = None,
) -> Hardware:
    """A machine whose link has these bandwidths; nothing else of it matters here."""
    up = down_mb_per_s if up_mb_per_s is None else up_mb_per_s
    both = down_mb_per_s + up if both_mb_per_s is None else both_mb_per_s
    figures = {
        "device_memory_bytes": 10**12,
        "device_memory_bytes_per_s": 1e12,
        "matmul_fp32_flops": 1e12,
        "h2d_bytes_per_s": up * MB,
        "d2h_bytes_per_s": down_mb_per_s * MB,
        "duplex_bytes_per_s": both * MB,
        "link_latency_s": latency_s,
        "host_memory_bytes": 10**12,
        "pinned_limit_bytes": 10**12,
    }
    if copy_cost_s_per_mb is not None:
        figures["copy_cost_s_per_byte"] = copy_cost_s_per_mb / MB
    sources = dict.fromkeys(figures, "assumed: made up")
    return Hardware(name="made up", computes_on_host=computes_on_host, sources=sources, **figures)


def make_layer(
    *sizes_mb: int, forward_s: float = 1.0, backward_s: float = 2.0, **more
) -> LayerProfile:
    """A layer that saves storages of these sizes."""
    storages = tuple(
        SavedStorage(number=number, size_bytes=size * MB) for number, size in enumerate(sizes_mb)
    )
    layer = LayerProfile(name="", forward_s=forward_s, backward_s=backward_s, storages=storages)
    return dataclasses.replace(layer, **more)


def uneven_chain(seed: int, count: int) -> StepProfile:
    """Layers with one storage each, of different sizes and times, that share nothing."""
    choose = random.Random(seed)
    return make_profile(
        *(
            make_layer(
                choose.randint(10, 100),
                forward_s=choose.uniform(0.5, 5),
                backward_s=choose.uniform(1, 10),
                input_bytes=choose.randint(1, 20) * MB,
                forward_working_bytes=choose.randint(0, 10) * MB,
                backward_working_bytes=choose.randint(0, 20) * MB,
            )
            for _ in range(count)
        )
    )


def make_profile(*layers: LayerProfile, **more) -> StepProfile:
    return StepProfile(layers=layers, **more)


def fake_profile(
    model: nn.Module,
    batch: Any,
    hardware: Hardware,
    *,
    layers: Iterable[nn.Module] | None = None,
    min_bytes: int = 1,
    **more: Any,
) -> StepProfile:
    """The profile of a step that is not run. Layers are those that ebbtide finds by itself."""
    chosen = {*(find_layers(model).modules if layers is None else layers)}
    names = [name for name, module in model.named_modules() if module in chosen]
    return profile_with_fake_tensors(
        model, batch, hardware, layers=names, min_bytes=min_bytes, **more
    )


def engine_name_of(
    profile: StepProfile, plan: Plan | None = None
) -> dict[StorageId, tuple[int | None, int]]:
    """By its name in a profile, the layer and number by which the engine knows a storage first.

    What a recomputed layer's input is saved as, which has no name in a plan, is left out.
    """
    names: dict[StorageId, tuple[int | None, int]] = {}
    inputs: set[StorageId | None] = set()
    calls = outside = 0
    for index, layer in enumerate(profile.layers):
        call, first = (None, outside) if layer.between else (calls, 0)
        if plan is not None and plan.layers[index].mode is not LayerMode.AS_IS:
            inputs.add(layer.input_same_as)
        else:
            for each in layer.storages:
                name = each.same_as or StorageId(index, each.number)
                if name not in inputs:
                    names.setdefault(name, (call, first + each.number))
        calls += not layer.between
        outside += len(layer.storages) if layer.between else 0
    return names


# ---- generated cases -----------------------------------------------------------------------------


@st.composite
def links(draw: st.DrawFn) -> Hardware:
    down, up = draw(st.sampled_from([2, 10, 40, 200])), draw(st.sampled_from([2, 10, 40, 200]))
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    both = max(down, up) + share * min(down, up)
    latency_s = draw(st.sampled_from([0.0, 0.05]))
    cost = draw(st.sampled_from([None, None, 0.01, 0.1]))
    return make_link(down, up, both, latency_s, copy_cost_s_per_mb=cost)


@st.composite
def profiles(draw: st.DrawFn, most_layers: int = 5, most_storages: int = 2) -> StepProfile:
    """Chains whose layers share storages, rebuild some, and cannot always be recomputed."""
    count = draw(st.integers(1, most_layers))
    layers: list[LayerProfile] = []
    firsts: list[StorageId] = []
    sizes: dict[StorageId, int] = {}
    for index in range(count):
        storages = []
        for number in range(draw(st.integers(0, most_storages))):
            storage, first = _draw_storage(draw, StorageId(index, number), firsts, sizes)
            storages.append(storage)
            if first:
                firsts.append(StorageId(index, number))
                sizes[StorageId(index, number)] = storage.size_bytes
        same_as = draw(st.sampled_from([None, None, *firsts[-2:]]))
        input_bytes = draw(st.integers(0, 20)) * MB if same_as is None else sizes[same_as]
        layers.append(
            LayerProfile(
                name=f"layers.{index}",
                forward_s=draw(st.sampled_from([0.5, 1.0, 3.0])),
                backward_s=draw(st.sampled_from([1.0, 2.0, 5.0])),
                forward_working_bytes=draw(st.integers(0, 10)) * MB,
                backward_working_bytes=draw(st.integers(0, 10)) * MB,
                input_bytes=input_bytes,
                input_same_as=same_as,
                storages=tuple(storages),
                may_recompute=draw(st.sampled_from([True, True, True, False])),
                recompute_s=draw(st.sampled_from([None, 0.2, 2.0])),
                unsaved_forward_bytes=draw(st.sampled_from([None, 5 * MB])),
            )
        )
    return StepProfile(
        layers=tuple(layers),
        fixed_bytes=draw(st.integers(0, 20)) * MB,
        before_s=draw(st.sampled_from([0.0, 1.0])),
        loss_s=draw(st.sampled_from([0.0, 1.0])),
        after_s=draw(st.sampled_from([0.0, 1.0])),
        loss_working_bytes=draw(st.integers(0, 10)) * MB,
    )


def _draw_storage(
    draw: st.DrawFn, name: StorageId, firsts: list[StorageId], sizes: dict[StorageId, int]
) -> tuple[SavedStorage, bool]:
    """A storage, and whether nothing has saved it before."""
    kind = draw(st.sampled_from(["own", "own", "own", "shared", "rebuilt", "stays"]))
    if kind == "shared" and firsts:
        same_as = draw(st.sampled_from(firsts))
        return SavedStorage(number=name.number, size_bytes=sizes[same_as], same_as=same_as), False
    size_bytes = draw(st.integers(1, 60)) * MB
    if kind == "rebuilt" and firsts:
        sources = (draw(st.sampled_from(firsts)),)
        rebuild_s = draw(st.sampled_from([0.01, 0.5]))
        storage = SavedStorage(
            number=name.number, size_bytes=size_bytes, sources=sources, rebuild_s=rebuild_s
        )
        return storage, True
    leaves = kind != "stays"
    return SavedStorage(number=name.number, size_bytes=size_bytes, may_leave=leaves), True


@st.composite
def small_chains(draw: st.DrawFn, count: int) -> StepProfile:
    """Chains in which each layer saves its input and one more storage at most."""
    layers = []
    for _ in range(count):
        sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=1))
        layers.append(
            make_layer(
                *sizes,
                forward_s=draw(st.sampled_from([0.5, 1.0, 3.0])),
                backward_s=draw(st.sampled_from([1.0, 2.0, 5.0])),
                backward_working_bytes=draw(st.integers(0, 10)) * MB,
                input_bytes=draw(st.integers(1, 20)) * MB,
            )
        )
    return make_profile(*layers)


# ---- all plans -----------------------------------------------------------------------------------


def all_plans(profile: StepProfile) -> Iterator[Plan]:
    """Every plan: each mode of each layer, each decision for each storage, each bound in flight.

    The last one of each has windows instead, all of them closed.
    """
    options = []
    for layer in profile.layers:
        kinds = []
        for storage in layer.storages:
            kind = [Decision.KEEP]
            kind += [Decision.OFFLOAD] if storage.may_leave or storage.same_as else []
            kind += [Decision.REBUILD] if storage.sources or storage.same_as else []
            kinds.append(kind)
        of_layer = [LayerPlan(decisions=each) for each in itertools.product(*kinds)]
        if layer.may_recompute:
            of_layer.append(LayerPlan(mode=LayerMode.RECOMPUTE))
            of_layer.append(LayerPlan(mode=LayerMode.RECOMPUTE_OFFLOAD))
        options.append(of_layer)
    for layers in itertools.product(*options):
        for inflight_bytes in inflight_choices(profile):
            yield Plan(layers=layers, max_inflight_bytes=inflight_bytes)
        yield Plan(layers=layers, windows=(0,) * (2 * len(layers) + 1))


def count_all_plans(profile: StepProfile) -> int:
    total = len(inflight_choices(profile)) + 1
    for layer in profile.layers:
        of_layer = 1
        for storage in layer.storages:
            leaves, rebuilds = (
                storage.may_leave or storage.same_as,
                storage.sources or storage.same_as,
            )
            of_layer *= 1 + bool(leaves) + bool(rebuilds)
        total *= of_layer + 2 * layer.may_recompute
    return total


# ---- dynamic programmes --------------------------------------------------------------------------


def least_recomputation_s(profile: StepProfile, device_bytes: int) -> float | None:
    """Seconds of the shortest step that offloads and rebuilds nothing; None if none fits.

    A dynamic programme over the layers, in the manner of the published ones for chains (Beaumont,
    Herrmann, Pallez, Shilova 2019), whose states are the bytes kept so far. They recompute segments
    of several layers as well; here, each layer is recomputed alone, as the engine does it. Layers
    must share nothing, and their inputs must not be saved by anything else.
    """
    fixed = profile.fixed_bytes
    states = {0: 0.0}  # bytes kept by the layers so far: seconds of second forwards
    for layer in profile.layers:
        inside = sum(storage.size_bytes for storage in layer.storages)
        forward = inside + layer.input_bytes + layer.forward_working_bytes
        again = max(layer.forward_working_bytes, layer.backward_working_bytes)
        as_is = max(forward, inside + layer.backward_working_bytes)
        recomputed = max(forward, inside + layer.input_bytes + again)
        following: dict[int, float] = {}
        for kept, spent_s in states.items():
            options = [(kept + inside, spent_s, as_is)]
            options.append((kept + layer.input_bytes, spent_s + layer.second_forward_s, recomputed))
            for after, after_s, need in options:
                if fixed + kept + need <= device_bytes:
                    following[after] = min(after_s, following.get(after, math.inf))
        states = _undominated(following)
    ends = [s for kept, s in states.items() if fixed + kept <= device_bytes]
    passes_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    outside_s = profile.before_s + profile.loss_s + profile.after_s
    return outside_s + passes_s + min(ends) if ends else None


def _undominated(states: dict[int, float]) -> dict[int, float]:
    """The states that no other one beats in both bytes and seconds."""
    best_s, kept_states = math.inf, {}
    for kept, spent_s in sorted(states.items()):
        if spent_s < best_s:
            best_s = kept_states[kept] = spent_s
    return kept_states


def chain_step_s(profile: StepProfile, hardware: Hardware, device_bytes: int) -> float | None:
    """Seconds of the shortest step that a dynamic programme finds that recomputes and offloads.

    See `chain_plans`. Each of its plans is predicted with each bound in
    flight. None if none fits.
    """
    timing = StepTiming(profile, hardware)
    found_s = []
    for plan in chain_plans(profile, hardware, device_bytes):
        for bound_bytes in inflight_choices(profile):
            bounded = dataclasses.replace(plan, max_inflight_bytes=bound_bytes)
            prediction = timing.predict(bounded)
            if prediction.peak_bytes <= device_bytes:
                found_s.append(prediction.step_s)
    return min(found_s, default=None)


# ---- a dynamic programme over the layers that recomputes and offloads
#
# It follows the published ones for chains, in the manner of Beaumont, Eyraud-Dubois and Shilova
# (Efficient combination of rematerialization and offloading for training DNNs, NeurIPS 2021).
# What is copied down in forward has the time of the later forwards. What is copied up has the
# time of their backwards: seen from the end of the step, that is the same. What does not fit
# beside a layer is waited for. They recompute segments of several layers, too; here each layer is
# recomputed alone, as the engine does it.
#
# A layer's storages are kept or offloaded together, and storages that layers share count where they
# are saved first.

_STEPS: Final = 500  # bytes are counted in this share of the memory
_GROUPS: Final = 25  # groups of states that keep about the same,
_ALIKE: Final = 12  # and how many of each go on from a layer


class _State(NamedTuple):
    """What the layers so far have left behind, in bytes.

    Attributes:
        kept: what stays on the device until backward.
        down: what is still on its way down after the forward of the last layer.
        up: what has to be on its way up when the backward of the last layer ends, so that the
            layers before it wait for nothing.
    """

    kept: int
    down: int
    up: int


class _Option(NamedTuple):
    """One way to run a layer.

    Attributes:
        plan: what becomes of the layer.
        stays: bytes that stay on the device.
        leaves: bytes that are offloaded.
        again_s: seconds of its second forward.
        forward: bytes that its forward needs beside what was kept before,
        backward: and its backward.
    """

    plan: LayerPlan
    stays: int
    leaves: int
    again_s: float
    forward: int
    backward: int


_States = dict[_State, tuple[float, tuple[LayerPlan, ...]]]
"""The least seconds that lead to a state, and how: copies waited for, and second forwards."""


def chain_plans(profile: StepProfile, hardware: Hardware, room_bytes: int) -> list[Plan]:
    """Return the plans that the programme ends with; none if none fits.

    The fastest come first, and of equally fast ones those that keep the most.

    Args:
        profile: the step.
        hardware: the link.
        room_bytes: device memory for what the layers save and need.
    """
    states: _States = {_State(0, 0, 0): (0.0, ())}
    unit_bytes = max(1, room_bytes // _STEPS)
    for layer in profile.layers:
        following: _States = {}
        for state, (spent_s, chosen) in states.items():
            for option in _chain_programme_options(layer):
                found = _pass_layer(layer, option, state, hardware, room_bytes, unit_bytes)
                if found is None:
                    continue
                after, more_s = found
                if after not in following or spent_s + more_s < following[after][0]:
                    following[after] = spent_s + more_s, (*chosen, option.plan)
        states = _promising(following, hardware, room_bytes)
    fastest = sorted(states, key=lambda state: (states[state][0], -state.kept))
    return [Plan(layers=states[state][1]) for state in fastest]


def _chain_programme_options(layer: LayerProfile) -> list[_Option]:
    own = [each for each in layer.storages if each.same_as is None]
    inside = sum(each.size_bytes for each in own)
    may_leave = sum(each.size_bytes for each in own if each.may_leave)
    forward, backward = (
        inside + working for working in (layer.forward_working_bytes, layer.backward_working_bytes)
    )
    options = []
    for decision, leaves in ((Decision.KEEP, 0), (Decision.OFFLOAD, may_leave)):
        plan = LayerPlan(decisions=(decision,) * len(layer.storages))
        options.append(_Option(plan, inside - leaves, leaves, 0.0, forward, backward))
    if layer.may_recompute:
        source = layer.input_bytes if layer.input_same_as is None else 0
        again = source + inside + layer.second_working_bytes
        for mode in (LayerMode.RECOMPUTE, LayerMode.RECOMPUTE_OFFLOAD):
            leaves = source if mode is LayerMode.RECOMPUTE_OFFLOAD else 0
            plan = LayerPlan(mode=mode, decisions=(Decision.KEEP,) * len(layer.storages))
            stays, second_s = source - leaves, layer.second_forward_s
            options.append(_Option(plan, stays, leaves, second_s, source + forward, again))
    return options


def _pass_layer(
    layer: LayerProfile,
    option: _Option,
    state: _State,
    hardware: Hardware,
    room_bytes: int,
    unit_bytes: int,
) -> tuple[_State, float] | None:
    """Return the state after a layer and the seconds that it adds; None if it does not fit."""
    spare_down = room_bytes - state.kept - option.forward
    spare_up = room_bytes - state.kept - option.backward
    if spare_down < 0 or spare_up < 0:
        return None
    down_bytes_per_s, up_bytes_per_s = hardware.d2h_bytes_per_s, hardware.h2d_bytes_per_s
    wait_down_s = max(0, state.down - spare_down) / down_bytes_per_s
    wait_up_s = max(0, state.up - spare_up) / up_bytes_per_s
    down = state.down - (wait_down_s + layer.forward_s) * down_bytes_per_s
    up = state.up - (wait_up_s + layer.backward_s + option.again_s) * up_bytes_per_s
    left_down, left_up = (
        int(max(0.0, left) // unit_bytes) * unit_bytes + option.leaves for left in (down, up)
    )
    after = _State(state.kept + option.stays, left_down, left_up)
    return after, wait_down_s + wait_up_s + option.again_s


def _promising(states: _States, hardware: Hardware, room_bytes: int) -> _States:
    """Return the best states of each group that keeps about the same."""

    def expected_s(state: _State) -> float:
        return states[state][0] + state.up / hardware.h2d_bytes_per_s

    best: _States = {}
    counts: dict[int, int] = {}
    for state in sorted(states, key=lambda each: (expected_s(each), each)):
        group = state.kept * _GROUPS // room_bytes
        counts[group] = counts.get(group, 0) + 1
        if counts[group] <= _ALIKE:
            best[state] = states[state]
    return best


def reread(step: PlannedStep, change: Callable[[Any], object] = lambda _: None) -> PlannedStep:
    """Save a step and load it again, after a change of what the file has."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        step.save(path)
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
        return PlannedStep.load(path)


def planned(plan: Plan, profile: StepProfile) -> PlannedStep:
    return PlannedStep(plan=plan, profile=profile, hardware=make_link(1.0), budget_bytes=0)
