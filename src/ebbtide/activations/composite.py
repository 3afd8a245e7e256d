"""Saves tensors of wrapper subclasses by saving each of their inner tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from ebbtide.activations.handles import AbstractSaved, Saved, restore


@final
class CompositeTensor(AbstractSaved):
    """A saved tensor of a wrapper subclass, such as DTensor, whose inner tensors are saved each."""

    __slots__ = ("_context", "_inner", "_others", "_size", "_stride", "_type")

    def __init__(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Saved]) -> None:
        names, self._context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: getattr(tensor, name) for name in names}
        # DTensor's parts are its local tensor and, from torch 2.13 on, its mesh.
        self._others = {n: p for n, p in parts.items() if not isinstance(p, torch.Tensor)}
        self._inner = {n: pack(p) for n, p in parts.items() if isinstance(p, torch.Tensor)}
        self._type = type(tensor)
        self._size = tensor.shape
        self._stride = tensor.stride()

    def restore(self) -> torch.Tensor:
        parts = {name: restore(saved) for name, saved in self._inner.items()} | self._others
        return self._type.__tensor_unflatten__(  # type: ignore[attr-defined, no-any-return]
            parts, self._context, self._size, self._stride
        )


@final
class QuantizedTensor(AbstractSaved):
    """A saved quantized tensor of Transformer Engine: its saved data tensors and its empty shell.

    In Transformer Engine's protocol `prepare_for_saving` takes the data out of a tensor, and
    `restore_from_saved` puts them back. Both change the tensor itself, so they are called on
    detached copies only.
    """

    __slots__ = ("_inner", "_shell")

    def __init__(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Saved]) -> None:
        parts, self._shell = tensor.detach().prepare_for_saving()  # type: ignore[attr-defined]
        self._inner = [None if part is None else pack(part) for part in parts]

    def restore(self) -> torch.Tensor:
        shell = self._shell
        shell.restore_from_saved([None if p is None else restore(p) for p in self._inner])
        tensor: torch.Tensor = shell.detach()
        shell.prepare_for_saving()  # the shell is empty again
        return tensor


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the methods of Transformer Engine's protocol."""
    return hasattr(tensor, "prepare_for_saving") and hasattr(tensor, "restore_from_saved")
