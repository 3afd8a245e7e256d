"""Groups of weights that are copied together, with the memory of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.device import Layer
from ebbtide.runtime.record import STORED, WEIGHT, Record
from ebbtide.stores.store import AbstractStore, RestingSlot
from ebbtide.weights.parameters import OffloadedParameter

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
        store: provides the slot, and memory for gradients.

    Attributes:
        number: as given.
        members: the parameters of the group.
        resting: the slot in which the values rest.
        blocks: slots of the size of the group, each with room for one gradient of each parameter.
        used_elsewhere: whether kernels on other streams than `home` use the buffer.
        open: how many running modules use the group.

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
        self.blocks: list[RestingSlot] = []
        self._store = store
        self._reserved = False
        # The last gradient that was given this memory, by offset and block number.
        self._given: dict[tuple[int, int], StorageWeakRef] = {}
        self.used_elsewhere = False
        self.open = 0

    def start_anew(self, store: AbstractStore) -> None:
        """Forget what an interrupt may have left half changed. The values are in the slot.

        Args:
            store: has taken over the slots.
        """
        self._store = store
        self.state, self.slot = STORED, self.resting
        self.source = self.offloaded = self.buffer = self.ready = None
        self.awaited = self.expected = self.buffer_stays = self.used_elsewhere = False
        self.open = self.unread = 0

    def note_loaded(self) -> None:
        """Note which values the group's new buffer gets: those that the parameters have now.

        Raises:
            PolicyError: the program has given a parameter another shape or dtype.
        """
        for member in self.members:
            member.find_values()
            member.loaded = member.mark()

    def is_outdated(self) -> bool:
        """Whether the program has changed or assigned values since the buffer was filled."""
        return any(member.loaded != member.mark() for member in self.members)

    def forget_memory(self) -> None:
        """Let go of the memory that its parameters had; they are back on the device."""
        for member in self.members:
            member.forget_memory()

    # ---- gradients ----------------------------------------------------------------------------

    def reserve(self) -> None:
        """Have the store set room for one block aside if a parameter requires a gradient.

        Raises:
            StoreFullError: the store has no room.
        """
        if any(member.parameter.requires_grad for member in self.members):
            self._store.reserve(self.size_bytes)
            self._reserved = True

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
                block = self._store.allocate_resting(self.size_bytes, reserved=self._reserved)
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
        return any(begin <= address < begin + self.size_bytes for begin in begins)

    def drop_blocks(self) -> None:
        """Return the blocks to the store. The memory of a referenced gradient stays mapped."""
        if self._reserved:
            self._store.stop_reserving(self.size_bytes)
            self._reserved = False
        while self.blocks:
            self._store.drop(self.blocks.pop())

    def member_at(self, offset_bytes: int) -> OffloadedParameter:
        """The parameter whose values include this offset of the group's memory."""
        for member in reversed(self.members):
            if member.offset_bytes <= offset_bytes and member.size_bytes:
                return member
        return self.members[0]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
