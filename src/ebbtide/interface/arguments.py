"""Checks the types of arguments, so that a mistake is named where it is made."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any, Final, NoReturn, SupportsIndex

import torch
from torch import nn

from ebbtide.errors import PolicyError
from ebbtide.policy import DEFAULT_MIN_BYTES, ActivationPolicy, WeightPolicy

_LISTS: Final = (nn.ModuleList, nn.Sequential)


def check_model(model: object) -> None:
    """Check that a model is an `nn.Module`.

    Raises:
        PolicyError: it is something else.
    """
    if isinstance(model, type):
        refuse("model", "an nn.Module", model, f"make one first: {model.__name__}(...)")
    if isinstance(model, torch.jit.ScriptModule):
        advice = "torch.jit allows no hooks on it; offload the module before you script or trace it"
        refuse("model", "an nn.Module that is no script module", model, advice)
    if isinstance(model, nn.Module):
        return
    advice = "it is the object whose forward you call"
    if isinstance(model, list | tuple):
        advice = "offload each model, or the module that holds them, such as nn.Sequential(*layers)"
    elif callable(model):
        advice = "for a function or a bound forward, use ebbtide.wrap_forward_with_offload"
    refuse("model", "an nn.Module", model, advice)


def check_activations(activations: object) -> None:
    """Check that a policy for activations is one, or None.

    Raises:
        PolicyError: it is something else.
    """
    if activations is None or isinstance(activations, ActivationPolicy):
        return
    advice = "write activations=ebbtide.ActivationPolicy(...), and see its arguments"
    if activations is True or activations is ActivationPolicy:
        advice = "write activations=ebbtide.ActivationPolicy() for all that are large enough"
    elif activations is False:
        advice = "write activations=ebbtide.ActivationPolicy(num_layers=0, rebuild=False) for none"
    elif isinstance(activations, WeightPolicy):
        advice = "a WeightPolicy goes to weights=..."
    refuse("activations", "an ebbtide.ActivationPolicy or None", activations, advice)


def check_budgeted(
    activations: ActivationPolicy | None, schedule: object, *, given_twice: bool
) -> ActivationPolicy:
    """Return the policy that is followed until a budget has been planned: all that can leave does.

    Args:
        activations: what the user gave beside the budget.
        schedule: the schedule that the user gave.
        given_twice: whether there are both a budget and a plan.

    Raises:
        PolicyError: they say what the plan is to say.
    """
    if given_twice:
        raise PolicyError(
            "budget makes a plan and plan follows one; give budget=... to plan again, or plan=..."
        )
    if schedule is not None:
        raise PolicyError(
            "budget and schedule both say which layers leave the device; leave one of them out"
        )
    given = ActivationPolicy() if activations is None else activations
    if dataclasses.replace(given, min_bytes=DEFAULT_MIN_BYTES) != ActivationPolicy():
        raise PolicyError(
            "a budget decides itself what leaves the device and what is recomputed; of the policy "
            "for activations, only min_bytes may be given with it"
        )
    return ActivationPolicy(mode="recompute+offload", rebuild=False, min_bytes=given.min_bytes)


def check_weights(weights: object) -> None:
    """Check that a policy for weights is one, or None.

    Raises:
        PolicyError: it is something else.
    """
    if weights is None or isinstance(weights, WeightPolicy):
        return
    advice = "write weights=ebbtide.WeightPolicy(...), and see its arguments"
    if weights is True or weights is WeightPolicy:
        advice = "write weights=ebbtide.WeightPolicy() for the weights of all layers"
    elif weights is False:
        advice = "leave it out to offload no weights"
    elif isinstance(weights, ActivationPolicy):
        advice = "an ActivationPolicy goes to activations=..."
    refuse("weights", "an ebbtide.WeightPolicy or None", weights, advice)


def check_switch(name: str, value: object, advice: str = "") -> None:
    """Check that an argument is True or False.

    Raises:
        PolicyError: it is something else.
    """
    if not isinstance(value, bool):
        refuse(name, "True or False", value, advice)


def check_trace(trace: object) -> None:
    """Check the argument ``trace``.

    Raises:
        PolicyError: it is neither True nor False.
    """
    advice = "to write a file, use handle.trace.save(path) after a step"
    check_switch("trace", trace, advice if isinstance(trace, str) else "")


def check_modules(name: str, modules: object) -> None:
    """Check that an argument is a list of modules.

    Raises:
        PolicyError: it is something else.
    """
    is_list = isinstance(modules, Iterable) and not isinstance(modules, str | dict)
    if isinstance(modules, nn.Module) and not isinstance(modules, _LISTS):
        refuse(name, "a list of modules", modules, f"write {name}=[model]")
    if not isinstance(modules, Iterable) or not is_list:
        refuse(name, "a list of modules", modules, f"write {name}=[model]")
    for module in modules:
        if not isinstance(module, nn.Module):
            refuse(name, "a list of modules", module, "as one of its elements")


def check_layers(layers: object) -> None:
    """Check that an argument names layers: a list of modules and patterns.

    Raises:
        PolicyError: it is something else.
    """
    kind = "a list of modules and of patterns such as 'blocks.*'"
    if isinstance(layers, str):
        raise PolicyError(f"layers is a list: write layers=[{layers!r}]")
    single = isinstance(layers, nn.Module) and not isinstance(layers, _LISTS)
    if single or isinstance(layers, type) or not isinstance(layers, Iterable):
        advice = "write layers=[model.encoder, ...]"
        if isinstance(layers, int):
            advice = "to choose how many layers, write ebbtide.ActivationPolicy(num_layers=...)"
        refuse("layers", kind, layers, advice)


def parse_device(device: Any) -> torch.device | None:
    """Return a device given as text or as a `torch.device`; None means None.

    Raises:
        PolicyError: there is no such device.
    """
    if device is None or isinstance(device, torch.device):
        return device
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        refuse("device", "a torch.device", device, 'such as "cuda", "cuda:1" or "cpu"')


def parse_number(name: str, value: SupportsIndex | None) -> int:
    """Return a whole number, 0 or more.

    Raises:
        PolicyError: it is something else.
    """
    try:
        number = -1 if value is None or isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        refuse(name, "a whole number, 0 or more", value)
    return number


def refuse(name: str, kind: str, got: object, advice: str = "") -> NoReturn:
    """Raise a `PolicyError` that says what an argument must be and what was given.

    Args:
        name: name of the argument.
        kind: what it must be.
        got: what was given.
        advice: what to write instead.
    """
    raise PolicyError(f"{name} must be {kind}, got {_describe(got)}{advice and '; '}{advice}")


def _describe(got: object) -> str:
    if isinstance(got, type):
        return f"the class {got.__name__}"
    if got is None or isinstance(got, bool | int | float | str):
        return repr(got)
    kind = type(got).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def refuse_recomputing(policy: ActivationPolicy, why: str) -> None:
    """Check that a policy recomputes no layers.

    Raises:
        PolicyError: it does.
    """
    if policy.recomputes:
        raise PolicyError(
            f'mode="{policy.mode}" is only for ebbtide.offload(model) without a schedule, because '
            f"{why}; leave mode out, or use torch.utils.checkpoint inside the layers"
        )
