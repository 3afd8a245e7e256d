"""Tells which saved tensors are parameters, buffers, or views and casts of them."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Container, Iterable
from typing import final

import torch
from torch import nn

from ebbtide.tensors.memory_parts import addresses_of, modules_of

_AUTOCAST_TYPES = frozenset({torch.bfloat16, torch.float16})


@final
class ParameterIndex:
    """Recognises the parameters and buffers of some modules, their views and their cast copies.

    These tensors are on the device whether or not autograd saves them, so offloading them frees no
    memory. A view is recognised by its memory. A copy (made by autocast, or of a transposed weight)
    has its own storage; it is recognised because its `grad_fn` leads through copying operations to
    the parameter. A frozen parameter has no `grad_fn`; autocast's copy of one is recognised by its
    shape and type.

    Args:
        modules: modules whose parameters and buffers are recognised.

    Attributes:
        resting: offloaded parameters. The cast of a frozen one is treated like any other tensor,
            because the parameter itself is not on the device.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.resting: Container[nn.Parameter] = ()
        self._modules = [weakref.ref(module) for module in modules]
        self._pointers: set[int] = set()
        self._frozen_shapes: set[torch.Size] = set()
        self._copying = _copying_nodes()

    def refresh(self, held: Iterable[torch.Tensor] = ()) -> None:
        """Read the modules again, because parameters may have been replaced, frozen or moved.

        Args:
            held: further tensors to recognise, which other code keeps on the device for as long as
                autograd would.
        """
        pointers: set[int] = set()
        for tensor in held:
            _add(pointers, tensor)
        frozen_shapes: set[torch.Size] = set()
        roots = [module for known in self._modules if (module := known()) is not None]
        for each in itertools.chain.from_iterable(map(modules_of, roots)):
            for _, parameter in each._parameters.items():
                if parameter is None:
                    continue
                _add(pointers, parameter)
                if parameter.requires_grad or parameter in self.resting:
                    continue
                if parameter.dtype not in _AUTOCAST_TYPES and parameter.layout is torch.strided:
                    frozen_shapes.add(parameter.shape)
                    frozen_shapes.add(parameter.shape[::-1])
            for buffer in each._buffers.values():
                if buffer is not None:
                    _add(pointers, buffer)
        pointers.discard(0)  # the pointer of empty tensors
        self._pointers, self._frozen_shapes = pointers, frozen_shapes

    def owns(self, tensor: torch.Tensor, pointer: int) -> bool:
        """Whether a saved tensor is a parameter or buffer, a view of one, or its cast copy.

        Args:
            tensor: the saved tensor.
            pointer: address of the memory of the tensor that it is a view of, or of its storage. It
                is compared with the addresses that `refresh` read. They stay valid because a
                parameter lives as long as its module, and a wrong match would only keep a tensor on
                the device.
        """
        if pointer in self._pointers:
            return True
        node = tensor.grad_fn
        if node is None:
            return isinstance(tensor, nn.Parameter) or self._is_frozen_cast(tensor)
        copying = self._copying
        if type(node) not in copying:
            return False
        while node is not None and type(node) in copying:
            node = node.next_functions[0][0]
        return isinstance(getattr(node, "variable", None), nn.Parameter)

    def owns_outer(self, tensor: torch.Tensor) -> bool:
        """Whether a saved tensor of a wrapper subclass is a parameter, a view or a cast of one."""
        return isinstance(tensor._base, nn.Parameter) or self.owns(tensor, 0)

    def _is_frozen_cast(self, tensor: torch.Tensor) -> bool:
        return (
            bool(self._frozen_shapes)
            and tensor.dtype in _AUTOCAST_TYPES
            and tensor.shape in self._frozen_shapes
        )


def _add(pointers: set[int], tensor: torch.Tensor) -> None:
    if hasattr(tensor, "__tensor_flatten__"):
        pointers.update(addresses_of(tensor))
        return
    try:
        pointers.add(tensor.data_ptr())
        pointers.add(tensor.untyped_storage().data_ptr())
    except (RuntimeError, ValueError, NotImplementedError):  # no plain tensor: look inside
        pointers.update(addresses_of(tensor))


@functools.cache
def _copying_nodes() -> frozenset[type]:
    """Return the types of the `grad_fn` nodes whose output has the values of their first input."""
    matrix = torch.zeros(2, 2, requires_grad=True)
    complex_matrix = torch.zeros(2, 2, dtype=torch.complex64, requires_grad=True)
    operations: list[Callable[[], torch.Tensor]] = [
        lambda: matrix.to(torch.float64),
        lambda: matrix.clone(),
        lambda: matrix.t(),
        lambda: matrix.mT,
        lambda: matrix.transpose(0, 1),
        lambda: matrix.permute(1, 0),
        lambda: matrix.view(4),
        lambda: torch.ops.aten._unsafe_view(matrix, [4]),
        lambda: torch.ops.aten._reshape_alias(matrix, [4], [1]),
        lambda: torch.ops.aten.alias(matrix),
        lambda: matrix.expand(2, 2, 2),
        lambda: matrix[0],
        lambda: matrix[:1],
        lambda: matrix.unsqueeze(0),
        lambda: matrix.squeeze(),
        lambda: matrix.squeeze(0),
        lambda: matrix.unbind()[0],
        lambda: torch.split(matrix, 1)[0],
        lambda: matrix.as_strided((2,), (1,)),
        lambda: matrix.view_as(matrix),
        lambda: torch.view_as_real(complex_matrix),
        lambda: torch.view_as_complex(matrix),
        lambda: complex_matrix.conj(),
        lambda: complex_matrix.real,
    ]
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        return frozenset(type(operation().grad_fn) for operation in operations)
