"""The interface of a model's offloaded weights, on an accelerator and on a CPU alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import torch

from ebbtide.activations.handles import Saved
from ebbtide.parameters.parameters import OffloadedParameter
from ebbtide.stores.store import RestingSlot
from ebbtide.transfers.transfers import Transfers
from ebbtide.weights.groups import OffloadedParameters, WeightGroup


class AbstractWeights(ABC):
    """The offloaded weights of one model. Hooks report to it which modules and passes run.

    Args:
        groups: the weight groups, in the order of the model's layers.
        parameters: the parameters of all groups.

    Attributes:
        groups: as given.
        parameters: as given.
    """

    def __init__(self, groups: Sequence[WeightGroup], parameters: OffloadedParameters) -> None:
        self.groups = groups
        self.parameters = parameters

    @property
    def peak_groups(self) -> int:
        """The most groups that were on the device at once; 0 if groups are not copied at all."""
        return 0

    @abstractmethod
    def begin_forward(self) -> None:
        """Note that a forward pass of the model begins. It uses the current values on the host.

        Raises:
            PolicyError: the program has given a parameter another shape or dtype.
        """

    @abstractmethod
    def end_forward(self) -> None:
        """Note that the model's forward pass has ended."""

    @abstractmethod
    def enter(self, group: WeightGroup) -> None:
        """Note that a module which uses this group begins to run."""

    @abstractmethod
    def leave(self, group: WeightGroup) -> None:
        """Note that a module which uses this group has finished."""

    @abstractmethod
    def begin_backward(self, groups: Sequence[WeightGroup]) -> None:
        """Note that the backward pass of a module begins.

        Args:
            groups: the groups that the module uses.
        """

    def leave_ended(self, find_running: Callable[[], Collection[WeightGroup]]) -> None:  # noqa: B027
        """Leave the groups whose modules an interrupt has ended, for which torch calls no hook.

        Args:
            find_running: returns the groups whose modules are running.
        """

    def is_working(self) -> bool:
        """Whether the model's forward pass or one of its modules is running."""
        return False

    def substitute(self, group: WeightGroup, member: OffloadedParameter) -> torch.Tensor:  # noqa: ARG002
        """The tensor that code gets when it reads a parameter of a module that is not running."""
        return member.parameter

    def pack(self, tensor: torch.Tensor, whole: torch.Tensor) -> Saved | None:  # noqa: ARG002
        """Replace a saved tensor by a handle if it is a view or a cast of an offloaded weight.

        Args:
            tensor: the tensor that autograd saves.
            whole: the base of `tensor` if that is a view, else `tensor` itself.

        Returns:
            The handle; None if the tensor belongs to no offloaded weight.
        """
        return None

    @abstractmethod
    def resting_slots(self) -> list[RestingSlot]:
        """The memory of the store that weights and gradients rest in."""

    @abstractmethod
    def start_anew(self, transfers: Transfers) -> None:
        """Forget what an interrupt may have left half done, and go on with other transfers.

        No forward or backward runs, and no copy is under way. The modules get their parameters
        back. Graphs that are alive can still be used.

        Args:
            transfers: their store has taken over the resting slots.
        """

    @abstractmethod
    def settle(self) -> None:
        """Block the host until no copy reads the host values, so that their memory can be freed."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory of the weights. The parameters must be back on the model's device."""
