"""What else than its arguments the forward of a module depends on, and how it is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, final

import torch
from torch import Tensor, nn

from ebbtide.errors import PolicyError, SavedTensorModifiedError
from ebbtide.recomputation.module_attributes import ModuleAttributes
from ebbtide.tensors.memory_parts import parts_of
from ebbtide.tensors.random_numbers import note_numbers_of_python
from ebbtide.units import format_size

_MOST_COPIED_BYTES: Final = 64 * 2**10


@final
class ModuleState:
    """The state of a module and its submodules when a forward begins.

    A forward that runs again must find the module as the first forward found it, and leave no other
    traces than the first one did:

    - Buffers of up to 64 KiB are copied before the first forward, and the second one works on a
      copy of the copy. So the running statistics of a batch norm are updated once.
    - The module and its submodules are in the same mode again, training or evaluation. What the
      second forward does to their attributes is undone: a counter counts once.
    - Python and NumPy give the same random numbers again; torch's checkpoint sees to torch's.
    - Parameters and larger buffers must be unchanged. Their version counters tell.

    Args:
        module: the module.
        where: names it in errors.
    """

    def __init__(self, module: nn.Module, where: str) -> None:
        self._where = where
        self._put_back_numbers = note_numbers_of_python()
        self._modes: list[tuple[nn.Module, bool]] = []
        self._copies: list[tuple[nn.Module, str, Tensor]] = []
        self._constants: list[tuple[str, Tensor, int]] = []
        for prefix, each in module.named_modules():
            self._modes.append((each, each.training))
            for name, buffer in each._buffers.items():
                if buffer is None:
                    continue
                if _size_bytes(buffer) <= _MOST_COPIED_BYTES:
                    self._copies.append((each, name, buffer.detach().clone()))
                else:
                    self._note_constant(f"{prefix}.{name}".lstrip("."), buffer)
            for name, parameter in each._parameters.items():
                # Weights that ebbtide offloads are replaced for each call, and so are sharded ones.
                if type(parameter) is nn.Parameter:
                    self._note_constant(f"{prefix}.{name}".lstrip("."), parameter)

    def _note_constant(self, name: str, tensor: Tensor) -> None:
        self._constants.append((name, tensor, tensor._version))

    def check_after_forward(self) -> None:
        """Check that the forward has changed no parameter and no large buffer.

        Raises:
            PolicyError: it has, so running it again would give something else.
        """
        for name, tensor, version in self._constants:
            if tensor._version != version:
                raise PolicyError(
                    f"{self._where} cannot be recomputed, because its forward changes {name} "
                    f"({format_size(_size_bytes(tensor))}) in place, and only buffers of up to "
                    f"{format_size(_MOST_COPIED_BYTES)} are put back; leave the layer out: name "
                    f"the others with layers=[...]"
                )

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Within the block the module is as it was before the first forward.

        Raises:
            SavedTensorModifiedError: a parameter or a large buffer has been modified since.
        """
        self._check_before_recomputation()
        attributes = [ModuleAttributes(module) for module, _ in self._modes]
        buffers = [(module, name, module._buffers.get(name)) for module, name, _ in self._copies]
        put_back_numbers = note_numbers_of_python()
        try:
            self._put_back_numbers()
            for module, training in self._modes:
                module.training = training
            for module, name, copied in self._copies:
                module._buffers[name] = copied.clone()
            yield
        finally:
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            for each in attributes:
                each.put_back()
            put_back_numbers()

    def _check_before_recomputation(self) -> None:
        for name, tensor, version in self._constants:
            if tensor._version != version:
                raise SavedTensorModifiedError(
                    f"{name} of {self._where} was modified in place after the layer's forward had "
                    f"used it at version {version}; it is at version {tensor._version} when "
                    f"backward runs the forward again. Call backward before optimizer.step()"
                )


def _size_bytes(tensor: Tensor) -> int:
    return sum(part.nbytes for part in parts_of(tensor) if part.layout is torch.strided)
