"""Weights that come and go together, and the host memory of their gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.device import AbstractDevice, AbstractEvent, AbstractStream
from ebbtide.errors import PolicyError
from ebbtide.runtime.ranges import Layer
from ebbtide.runtime.resting import RestingParameter
from ebbtide.stores.host_memory import (
    HostMemory,
    allocate_by_torch,
    map_exactly,
    warn_of_pageable,
    whole_pages,
)

Allocate = Callable[[int], HostMemory]
"""Gives host memory of at least so many bytes."""

_ALIGNMENT_BYTES = 512


@final
class WeightGroup:
    """Parameters that come and go together, in one copy.

    Args:
        number: in the order of the model.
        parameters: with their names; their values move to the host.
        allocate: gives host memory.

    Attributes:
        number: in the order of the model.
        members: its parameters.
        size_bytes: of its memory, padding included.
        memory: of the host.
        buffer: on the device, (size_bytes,) uint8; None while it is not there.
        loaded: after this event the buffer holds the values.
        awaited: the compute stream waits for `loaded`.
        home: the compute stream to which the buffer's memory belongs.
        roamed: whether kernels of other streams use the buffer.
        open: modules between their begin and their end that use it.
    """

    def __init__(
        self, number: int, parameters: Sequence[tuple[str, nn.Parameter]], allocate: Allocate
    ) -> None:
        self.number = number
        self.members: list[RestingParameter] = []
        self.size_bytes = 0
        for name, parameter in parameters:
            self.members.append(RestingParameter(name, parameter, self.size_bytes))
            self.size_bytes += _aligned(self.members[-1].size_bytes)
        self.memory = allocate(self.size_bytes)
        for member in self.members:
            member.rest_in(self.memory.tensor)
        self.buffer: torch.Tensor | None = None
        self.loaded: AbstractEvent | None = None
        self.awaited = False
        self.home: AbstractStream | None = None
        self.roamed = False
        self.open = 0

    @property
    def layer(self) -> Layer:
        """For ranges in the profiler."""
        return Layer(self.number, "weights")

    def member_at(self, offset_bytes: int) -> RestingParameter:
        """Whose values are at this place of its memory."""
        for member in reversed(self.members):
            if member.offset_bytes <= offset_bytes and member.size_bytes:
                return member
        return self.members[0]


@final
class RestingIndex:
    """The members of all groups, by their parameters.

    Args:
        groups: of the model.
        home: where the model computes.
    """

    def __init__(self, groups: Sequence[WeightGroup], home: torch.device) -> None:
        self._groups = groups
        self._home = home
        self._found = {id(m.parameter): (group, m) for group in groups for m in group.members}

    def find(self, parameter: object) -> tuple[WeightGroup, RestingParameter] | None:
        """The member whose parameter this is, and its group; None if it rests nowhere."""
        return self._found.get(id(parameter))

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._found

    def members(self) -> Iterator[tuple[WeightGroup, RestingParameter]]:
        """All of them, in the order of the model."""
        for group in self._groups:
            for member in group.members:
                yield group, member

    def begin_forward(self) -> None:
        """Take what somebody else has given them since.

        A parameter of the device in the place of one stays for now, and works as it is:
        `torch.func.functional_call` puts some there for one call. On the host it cannot work.

        Raises:
            PolicyError: it is of another shape or type, or is not given to all that hold it.
        """
        for group, member in self.members():
            member.adopt_values()
            for given in member.find_given():
                if given.device.type != self._home.type:
                    self._replace(group, member, given)

    def begin_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """An optimizer steps: parameters in the place of others are there to stay.

        One that does not fit works where it is.

        Args:
            parameters: the optimizer's.
        """
        strangers = {id(p) for p in parameters if p not in self}
        for group, member in self.members() if strangers else ():
            for given in member.find_given():
                if id(given) in strangers:
                    with contextlib.suppress(PolicyError):
                        self._replace(group, member, given)

    def _replace(self, group: WeightGroup, member: RestingParameter, given: nn.Parameter) -> None:
        before = id(member.parameter)
        member.take_place(given)
        del self._found[before]
        self._found[id(given)] = group, member


@final
class Landings:
    """Host memory for the gradients of one group, in blocks that hold one of each.

    Args:
        group: whose gradients.
        allocate: gives host memory.

    Attributes:
        blocks: each of the size of the group.
    """

    def __init__(self, group: WeightGroup, allocate: Allocate) -> None:
        self._group = group
        self._allocate = allocate
        self.blocks: list[HostMemory] = []
        self._given: dict[tuple[int, int], StorageWeakRef] = {}  # by offset and block

    def take(self, member: RestingParameter) -> torch.Tensor:
        """Memory for one gradient that nobody holds any more, in a storage of its own."""
        number = 0
        while True:
            if number == len(self.blocks):
                self.blocks.append(self._allocate(self._group.size_bytes))
            given = self._given.get((member.offset_bytes, number))
            if given is None or given.expired():  # type: ignore[no-untyped-call]
                break
            number += 1
        landing = member.own_view_of(self.blocks[number].tensor)
        reference = StorageWeakRef(landing.untyped_storage())  # type: ignore[no-untyped-call]
        self._given[member.offset_bytes, number] = reference
        return landing

    def holds(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient is in this memory."""
        address = gradient.data_ptr()
        begins = (block.tensor.data_ptr() for block in self.blocks)
        return any(begin <= address < begin + self._group.size_bytes for begin in begins)

    def give_back(self) -> None:
        """Give the memory back; a gradient that somebody holds keeps it mapped."""
        while self.blocks:
            self.blocks.pop().give_back()
        self._given.clear()


def allocate_host_memory(device: AbstractDevice, size_bytes: int) -> HostMemory:
    """Host memory that copies need not block for, where the system grants it."""
    size_bytes = whole_pages(max(size_bytes, 1))
    memory = map_exactly(device, size_bytes)
    if memory is None:
        memory = allocate_by_torch(device, 2 ** math.ceil(math.log2(size_bytes)))
    if memory.refusal is not None:
        warn_of_pageable(size_bytes, memory.refusal)
    return memory


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
