"""Finds the parts of a model whose weights are copied together, and checks that they can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ebbtide.errors import PolicyError
from ebbtide.hooks.layers import LayerModules, lists_by_index
from ebbtide.interface.display import few
from ebbtide.interface.warning import warn_user
from ebbtide.parameters.sharing import find_shared, is_foreign
from ebbtide.policy import WeightPolicy, is_in_share

Unit = tuple[list[nn.Module], str, list[tuple[str, nn.Parameter]]]
"""Modules whose call needs the parameters, the unit's name, and the named parameters."""


def find_units(layers: LayerModules) -> list[Unit]:
    """Find what is copied together: a layer, or the blocks of one place in its lists."""
    units: list[Unit] = []
    for name, module in zip(layers.names, layers.modules, strict=True):
        lists = lists_by_index(module)
        inner: set[int] = set()
        for index in range(len(next(iter(lists.values()))) if lists else 0):
            elements = [(list_name, blocks[index]) for list_name, blocks in lists.items()]
            named = [
                (f"{name}.{list_name}.{index}.{parameter_name}", parameter)
                for list_name, element in elements
                for parameter_name, parameter in element.named_parameters()
            ]
            inner |= {id(parameter) for _, parameter in named}
            modules = [element for _, element in elements]
            units.append((modules, f"{name}.{index}", named))
        rest = [(f"{name}.{n}", p) for n, p in module.named_parameters() if id(p) not in inner]
        if rest:
            units.append(([module], name, rest))
    return units


def refuse_lazy(units: Sequence[Unit]) -> None:
    """Check that all parameters have shapes.

    Raises:
        PolicyError: one of them is lazy.
    """
    for *_, named in units:
        for name, parameter in named:
            if is_lazy(parameter):
                raise PolicyError(
                    f"{name} is lazy and has no shape yet, so its bytes cannot be moved; run one "
                    f"forward of the model before ebbtide.offload(model, weights=...)"
                )


def choose_units(units: Sequence[Unit], policy: WeightPolicy) -> list[Unit]:
    """Return the units that a policy selects.

    Raises:
        PolicyError: the policy counts more layers than there are.
    """
    for field, count in (("num_layers", policy.num_layers), ("keep_last", policy.keep_last)):
        if count is not None and count > len(units):
            names = [name for _, name, _ in units]
            raise PolicyError(
                f"WeightPolicy({field}={count}) is out of range: the model has {len(units)} layers "
                f"with weights ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}); name "
                f"others by layers=[...], or leave {field} out"
            )
    least_bytes = max(int(policy.min_bytes), 1)
    return [
        unit
        for number, unit in enumerate(units[: len(units) - policy.keep_last][: policy.num_layers])
        if is_in_share(number, policy.fraction) and _size_bytes(unit) >= least_bytes
    ]


def _size_bytes(unit: Unit) -> int:
    plain = (p for _, p in unit[2] if p.layout is torch.strided and not p.is_nested)
    return sum(parameter.numel() * parameter.element_size() for parameter in plain)


def check_units(units: Sequence[Unit]) -> None:
    """Check that the bytes of all parameters can rest side by side.

    Raises:
        PolicyError: those of one cannot, or there are no units.
    """
    if not units:
        raise PolicyError(
            "no layer has weights to offload: name some, layers=[model.encoder, ...], or lower "
            "WeightPolicy(min_bytes=...)"
        )
    for *_, named in units:
        for name, parameter in named:
            if type(parameter) is not nn.Parameter:
                raise PolicyError(
                    f"{name} is a {type(parameter).__name__}, not a plain nn.Parameter; leave that "
                    f"layer out: name the others, layers=[...]"
                )
            if parameter.layout is not torch.strided or parameter.is_nested:
                kind = "nested" if parameter.is_nested else "sparse"
                raise PolicyError(
                    f"{name} is {kind}, and the weights of a layer rest side by side as plain "
                    f"bytes; leave its layer out: name the other layers with layers=[...]"
                )
            if parameter.is_inference():
                raise PolicyError(
                    f"{name} was made under torch.inference_mode and can never be trained; make "
                    f"the model outside of it"
                )


def leave_first(units: Sequence[Unit], model: nn.Module) -> list[Unit]:
    """Leave out the model's first parameter if its layer is one module, such as an embedding.

    It stays on the device. Programs ask it for the device of the model, as ``model.device`` of
    Transformers and Diffusers does, and get the device that the model computes on.

    Not modelled: a model that begins with a block, whose first parameter rests.

    Raises:
        PolicyError: there is no other parameter.
    """
    first = next(model.parameters())
    alone = any(
        not any(module.children()) and any(p is first for _, p in named)
        for modules, _, named in units
        for module in modules
    )
    left = _without(units, {id(first)} if alone else ())
    if not left:
        raise PolicyError(
            "the only weight that could be offloaded is the model's first parameter, which stays "
            "on the device because programs ask it for the model's device; leave weights out"
        )
    return left


def leave_shared(units: Sequence[Unit]) -> list[Unit]:
    """Leave out parameters whose memory something else refers to, and say so.

    Raises:
        PolicyError: there are no others.
    """
    named = {id(p): (name, p) for *_, own in units for name, p in own}
    parameters = [p for _, p in named.values()]
    shared = {id(parameters[position]) for position in find_shared(parameters, but_graphs=True)}
    shared |= {id(p) for p in parameters if is_foreign(p)}
    if not shared:
        return list(units)
    said = (
        f"{few([name for key, (name, _) in named.items() if key in shared])} share their memory "
        f"with other tensors or processes, or with NumPy, and would not share it on the host any "
        f"more"
    )
    left = _without(units, shared)
    advice = (
        "drop what shares it, such as a state_dict or a flat vector, or give each parameter memory "
        "of its own (parameter.data = parameter.data.clone()) before ebbtide.offload"
    )
    if not left:
        raise PolicyError(f"no weights can be offloaded: {said}; {advice}")
    warn_user("shared-weights", f"{said}, so these weights stay where they are; {advice}")
    return left


def _without(units: Sequence[Unit], left_out: Collection[int]) -> list[Unit]:
    """Units without these parameters, by identity. A unit that has no others goes."""
    smaller = [
        (modules, name, [(each, p) for each, p in named if id(p) not in left_out])
        for modules, name, named in units
    ]
    return [unit for unit in smaller if unit[2]]
