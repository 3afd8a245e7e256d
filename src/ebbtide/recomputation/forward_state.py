"""Repeats a forward that ran out of memory, from what it found when it began."""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten

from ebbtide.recomputation.module_state import ModuleNote
from ebbtide.tensors.caches import is_cache
from ebbtide.tensors.memory_parts import parts_of
from ebbtide.tensors.random_numbers import note_random_numbers

_MOST_COPIED_BYTES: Final = 2**20  # of all buffers together


@final
class ForwardState:
    """What a forward of a model begins with, so that it can be repeated as if it had not run.

    These are the random numbers of torch, of the model's device, of Python and of NumPy, the
    buffers, and the other attributes of the modules, with the lists, sets and dicts among them. The
    arguments, the parameters, their gradients, and buffers of more than 1 MiB in all must be
    unchanged. What a forward does to other objects is not known.

    Args:
        model: the model.
        args: the positional arguments of its forward.
        kwargs: the keyword arguments.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments = args, kwargs
        self._leaves, self._structure = _flatten(args, kwargs)
        self._attributes = [ModuleNote(module) for module in model.modules()]
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        constants = [each for each in self._leaves if isinstance(each, Tensor)]
        # Offloaded and sharded weights are of other types; each forward gets them anew.
        constants += (each for each in model.parameters() if type(each) is nn.Parameter)
        self._gradients = [(each, each.grad) for each in model.parameters()]
        constants += (each for _, each in self._gradients if each is not None)
        left_bytes = _MOST_COPIED_BYTES
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or is_lazy(buffer):
                    continue
                left_bytes -= sum(part.nbytes for part in parts_of(buffer))
                if left_bytes >= 0:
                    copied = buffer.detach().clone()
                    self._buffers.append((module, name, buffer, copied))
                else:
                    constants.append(buffer)
        self._versions = [(each, each._version) for each in constants if not each.is_inference()]
        self._put_back_numbers = note_random_numbers({each.device for each in constants})

    def can_be_put_back(self) -> bool:
        """Whether the forward has changed only what `put_back` puts back, as far as is known."""
        if _num_processes() > 1:
            return False  # the others wait where this one was
        if any(each.grad is not before for each, before in self._gradients):
            return False
        leaves, structure = _flatten(*self._arguments)
        same = len(leaves) == len(self._leaves) and structure == self._structure
        if not same or any(map(is_cache, leaves)):
            return False
        if any(now is not before for now, before in zip(leaves, self._leaves, strict=True)):
            return False
        return all(each._version == version for each, version in self._versions)

    def put_back(self) -> None:
        """Put back what the forward began with."""
        self._put_back_numbers()
        for attributes in self._attributes:
            attributes.put_back()
        for module, name, buffer, copied in self._buffers:
            module._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(copied)


def _num_processes() -> int:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    return tree_flatten((args, kwargs))
