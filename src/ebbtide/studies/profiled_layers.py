"""Layers that a user names, and profiles of models with many equal blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from ebbtide.hooks.layers import match_layers
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.step_profile import LayerProfile, StepProfile, StorageId


def named_layers(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the modules that patterns such as ``"blocks.*"`` name.

    Raises:
        PolicyError: a pattern matches nothing.
    """
    return match_layers(model, list(patterns)).names


def stretch(profile: StepProfile, index: int, count: int, hardware: Hardware) -> StepProfile:
    """Return the profile of a model in which one layer is there several times.

    What each layer adds to the working memory of those after it, because it is too small to be
    offloaded or is saved outside layers, is added for each copy.

    Args:
        profile: the step of a model with fewer layers. What the layer shares with others, it shares
            with the layer before it and the one after it.
        index: index of the layer; the one before it is equal to it.
        count: number of layers that take its place.
        hardware: the machine of the profile, on which the weights are updated.
    """
    before, layer = profile.layers[index - 1], profile.layers[index]
    more = count - 1
    update_bytes = 3 * layer.gradient_bytes + 2 * layer.optimizer_bytes
    added_bytes = max(0, layer.forward_working_bytes - before.forward_working_bytes)
    again_bytes = max(0, (layer.unsaved_forward_bytes or 0) - (before.unsaved_forward_bytes or 0))
    begin, _, number = layer.name.rpartition(".")

    def later(each: LayerProfile, after: int, steps: int, name: str) -> LayerProfile:
        more_bytes = steps * again_bytes
        return dataclasses.replace(
            _shifted(each, after, steps),
            name=name,
            forward_working_bytes=each.forward_working_bytes + steps * added_bytes,
            backward_working_bytes=each.backward_working_bytes + steps * added_bytes,
            unsaved_forward_bytes=_plus(each.unsaved_forward_bytes, more_bytes),
            recompute_working_bytes=_plus(each.recompute_working_bytes, more_bytes),
        )

    copies = tuple(later(layer, -1, step, f"{begin}.{int(number) + step}") for step in range(count))
    rest = tuple(
        later(each, index - 1, more, _next_name(each.name, begin, more))
        for each in profile.layers[index + 1 :]
    )
    return dataclasses.replace(
        profile,
        layers=profile.layers[:index] + copies + rest,
        loss_working_bytes=profile.loss_working_bytes + more * added_bytes,
        after_s=profile.after_s + more * update_bytes / hardware.device_memory_bytes_per_s,
    )


def _plus(size_bytes: int | None, more_bytes: int) -> int | None:
    return None if size_bytes is None else size_bytes + more_bytes


def _next_name(name: str, begin: str, more: int) -> str:
    before, _, number = name.rpartition(".")
    return f"{begin}.{int(number) + more}" if before == begin and number.isdigit() else name


def _shifted(layer: LayerProfile, after: int, by: int) -> LayerProfile:
    """Return a layer whose references to layers after one refer to others, ``by`` layers on."""

    def moved(name: StorageId | None) -> StorageId | None:
        if name is None or name.layer <= after:
            return name
        return StorageId(name.layer + by, name.number)

    return dataclasses.replace(
        layer,
        input_same_as=moved(layer.input_same_as),
        storages=tuple(
            dataclasses.replace(
                each,
                same_as=moved(each.same_as),
                sources=tuple(source for source in map(moved, each.sources) if source is not None),
            )
            for each in layer.storages
        ),
    )
