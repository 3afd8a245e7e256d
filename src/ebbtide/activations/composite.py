"""Saves tensors of wrapper subclasses by saving each of their inner tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, final

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from ebbtide.activations.handles import AbstractSaved, Saved, raise_modified, restore

_VALUES = "_values"
"""The name of the elements among the inner tensors of a nested tensor in the jagged layout."""


@final
class CompositeTensor(AbstractSaved):
    """A saved tensor of a wrapper subclass, such as DTensor, whose inner tensors are saved each."""

    __slots__ = ("_context", "_inner", "_others", "_probe", "_size", "_stride", "_type", "_version")

    def __init__(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Saved]) -> None:
        wait = getattr(tensor, "trigger_wait", None)
        if wait is not None:
            # The result of a collective (AsyncCollectiveTensor) is waited for at its first use,
            # which this is: a copy would read memory that the collective has not filled.
            wait()
        names, self._context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: getattr(tensor, name) for name in names}
        # DTensor's parts are its local tensor and, from torch 2.13 on, its mesh.
        self._others = {n: p for n, p in parts.items() if not isinstance(p, torch.Tensor)}
        if isinstance(tensor, NestedTensor):
            # torch compares the lengths of two jagged tensors by asking whether their offsets are
            # the same object, so everything but the values is handed back as it is.
            self._others = {n: p for n, p in parts.items() if n != _VALUES}
            parts = {_VALUES: parts[_VALUES]}
        version = self._version = tensor._version
        inner = {n: p for n, p in parts.items() if isinstance(p, torch.Tensor)}
        self._inner = {n: pack(_at_version(p, version)) for n, p in inner.items()}
        self._type = type(tensor)
        self._size = tensor.shape
        self._stride = tensor.stride()
        # It shares the version counter of the tensor and, emptied, not the memory. The inner
        # tensors have counters of their own, which changes to the outer tensor do not touch.
        self._probe: Any = tensor.detach()
        for name, part in inner.items():
            with contextlib.suppress(AttributeError):  # nested tensors compute a few small ones
                setattr(self._probe, name, part.new_empty(0))

    def restore(self) -> torch.Tensor:
        if self._probe._version != self._version:
            raise_modified(self._probe, self._version, self._size)
        parts = {name: restore(saved) for name, saved in self._inner.items()} | self._others
        return self._type.__tensor_unflatten__(  # type: ignore[attr-defined, no-any-return]
            parts, self._context, self._size, self._stride
        )


def _at_version(part: torch.Tensor, version: int) -> torch.Tensor:
    """Return an inner tensor that is at a version of its own whenever the outer tensor is.

    An in-place change of the outer tensor does not count in the inner tensors' versions. A record
    of the bytes from before the change would be taken for one of the present bytes.
    """
    if version == 0:
        return part
    alias = part.data
    torch._C._autograd._unsafe_set_version_counter((alias,), (version + part._version,))
    return alias


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


def is_plain_subclass(tensor: torch.Tensor, plain_types: frozenset[type]) -> bool:
    """Whether a tensor is a plain one, to which its class only adds Python, as MONAI's MetaTensor.

    Args:
        tensor: a saved tensor.
        plain_types: the classes of tensors that are packed without this question.
    """
    kind: Any = type(tensor)
    if kind in plain_types or isinstance(tensor, torch.nn.Parameter):
        return False
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_quantized(tensor):
        return False
    return tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")
