"""The plans that people make by hand: one rule for all layers, or for the first k of them."""

from __future__ import annotations

from collections.abc import Iterator

from ebbtide.planning.plan import Decision, LayerMode, LayerPlan, Plan
from ebbtide.planning.step_profile import StepProfile


def keep_all(profile: StepProfile) -> Plan:
    """Return the plan that changes nothing."""
    return _uniform(profile, LayerMode.AS_IS, Decision.KEEP)


def offload_first(profile: StepProfile, count: int) -> Plan:
    """Return the plan that offloads what the first ``count`` layers save, and keeps the rest."""
    layers = [
        _layer(
            profile, index, LayerMode.AS_IS, Decision.OFFLOAD if index < count else Decision.KEEP
        )
        for index in range(len(profile.layers))
    ]
    return Plan(layers=tuple(layers))


def rule_plans(profile: StepProfile) -> Iterator[tuple[str, Plan]]:
    """Yield the plans that treat all layers alike, with their names.

    A layer that may not be recomputed runs as it is, and its storages are offloaded where the
    inputs of the others are. A storage that cannot be rebuilt is kept.
    """
    yield "keep all", keep_all(profile)
    yield "rebuild alone", _rebuilt(profile, Decision.KEEP)
    yield "offload all", _uniform(profile, LayerMode.AS_IS, Decision.OFFLOAD)
    yield "offload all, rebuild", _rebuilt(profile, Decision.OFFLOAD)
    yield "recompute all", _uniform(profile, LayerMode.RECOMPUTE, Decision.KEEP)
    both = _uniform(profile, LayerMode.RECOMPUTE_OFFLOAD, Decision.OFFLOAD)
    yield "recompute + offload all", both


def _uniform(profile: StepProfile, mode: LayerMode, decision: Decision) -> Plan:
    layers = [_layer(profile, index, mode, decision) for index in range(len(profile.layers))]
    return Plan(layers=tuple(layers))


def _layer(profile: StepProfile, index: int, mode: LayerMode, decision: Decision) -> LayerPlan:
    layer = profile.layers[index]
    if not layer.may_recompute:
        mode = LayerMode.AS_IS
    return LayerPlan(mode=mode, decisions=(decision,) * len(layer.storages))


def _rebuilt(profile: StepProfile, others: Decision) -> Plan:
    layers = []
    for layer in profile.layers:
        decisions = tuple(
            others if storage.rebuild_s is None else Decision.REBUILD for storage in layer.storages
        )
        layers.append(LayerPlan(decisions=decisions))
    return Plan(layers=tuple(layers))
