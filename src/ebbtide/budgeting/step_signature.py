"""Tells steps apart that need plans of their own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten


def signature(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return a value that two forwards share if they save the same tensors, as far as one can tell.

    It covers shapes and types of the tensors, plain values such as numbers and text, the modes of
    the modules, which parameters are trained, and autocast.

    Args:
        model: the model.
        args: the positional arguments of the forward.
        kwargs: its keyword arguments.
    """
    leaves, structure = tree_flatten((args, kwargs))
    kinds = tuple(_kind(leaf) for leaf in leaves)
    modes = tuple(module.training for module in model.modules())
    trained = tuple(parameter.requires_grad for parameter in model.parameters())
    device = next(model.parameters()).device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return kinds, str(structure), hash(modes), hash(trained), autocast


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, bool | int | str | None):
        return leaf
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"
