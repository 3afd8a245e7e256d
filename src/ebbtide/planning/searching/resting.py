"""Whose weights rest on the host, with their gradients and the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ebbtide.planning.step_profile import StepProfile
from ebbtide.policy import is_in_share

_MORE: Final = (0, 1, 2, 4)  # modules beyond the fewest, as copies need room that no bound knows of

Resting = tuple[bool, ...]
"""For each layer of a step, whether its weights rest on the host."""


def nowhere(profile: StepProfile) -> Resting:
    """Return that all weights are on the device."""
    return (False,) * len(profile.layers)


def everywhere(profile: StepProfile) -> Resting:
    """Return that all weights rest on the host."""
    return tuple(layer.parameter_bytes > 0 for layer in profile.layers)


def resting_choices(profile: StepProfile, least_bytes: float) -> Iterator[Resting]:
    """Yield what to try: those first that have the fewest bytes on the host.

    Modules are spread evenly over the step, so that the copies of one's weights have the time in
    which others compute.

    Args:
        profile: the step.
        least_bytes: bytes of weights, gradients and optimizer state that must rest there.
    """
    fewest = 0
    counts = len(profile.weight_owners())
    while fewest < counts and _bytes(profile, _spread(profile, fewest)) < least_bytes:
        fewest += 1
    tried = {nowhere(profile), everywhere(profile)}
    for more in _MORE:
        chosen = _spread(profile, min(counts, fewest + more))
        if chosen not in tried:
            tried.add(chosen)
            yield chosen


def _spread(profile: StepProfile, count: int) -> Resting:
    """Return that the weights of some modules rest on the host, spread evenly over the step."""
    owners = profile.weight_owners()
    chosen = {
        index
        for number, layers in enumerate(owners.values())
        if is_in_share(number, count / len(owners))
        for index in layers
    }
    return tuple(index in chosen for index in range(len(profile.layers)))


def _bytes(profile: StepProfile, resting: Sequence[bool]) -> int:
    layers = zip(profile.layers, resting, strict=True)
    return sum(layer.parameter_bytes for layer, rests in layers if rests)
