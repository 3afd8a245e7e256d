"""Plans from a dynamic programme over the layers that recomputes and offloads.

It follows the published ones for chains, in the manner of Beaumont, Eyraud-Dubois and Shilova
(Efficient combination of rematerialization and offloading for training DNNs, NeurIPS 2021). What is
copied down in forward has the time of the later forwards. What is copied up has the time of their
backwards: seen from the end of the step, that is the same. What does not fit beside a layer is
waited for. They recompute segments of several layers, too; here each layer is recomputed alone, as
the engine does it.

A layer's storages are kept or offloaded together, and storages that layers share count where they
are saved first. So the plans are starting points, which the search predicts and improves.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import Decision, LayerMode, LayerPlan, Plan
from ebbtide.planning.step_profile import LayerProfile, StepProfile

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
            for option in _options(layer):
                found = _pass_layer(layer, option, state, hardware, room_bytes, unit_bytes)
                if found is None:
                    continue
                after, more_s = found
                if after not in following or spent_s + more_s < following[after][0]:
                    following[after] = spent_s + more_s, (*chosen, option.plan)
        states = _promising(following, hardware, room_bytes)
    fastest = sorted(states, key=lambda state: (states[state][0], -state.kept))
    return [Plan(layers=states[state][1]) for state in fastest]


def _options(layer: LayerProfile) -> list[_Option]:
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
