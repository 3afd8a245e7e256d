"""Groups of weights that are copied together, memory of their gradients, and their interface."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.device import Layer
from ebbtide.errors import PolicyError
from ebbtide.runtime.handles import Saved
from ebbtide.runtime.record import STORED, WEIGHT, Record
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores.store import AbstractStore, RestingSlot
from ebbtide.weights.parameters import OffloadedParameter, find_shared

_ALIGNMENT_BYTES = 512


@final
class WeightGroup(Record):
    """The parameters of one layer, which one copy brings to the device.

    The group is a record (`ebbtide.runtime.record`) in the state RELOADED while it has a device
    buffer, and STORED otherwise.

    Args:
        number: the position of the group in the order of the model's layers.
        name: the name of the layer.
        parameters: the parameters and their names; their values move to a slot of the store.
        store: provides the slot.

    Attributes:
        number: as given.
        members: the parameters of the group.
        used_elsewhere: whether kernels on other streams than `home` use the buffer.
        open: how many running modules use the group.
        num_backwards: how many modules that use the group are in their backward.
        loaded_version: versions of the parameters when the values in the buffer were read.

    Raises:
        StoreFullError: the store has no room for the group.
    """

    kind = WEIGHT

    def __init__(
        self,
        number: int,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        store: AbstractStore,
    ) -> None:
        self.number = number
        self.members: list[OffloadedParameter] = []
        size_bytes = 0
        for parameter_name, parameter in parameters:
            self.members.append(OffloadedParameter(parameter_name, parameter, size_bytes))
            size_bytes += _aligned(self.members[-1].size_bytes)
        super().__init__(Layer(number, name), 0, size_bytes, STORED)
        self.slot = self.resting = store.allocate_resting(size_bytes)
        for member in self.members:
            member.rest_in(self.resting.tensor)
        self.used_elsewhere = False
        self.open = self.num_backwards = self.loaded_version = 0

    def start_anew(self) -> None:
        """Forget what an interrupt may have left half changed. The values are in the slot."""
        self.state, self.slot = STORED, self.resting
        self.source = self.offloaded = self.buffer = self.ready = None
        self.awaited = self.expected = self.buffer_stays = self.used_elsewhere = False
        self.open = self.num_backwards = self.unread = 0

    @property
    def is_in_use(self) -> bool:
        """Whether the forward or the backward of a module that uses the group is running."""
        return bool(self.open or self.num_backwards)

    def note_loaded(self) -> None:
        """Note which values the group's new buffer gets: those that the parameters have now.

        Raises:
            PolicyError: the program has given a parameter another shape or dtype.
        """
        self.loaded_version = self._version()
        for member in self.members:
            member.loaded = member.find_values()

    def is_outdated(self) -> bool:
        """Whether the program has changed or assigned values since the buffer was filled."""
        return self._version() != self.loaded_version or any(
            member.loaded is not member.find_values() for member in self.members
        )

    def forget_memory(self) -> None:
        """Let go of the memory that its parameters had; they are back on the device."""
        for member in self.members:
            member.forget_memory()

    def _version(self) -> int:
        """A number that grows when the program changes a parameter of the group in place."""
        return sum(member.parameter._version for member in self.members)

    def member_at(self, offset_bytes: int) -> OffloadedParameter:
        """The parameter whose values include this offset of the group's memory."""
        for member in reversed(self.members):
            if member.offset_bytes <= offset_bytes and member.size_bytes:
                return member
        return self.members[0]


