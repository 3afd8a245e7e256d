"""What autograd's graph holds instead of a weight: it finds the values on the device again."""

from __future__ import annotations

from typing import Protocol, final

import torch

from ebbtide.activations.handles import AbstractAway, EmptyTensors
from ebbtide.errors import SavedTensorModifiedError
from ebbtide.parameters.parameters import OffloadedParameter
from ebbtide.weights.groups import WeightGroup


class BringsWeights(Protocol):
    """The weights of a model, as a handle on one of them needs them."""

    empty: EmptyTensors

    def adopt_given(self, group: WeightGroup, member: OffloadedParameter) -> None:
        """Adopt a parameter that the program has put back into its module."""

    def bring(self, group: WeightGroup, member: OffloadedParameter) -> torch.Tensor:
        """Return the group's buffer, ready for the kernels that the calling thread queues next."""

    def add_handle(self, handle: WeightTensor, group: WeightGroup) -> None:
        """Count one more saved tensor that needs the values of a group, as long as it lives."""


@final
class WeightTensor(AbstractAway):
    """Stands for a weight that autograd saved: a view of it, or a cast copy made by autocast.

    A cast copy is not stored but cast again in backward, because keeping it would occupy device
    memory from forward to backward.

    Args:
        weights: reloads the group.
        group: the group of the weight.
        member: the weight.
        tensor: the tensor that autograd saved.
        is_cast: whether `tensor` is a copy in another dtype.
    """

    __slots__ = (
        "_changes",
        "_group",
        "_is_cast",
        "_member",
        "_parameter",
        "_parameter_version",
        "_replacements",
        "_values",
        "_weights",
    )

    def __init__(
        self,
        weights: BringsWeights,
        group: WeightGroup,
        member: OffloadedParameter,
        tensor: torch.Tensor,
        *,
        is_cast: bool,
    ) -> None:
        self._weights = weights
        self._group = group
        self._member = member
        self._is_cast = is_cast
        self._changes = member.changes
        self._parameter = member.parameter
        self._parameter_version = member.parameter._version
        self._replacements = member.replacements
        self._values = member.loaded
        super().__init__(tensor, tensor._version, weights.empty)
        weights.add_handle(self, group)

    def share(self) -> WeightTensor:
        return self  # it holds no memory that sharing could duplicate

    def is_modified(self) -> bool:
        # A change during the forward raises the device parameter's version (checked by the base
        # class); a change after it raises the version of the parameter.
        member = self._member
        if member.parameter is not self._parameter:
            self._weights.adopt_given(self._group, member)
        return (
            super().is_modified()
            or member.parameter is not self._parameter
            or member.parameter._version != self._parameter_version
            or member.replacements != self._replacements
            or not member.has_values_in(self._values)
            # Stricter than autograd: it would still have its own cast copy and use that.
            or (self._is_cast and member.changes != self._changes)
        )

    def restore(self) -> torch.Tensor:
        if self.is_modified():
            raise SavedTensorModifiedError(
                f"{self._member.name}, whose values are offloaded, was modified between the "
                f"forward that used it and its backward; modify weights after backward, or run "
                f"the forward again"
            )
        buffer = self._weights.bring(self._group, self._member)
        if self._is_cast:
            buffer = self._member.view_of(buffer).to(self._dtype)
        return self._tensor_in(buffer.untyped_storage())

    def peek(self) -> torch.Tensor:
        return self.restore()
