"""Translates a plan into what the engine's placement follows."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable
from typing import final

from torch import nn

from ebbtide.errors import PolicyError
from ebbtide.planning.plan import LayerMode, Plan
from ebbtide.planning.planned_step import PlannedStep
from ebbtide.planning.prediction import StorageUses, backward_groups
from ebbtide.planning.profile import StepProfile
from ebbtide.policy import ActivationPolicy, refuse
from ebbtide.runtime.activations import PassWindows, Window
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.handles import Decision
from ebbtide.runtime.rebuild import PlannedLayers
from ebbtide.units import few


def place(profile: StepProfile, plan: Plan) -> PlannedLayers:
    """Return what the engine is to do with each layer and storage.

    Args:
        profile: the step that the plan is for.
        plan: what is to become of it.
    """
    uses = StorageUses(profile)
    chosen = uses.under(plan).decisions
    decisions: dict[tuple[int | None, int], Decision] = {}
    recomputed, kept_inputs = set(), set()
    calls = outside = 0  # numbers of the next call, and of the next storage outside layers
    for index, (layer, planned) in enumerate(zip(profile.layers, plan.layers, strict=True)):
        call, first = (None, outside) if layer.between else (calls, 0)
        if planned.mode is LayerMode.AS_IS:
            for piece, storage in zip(uses.saves[index], layer.storages, strict=True):
                decisions[call, first + storage.number] = chosen[piece]
        else:
            recomputed.add(calls)
            source, keeps = uses.inputs[index], planned.mode is LayerMode.RECOMPUTE
            # The loop holds its batch, so that would only be there twice after a copy.
            if keeps or source is None or chosen[source] is Decision.KEEP:
                kept_inputs.add(calls)
        if layer.between:
            outside += len(layer.storages)
        else:
            calls += 1
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


# ---- Follows a plan that was made before ----

_LOG = logging.getLogger(__name__)


def load_plan(given: object) -> PlannedStep:
    """Return a plan that was made before.

    Args:
        given: what `OffloadHandle.plan` gave, or the path of the file that it was saved to.

    Raises:
        OSError: the file cannot be read.
        PolicyError: it is no plan.
    """
    if isinstance(given, str | os.PathLike):
        given = PlannedStep.load(given)
    if not isinstance(given, PlannedStep):
        advice = "save one with handle.plan.save(path)"
        refuse("plan", "a path, or what handle.plan gives", given, advice)
    return given


def layers_of(plan: PlannedStep, model: nn.Module) -> list[str]:
    """Return the names of the layers that a plan was made for.

    Raises:
        PolicyError: the model has no modules of these names.
    """
    names = list(dict.fromkeys(each.name for each in plan.profile.layers if not each.between))
    missing = set(names) - {name for name, _ in model.named_modules()}
    if missing:
        raise PolicyError(
            f"the plan is for a model with the layers {few(names)}, and this one has no "
            f"{few(sorted(missing))}; plan again with budget=..."
        )
    return names


def policy_of(
    plan: PlannedStep, policy: ActivationPolicy, given: ActivationPolicy | None
) -> ActivationPolicy:
    """Return the policy that a plan is followed with: its storages are numbered from its min_bytes.

    Args:
        plan: the plan.
        policy: the policy otherwise.
        given: what the user has given.

    Raises:
        PolicyError: the user has given another min_bytes.
    """
    wanted = plan.profile.min_bytes
    if given is not None and max(1, int(given.min_bytes)) != wanted:
        raise PolicyError(
            f"the plan was made with min_bytes={wanted}, and the policy for activations has "
            f"{given.min_bytes}; leave activations out, or plan again with budget=..."
        )
    return dataclasses.replace(policy, min_bytes=wanted)


def resting_layers_of(plan: PlannedStep) -> list[str]:
    """Return the names of the layers whose weights a plan has on the host.

    Raises:
        PolicyError: the weights of a layer are in two places.
    """
    resting = []
    for name, calls in plan.profile.weight_owners().items():
        places = {plan.plan.layers[call].weights_on_host for call in calls}
        if len(places) > 1:
            raise PolicyError(
                f"the plan has the weights of {name} on the host for some of its calls, and on the "
                f"device for others; say which weights rest there: "
                f"weights=ebbtide.WeightPolicy(...)"
            )
        if True in places:
            resting.append(name)
    return resting


@final
class FixedPlan:
    """Has an engine follow one plan, whatever is measured.

    Args:
        engine: the engine.
        plan: the plan.

    Attributes:
        plan: as given.
    """

    def __init__(self, engine: Engine, plan: PlannedStep) -> None:
        self.plan = plan
        self._engine = engine
        engine.follow(place(plan.profile, plan.plan), plan.plan.max_inflight_bytes)
        _LOG.info("a plan made before is followed: %s", plan.summary)

    def detach(self) -> None:
        """Let the policy decide again."""
        self._engine.follow(None, None)