@final
class OffloadedParameters:
    """All offloaded parameters of a model, with a lookup by `nn.Parameter`.

    Args:
        groups: the weight groups, in the order of the model's layers.
        home: the device on which the model computes.
    """

    def __init__(self, groups: Sequence[WeightGroup], home: torch.device) -> None:
        self._groups = groups
        self._home = home
        self._found = {id(m.parameter): (group, m) for group in groups for m in group.members}

    def find(self, parameter: object) -> tuple[WeightGroup, OffloadedParameter] | None:
        """The group and the offloaded parameter of this `nn.Parameter`; None if not offloaded."""
        return self._found.get(id(parameter))

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._found

    def members(self) -> Iterator[tuple[WeightGroup, OffloadedParameter]]:
        """All groups and offloaded parameters, in the order of the model's layers."""
        for group in self._groups:
            for member in group.members:
                yield group, member

    def present(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that the modules hold now in the places of the offloaded ones."""
        for _, member in self.members():
            for given in member.find_given():
                yield member.name, given

    def put_back(self) -> None:
        """Put all parameters back into their modules, whatever the modules hold now."""
        for _, member in self.members():
            member.put_back()

    def begin_forward(self) -> None:
        """Find values and parameters that the program has assigned since the last forward.

        A new parameter on the model's device is not adopted yet, because it works as it is and
        `torch.func.functional_call` installs such parameters for one call only. A new parameter on
        the host cannot be computed with, so it is adopted.

        Raises:
            PolicyError: the new values have another shape or dtype, or only some of the modules
                that share the parameter got the new one.
        """
        elsewhere = []
        for group, member in self.members():
            self.adopt_given(group, member)
            if member.find_values() is not member.host:
                elsewhere.append((group, member))
        if elsewhere:
            self._move_in(elsewhere)

    def adopt_given(self, group: WeightGroup, member: OffloadedParameter) -> None:
        """Adopt a new parameter on the host that a module holds now.

        Raises:
            PolicyError: see `begin_forward`.
        """
        for given in member.find_given():
            if given.device.type != self._home.type:
                self._replace(member, given, group)

    def adopt_all(self) -> None:
        """Adopt the parameters that modules hold now, which are moved back by `restore_to`."""
        for group, member in self.members():
            with contextlib.suppress(PolicyError):  # what does not fit stays where it is
                self.adopt_given(group, member)

    def begin_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Adopt the new parameters that an optimizer steps with, which are there to stay.

        A new parameter that does not fit is not offloaded; it works where it is.

        Args:
            parameters: the parameters of the optimizer.
        """
        strangers = {id(p) for p in parameters if p not in self}
        elsewhere = []
        for group, member in self.members():
            with contextlib.suppress(PolicyError):
                for given in member.find_given() if strangers else ():
                    if id(given) in strangers:
                        self._replace(member, given, group)
                if member.find_values() is not member.host:
                    elsewhere.append((group, member))
        if elsewhere:
            self._move_in(elsewhere)

    def find_staying(self) -> set[OffloadedParameter]:
        """Find parameters in memory that others refer to, which are to stay there after detach.

        It is either memory that the program has given them, or that in which they rest.
        """
        members = [m for _, m in self.members() if m.is_at_rest]
        shared = find_shared([m.parameter for m in members], aliases=1, collects=True)
        return {m for _, m in self.members() if not m.is_at_rest} | {members[n] for n in shared}

    def _move_in(self, elsewhere: Sequence[tuple[WeightGroup, OffloadedParameter]]) -> None:
        """Move values that are elsewhere into their groups' memory where nobody could notice."""
        # Guard memory-of-others: values move only if nothing else refers to their memory or to
        # where they rest. A program that holds the one would not see changes any more, and what it
        # holds of the other would be overwritten.
        members = [m for group, m in elsewhere if not group.handles and m.can_move_in()]
        shared = find_shared([m.parameter for m in members], aliases=1)
        for position, member in enumerate(members):
            if position not in shared:
                member.move_in()

    def _replace(self, member: OffloadedParameter, given: nn.Parameter, group: WeightGroup) -> None:
        before = id(member.parameter)
        member.replace_by(given)
        del self._found[before]
        self._found[id(given)] = group, member


@final
class GradientBuffers:
    """Host memory for the gradients of one group. Each block has room for one set of gradients.

    Args:
        group: the group. If any parameter requires a gradient, room for one block is reserved.
        store: provides the blocks.

    Attributes:
        blocks: slots, each of the size of the group.

    Raises:
        StoreFullError: the store has no room for a block.
    """

    def __init__(self, group: WeightGroup, store: AbstractStore) -> None:
        self._group = group
        self._store = store
        self.blocks: list[RestingSlot] = []
        self._reserved = any(member.parameter.requires_grad for member in group.members)
        if self._reserved:
            store.reserve(group.size_bytes)
        # The last gradient that was given this memory, by offset and block number.
        self._given: dict[tuple[int, int], StorageWeakRef] = {}

    def allocate(self, member: OffloadedParameter) -> tuple[torch.Tensor, RestingSlot]:
        """Find memory for one gradient that no earlier gradient uses any more.

        Returns:
            The gradient, in a storage of its own, and the block that contains it.

        Raises:
            StoreFullError: the user keeps earlier gradients, and the store has no room for more.
        """
        number = 0
        while True:
            if number == len(self.blocks):
                block = self._store.allocate_resting(
                    self._group.size_bytes, reserved=self._reserved
                )
                self._reserved = False
                self.blocks.append(block)
            given = self._given.get((member.offset_bytes, number))
            # Guard gradient-memory-reuse: a gradient's memory is reused only when nobody refers to
            # the gradient. The sum accumulated so far, or a gradient that the user keeps, would be
            # overwritten by the next gradient.
            if given is None or given.expired():  # type: ignore[no-untyped-call]
                break
            number += 1
        block = self.blocks[number]
        gradient = member.own_view_of(block.tensor)
        reference = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
        self._given[member.offset_bytes, number] = reference
        return gradient, block

    def holds(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient is in one of the blocks."""
        address = gradient.data_ptr()
        begins = (block.tensor.data_ptr() for block in self.blocks)
        return any(begin <= address < begin + self._group.size_bytes for begin in begins)

    def move_to(self, store: AbstractStore) -> None:
        """Go on with another store, which has taken over the blocks."""
        self._store = store

    def give_back(self) -> None:
        """Return the blocks to the store. The memory of a referenced gradient stays mapped."""
        while self.blocks:
            self._store.drop(self.blocks.pop())


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


# ---- The interface of a model's offloaded weights, on an accelerator and on a CPU alike ----


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
