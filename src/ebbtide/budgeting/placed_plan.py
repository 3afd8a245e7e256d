"""Translates a plan into what the engine's placement follows.

[Note: numbers under a plan] The engine numbers the storages that a layer's call is the first to
save. A layer that is recomputed saves its input alone, so a later layer may be the first to save
what it shares with it, and has other numbers than under another plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ebbtide.activations import records
from ebbtide.activations.placement import PlannedLayers
from ebbtide.activations.windowed_passes import PassWindows, Window
from ebbtide.planning.plan import Decision, LayerMode, Plan
from ebbtide.planning.prediction.pass_windows import backward_groups
from ebbtide.planning.prediction.storage_uses import StorageUses
from ebbtide.planning.step_profile import StepProfile, StorageId

_DECISIONS = {
    Decision.KEEP: records.KEEP,
    Decision.OFFLOAD: records.OFFLOAD,
    Decision.REBUILD: records.REBUILD,
}


class EngineName(NamedTuple):
    """What the engine calls a storage.

    Attributes:
        layer: number of the layer's call in the forward; None outside layers.
        number: number of the storage among those that the call is the first to save.
    """

    layer: int | None
    number: int


def place(profile: StepProfile, plan: Plan) -> PlannedLayers:
    """Return what the engine is to do with each layer and storage.

    Args:
        profile: the step that the plan is for.
        plan: what is to become of it.
    """
    uses = StorageUses(profile)
    chosen = uses.under(plan).decisions
    decisions: dict[tuple[int | None, int], records.Decision] = {}
    for name, engine_name in _first_saves(profile, plan):
        decisions[engine_name] = _DECISIONS[chosen[uses.pieces[name]]]
    layers = zip(plan.layers, profile.layers, uses.inputs, strict=True)
    calls = [(layer.mode, source) for layer, known, source in layers if not known.between]
    recomputed, kept_inputs = set(), set()
    for index, (mode, source) in enumerate(calls):
        if mode is not LayerMode.AS_IS:
            recomputed.add(index)
            # The loop holds its batch, so that would only be there twice after a copy.
            if mode is LayerMode.RECOMPUTE or source is None or chosen[source] is Decision.KEEP:
                kept_inputs.add(index)
    knows_outside = any(layer.between for layer in profile.layers)
    return PlannedLayers(
        decisions,
        frozenset(recomputed),
        frozenset(kept_inputs),
        keeps_outside=not knows_outside,
        windows=_windows(profile, plan, uses) if plan.windows else None,
    )


def _windows(profile: StepProfile, plan: Plan, uses: StorageUses) -> PassWindows:
    """Return a plan's windows by the numbers of the layers' calls."""
    under, count = uses.under(plan), len(profile.layers)

    def bytes_of(pieces: Iterable[int]) -> int:
        return uses.offloaded_bytes(under, pieces)

    forward = [Window(plan.windows[i], bytes_of(under.saved[i])) for i in range(count)]
    backward: list[Window] = []
    between: list[Window | None] = [None]
    for group in reversed(backward_groups(profile)[1:]):
        own_bytes = sum(bytes_of(under.needed[2 * count - position]) for position in group)
        backward.append(Window(plan.windows[group[0]], own_bytes))
    for index, layer in enumerate(profile.layers):
        if layer.between:
            between[-1] = forward[index]
        else:
            between.append(None)
    pairs = zip(forward, profile.layers, strict=True)
    calls = [window for window, layer in pairs if not layer.between]
    return PassWindows(calls, between, Window(plan.windows[count], 0), backward)


def engine_names(profile: StepProfile, plan: Plan) -> dict[StorageId, EngineName]:
    """Return the engine's name of each storage that is saved under a plan, by its first save."""
    return dict(_first_saves(profile, plan))


def _first_saves(profile: StepProfile, plan: Plan) -> Iterator[tuple[StorageId, EngineName]]:
    """Yield what is saved outside of recomputed layers, as the engine meets it."""
    known: set[StorageId] = set()
    calls = outside = 0
    for index, (layer, chosen) in enumerate(zip(profile.layers, plan.layers, strict=True)):
        number, call = (outside, None) if layer.between else (0, calls)
        calls += not layer.between
        if chosen.mode is not LayerMode.AS_IS:
            if layer.input_same_as is not None:
                known.add(layer.input_same_as)
            continue
        for storage in layer.storages:
            name = storage.same_as or StorageId(index, storage.number)
            if name not in known:
                known.add(name)
                yield name, EngineName(call, number)
                number += 1
        if layer.between:
            outside = number
