"""What autograd saved of a weight that rests: where to find it when backward asks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, final

import torch

from ebbtide.errors import SavedTensorModifiedError
from ebbtide.runtime.groups import WeightGroup
from ebbtide.runtime.resting import RestingParameter
from ebbtide.runtime.saved import AbstractDeparted


class Brings(Protocol):
    """Brings groups back."""

    def bring(self, group: WeightGroup) -> torch.Tensor:
        """The group's buffer, (size_bytes,) uint8."""

    def note_saved(self, saved: AbstractWeightTensor) -> None:
        """A graph will ask for a weight."""


class AbstractWeightTensor(AbstractDeparted):
    """A tensor that was saved, and the weight that it can be had from again.

    Args:
        weights: that bring the group back.
        group: that the weight belongs to.
        member: the weight.
        tensor: what was saved.
    """

    __slots__ = ("_group", "_member", "_parameter_version", "_replacements", "_weights")

    def __init__(
        self, weights: Brings, group: WeightGroup, member: RestingParameter, tensor: torch.Tensor
    ) -> None:
        self._weights = weights
        self._group = group
        self._member = member
        self._parameter_version = member.parameter._version
        self._replacements = member.replacements
        super().__init__(tensor)
        weights.note_saved(self)

    def share(self) -> AbstractWeightTensor:
        return self  # it holds nothing

    def is_modified(self) -> bool:
        # In the forward, the stand-in was changed; after it, the parameter.
        member = self._member
        return (
            super().is_modified()
            or member.parameter._version != self._parameter_version
            or member.replacements != self._replacements
        )

    def restore(self) -> torch.Tensor:
        if self.is_modified():
            raise SavedTensorModifiedError(
                f"{self._member.name}, which rests on the host, was changed between the "
                f"forward that used it and its backward; change weights after backward, or call "
                f"the forward again"
            )
        return self._tensor_in(self._storage(self._weights.bring(self._group)))

    def inspect(self) -> torch.Tensor:
        return self.restore()

    @abstractmethod
    def _storage(self, buffer: torch.Tensor) -> torch.UntypedStorage:
        """Like the storage of what was saved, from the buffer of the group."""


@final
class WeightTensor(AbstractWeightTensor):
    """A view of a weight, in whatever buffer its group is."""

    __slots__ = ()

    def _storage(self, buffer: torch.Tensor) -> torch.UntypedStorage:
        return buffer.untyped_storage()


@final
class CastWeightTensor(AbstractWeightTensor):
    """A copy of a weight in another type, as autocast makes them, or a view of one.

    The weight is cast again: a copy that stayed would hold the device's memory from forward to
    backward.
    """

    __slots__ = ("_changes",)

    def __init__(
        self, weights: Brings, group: WeightGroup, member: RestingParameter, tensor: torch.Tensor
    ) -> None:
        self._changes = member.changes
        super().__init__(weights, group, member, tensor)

    def is_modified(self) -> bool:
        # Autograd alone would still have the copy, and go on.
        return super().is_modified() or self._member.changes != self._changes

    def _storage(self, buffer: torch.Tensor) -> torch.UntypedStorage:
        return self._member.view_of(buffer).to(self._dtype).untyped_storage()
