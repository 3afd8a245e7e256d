"""Frozen policies, which hold what the user asks for and are validated on construction."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, SupportsIndex

import torch
from torch import nn

from ebbtide.errors import PolicyError
from ebbtide.units import parse_size_bytes

DEFAULT_MIN_BYTES = 2**20
_MODES = ("offload", "recompute", "recompute+offload")


@dataclass(frozen=True)
class ActivationPolicy:
    """Which saved activations are offloaded, and how many bytes may be in flight at once.

    Activations are offloaded as soon as autograd saves them, and reloaded ahead of need during
    backward. Those that stay cost no time; those that are offloaded cost one copy over the link in
    each direction.

    Args:
        num_layers: offload the first ``num_layers`` layers of the forward and keep the rest.
            ``None`` means everything that is large enough, inside layers or not.
        min_bytes: smaller tensors stay on the device. An int, or text such as ``"1MiB"``.
        keep_last: number of layers at the end of the forward that stay on the device. Their
            backward comes first, so their copies have the least time to hide behind compute.
        max_inflight_bytes: bound, for each direction, on the bytes that occupy device memory only
            because their copy is in flight: unfinished offloads, and reloads that are not yet used.
            A single tensor larger than the bound still moves, alone. ``None`` means 256 MiB for a
            model on an accelerator and 64 MiB on a CPU, where a reload maps pages that were read
            ahead outside the process; and from the second step on no more than a quarter of what a
            step offloads, or three of its largest tensors.
        rebuild: whether to rebuild tensors that one cheap operation can compute from another saved
            tensor, such as a GELU's output from its input. Such a tensor is neither kept nor
            offloaded; backward runs the operation again, which gives the same bits. With
            ``num_layers=0`` nothing is offloaded, and rebuilding is all that happens.
        mode: what is done with the layers that `num_layers` and `keep_last` choose.
            ``"offload"`` offloads what they save. ``"recompute"`` keeps only their inputs, on the
            device: backward runs their forward again (`torch.utils.checkpoint`), and nothing is
            offloaded. ``"recompute+offload"`` recomputes them in the same way and offloads their
            inputs.

    Raises:
        PolicyError: a value is out of range.
    """

    num_layers: int | None = None
    min_bytes: int | str = DEFAULT_MIN_BYTES
    keep_last: int = 0
    max_inflight_bytes: int | str | None = None
    rebuild: bool = True
    mode: Literal["offload", "recompute", "recompute+offload"] = "offload"

    def __post_init__(self) -> None:
        _check_choice(self)
        check_switch("rebuild", self.rebuild)
        if self.mode not in _MODES:
            modes = ", ".join(f'"{mode}"' for mode in _MODES)
            refuse("mode", f"one of {modes}", self.mode)
        if self.max_inflight_bytes is not None:
            _parse_size(self, "max_inflight_bytes")

    @property
    def counts_layers(self) -> bool:
        """Whether the policy selects layers, rather than everything that is large enough."""
        return self.num_layers is not None or self.keep_last > 0

    @property
    def recomputes(self) -> bool:
        """Whether backward runs the forwards of the chosen layers again."""
        return self.mode != "offload"

    @property
    def offloads(self) -> bool:
        """Whether saved tensors are offloaded at all."""
        return self.mode != "recompute"


@dataclass(frozen=True)
class WeightPolicy:
    """Which weights stay in host memory and are on the device only while their layer computes.

    Between uses a parameter of such a layer is a host tensor, so any optimizer runs on the host and
    keeps its state there. The layer's weights are copied to the device in one copy before its
    forward, and again before its backward. Gradients are offloaded as soon as they are computed and
    accumulate in ``param.grad`` on the host. At most two layers' weights are on the device at once.

    Args:
        num_layers: offload the weights of the first ``num_layers`` layers of the model. ``None``
            means all layers.
        keep_last: number of layers at the end of the model whose weights stay on the device.
        double_buffering: copy the next layer's weights into a second buffer while a layer computes,
            so that the copy costs no time. With ``False``, one layer's weights are on the device at
            a time, and each layer waits for its own.
        min_bytes: a layer with fewer bytes of weights stays on the device. An int, or text such as
            ``"1MiB"``.
        param_dtype: ``torch.bfloat16`` or ``torch.float16``: the dtype that matrices and kernels
            (floating-point parameters of two dimensions or more) have on the device, for training
            under `torch.autocast` in that dtype. Their masters stay on the host in their own dtype,
            where the optimizer steps on them, and gradients arrive in that. The copies to the
            device have half the bytes. Vectors, such as those of norms, keep their dtype. ``None``:
            all do.

    Raises:
        PolicyError: a value is out of range.
    """

    num_layers: int | None = None
    keep_last: int = 0
    double_buffering: bool = True
    min_bytes: int | str = 0
    param_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_choice(self)
        check_switch("double_buffering", self.double_buffering)
        if self.param_dtype not in (None, torch.bfloat16, torch.float16):
            advice = "that of torch.autocast"
            refuse("param_dtype", "torch.bfloat16, torch.float16 or None", self.param_dtype, advice)


def _check_choice(policy: ActivationPolicy | WeightPolicy) -> None:
    """Check which layers a policy chooses, and parse its ``min_bytes``."""
    for name in ("num_layers", "keep_last"):
        value = getattr(policy, name)
        if value is not None or name == "keep_last":
            number = parse_number(name, value, "a whole number of layers, 0 or more")
            object.__setattr__(policy, name, number)
    _parse_size(policy, "min_bytes")


def _parse_size(policy: ActivationPolicy | WeightPolicy, name: str) -> None:
    object.__setattr__(policy, name, parse_size_bytes(getattr(policy, name), name=name))


# ---- Checks the types of arguments, so that a mistake is named where it is made ----

_LISTS: Final = (nn.ModuleList, nn.Sequential)


def check_model(model: object) -> None:
    """Check that a model is an `nn.Module`.

    Raises:
        PolicyError: it is something else.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        advice = (
            "give the module whose forward your training loop calls, before torch.jit scripts it; "
            "for a function, ebbtide.wrap_forward_with_offload(model.forward)"
        )
        refuse("model", "an nn.Module that is no script module", model, advice)


