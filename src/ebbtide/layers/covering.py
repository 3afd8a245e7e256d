"""The modules that are the layers of a plan: blocks and what is beside them, or their parts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ebbtide.errors import PolicyError
from ebbtide.hooks.layers import is_script
from ebbtide.layers.search import find_layers


def covering_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's blocks and of the modules beside them.

    What modules beside the blocks save, such as an FNO's lifting and projection, would otherwise be
    outside of all layers, and so stay on the device.

    Raises:
        PolicyError: the model has no modules.
    """
    blocks = set(find_layers(model).modules)
    names = list(_cover(model, "", blocks))
    if not names:
        raise PolicyError(
            f"{type(model).__name__} has no modules with parameters, so it has no layers to plan "
            f"for; put what it computes into modules"
        )
    return names


def _cover(module: nn.Module, prefix: str, blocks: set[nn.Module]) -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if is_script(child):
            continue  # it can be no layer
        if child in blocks:
            yield path
        elif isinstance(child, nn.ModuleList | nn.ModuleDict) or not blocks.isdisjoint(
            child.modules()
        ):
            yield from _cover(child, f"{path}.", blocks)
        elif next(child.parameters(), None) is not None:
            yield path


def parts_of(model: nn.Module, name: str) -> list[str]:
    """Return the names of the modules with parameters that a module consists of, one level down.

    A pass of a smaller module needs less memory at once, and so does a second forward of it. In
    return, more of what is saved is between modules, where it can be no more than offloaded.

    Args:
        model: the model.
        name: name of the module.
    """
    return list(_parts(model.get_submodule(name), f"{name}."))


def _parts(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if is_script(child) or next(child.parameters(), None) is None:
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child, f"{path}.")
        else:
            yield path