def check_arguments(*, activations: object, trace: object, weights: object = None) -> None:
    """Check the types of the arguments that all ways to offload take.

    Args:
        activations: an `ActivationPolicy` or None.
        trace: True or False.
        weights: a `WeightPolicy` or None.

    Raises:
        PolicyError: one is something else.
    """
    for name, kind, given in (
        ("activations", ActivationPolicy, activations),
        ("weights", WeightPolicy, weights),
    ):
        if given is not None and not isinstance(given, kind):
            advice = f"write {name}=ebbtide.{kind.__name__}() for all, num_layers=0 in it for none"
            refuse(name, f"an ebbtide.{kind.__name__} or None", given, advice)
    check_switch("trace", trace)


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


def check_switch(name: str, value: object) -> None:
    """Check that an argument is True or False.

    Raises:
        PolicyError: it is something else.
    """
    if not isinstance(value, bool):
        refuse(name, "True or False", value)


def check_modules(name: str, modules: object) -> None:
    """Check that an argument is a list of modules.

    Raises:
        PolicyError: it is something else.
    """
    single = isinstance(modules, nn.Module) and not isinstance(modules, _LISTS)
    if single or not isinstance(modules, Iterable) or isinstance(modules, str | dict):
        refuse(name, "a list of modules", modules, f"write {name}=[model]")
    for module in modules:
        if not isinstance(module, nn.Module):
            refuse(name, "a list of modules", module, "as one of its elements")


def check_layers(layers: object) -> None:
    """Check that an argument names layers: a list of modules and patterns.

    Raises:
        PolicyError: it is something else.
    """
    single = isinstance(layers, nn.Module) and not isinstance(layers, _LISTS)
    if single or isinstance(layers, str | type) or not isinstance(layers, Iterable):
        advice = (
            "write layers=[model.encoder, ...]; to choose how many layers, "
            "ebbtide.ActivationPolicy(num_layers=...)"
        )
        refuse("layers", "a list of modules and of patterns such as 'blocks.*'", layers, advice)


def parse_device(device: Any) -> torch.device | None:
    """Return a device given as text or as a `torch.device`, with its index; None means None.

    The device that computes has an index, as its tensors have.

    Raises:
        PolicyError: there is no such device.
    """
    if device is None:
        return None
    try:
        given = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        refuse("device", "a torch.device", device, 'such as "cuda", "cuda:1" or "cpu"')
    if given.index is None and given.type not in ("cpu", "meta"):
        known = torch.accelerator.current_accelerator(check_available=True)
        if known is not None and known.type == given.type:
            return torch.device(given.type, torch.accelerator.current_device_index())
    return given


def parse_number(
    name: str, value: SupportsIndex | None, kind: str = "a whole number, 0 or more"
) -> int:
    """Return a whole number, 0 or more.

    Args:
        name: name of the argument.
        value: what was given.
        kind: what it must be, in words.

    Raises:
        PolicyError: it is something else.
    """
    try:
        number = -1 if value is None or isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        refuse(name, kind, value)
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


def refuse_choice(policy: ActivationPolicy, why: str) -> None:
    """Check that a policy neither counts nor recomputes layers.

    Args:
        policy: the policy.
        why: why it cannot, and what to do instead.

    Raises:
        PolicyError: it does.
    """
    if policy.counts_layers or policy.recomputes:
        raise PolicyError(
            f"num_layers, keep_last and mode of ActivationPolicy choose layers of a model, so "
            f"leave them out: {why}"
        )
