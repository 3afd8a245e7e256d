"""Weights that are on the device only while they work: groups that come and go.

A parameter of a group rests in host memory: there, the `nn.Parameter` is a tensor of the host. When
a module that uses it is entered, its data is a view of a device buffer into which the whole group
has been copied; when the module is left, it is the host's again. The buffer goes when room is
needed: at most two groups are there at once, the one that works and the one that is next, and those
of modules that are still open around them.

What autograd saves of a weight is a view of such a buffer. It is replaced by a `WeightTensor`,
which finds the bytes at the same place of whatever buffer the group is in when backward asks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from ebbtide.devices.base import AbstractDevice, AbstractEvent, AbstractStream
from ebbtide.runtime.ranges import Layer, profiler_range
from ebbtide.runtime.saved import AbstractDeparted
from ebbtide.stores.host_memory import (
    HostMemory,
    allocate_by_torch,
    map_exactly,
    warn_of_pageable,
    whole_pages,
)

_ALIGNMENT_BYTES = 512


@final
class RestingParameter:
    """A parameter, and where it rests.

    Attributes:
        parameter: the one object that model and optimizer know.
        name: in the model.
        offset_bytes: in the memory of its group, on the host and on the device.
        size_bytes: of its values.
        host: its values at rest, in a storage of their own.
        version: of the parameter when the group came to the device.
    """

    def __init__(self, name: str, parameter: nn.Parameter, offset_bytes: int) -> None:
        self.name = name
        self.parameter = parameter
        self.offset_bytes = offset_bytes
        self.size_bytes = parameter.numel() * parameter.element_size()
        self._size, self._stride = parameter.shape, _dense_stride(parameter)
        self.host = parameter.data
        self.version = 0

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Its values in the memory of its group, sharing the storage."""
        dtype = self.parameter.dtype
        view = torch.empty(0, dtype=dtype, device=memory.device)
        offset = self.offset_bytes // dtype.itemsize
        return view.set_(memory.untyped_storage(), offset, self._size, self._stride)

    def own_view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Its values in host memory of its group, in a storage of their own.

        So that `torch.save` writes this parameter and not its group.
        """
        part = memory.numpy()[self.offset_bytes : self.offset_bytes + self.size_bytes]
        flat = torch.from_numpy(part).view(self.parameter.dtype)
        return flat.as_strided(self._size, self._stride)

    def rest_in(self, memory: torch.Tensor) -> None:
        """Move its values to host memory of its group."""
        self.host = self.own_view_of(memory)
        self.host.copy_(self.parameter.data)
        self.parameter.data = self.host

    def adopt(self) -> None:
        """Take values that somebody else has given it (`parameter.data = ...`, `model.to(...)`)."""
        if self.parameter.data_ptr() != self.host.data_ptr():
            self.host.copy_(self.parameter.data)
            self.parameter.data = self.host


@final
class WeightGroup:
    """Parameters that come and go together, in one copy.

    Attributes:
        number: in the order of the model.
        members: its parameters.
        size_bytes: of its memory, padding included.
        memory: of the host.
        buffer: on the device, (size_bytes,) uint8; None while it is not there.
        loaded: after this event the buffer holds the values.
        awaited: the compute stream waits for `loaded`.
        home: the compute stream to which the buffer's memory belongs.
        open: modules between their begin and their end that use it.
    """

    def __init__(
        self, number: int, parameters: Sequence[tuple[str, nn.Parameter]], device: AbstractDevice
    ) -> None:
        self.number = number
        self.members: list[RestingParameter] = []
        self.size_bytes = 0
        for name, parameter in parameters:
            self.members.append(RestingParameter(name, parameter, self.size_bytes))
            self.size_bytes += _aligned(self.members[-1].size_bytes)
        self.memory = allocate_host_memory(device, self.size_bytes)
        for member in self.members:
            member.rest_in(self.memory.tensor)
        self.buffer: torch.Tensor | None = None
        self.loaded: AbstractEvent | None = None
        self.awaited = False
        self.home: AbstractStream | None = None
        self.open = 0

    @property
    def layer(self) -> Layer:
        """For ranges in the profiler."""
        return Layer(self.number, "weights")


@final
class WeightTensor(AbstractDeparted):
    """What autograd saved of a weight: a view of whatever buffer its group is in.

    Args:
        weights: that bring the group back.
        group: that the weight belongs to.
        tensor: what was saved, a view of the group's buffer.
    """

    __slots__ = ("_group", "_weights")

    def __init__(self, weights: Weights, group: WeightGroup, tensor: torch.Tensor) -> None:
        self._weights = weights
        self._group = group
        super().__init__(tensor)

    def share(self) -> WeightTensor:
        return self  # it holds nothing

    def restore(self) -> torch.Tensor:
        self._check_version()
        return self._tensor_in(self._weights.bring(self._group).untyped_storage())

    def inspect(self) -> torch.Tensor:
        return self.restore()


@final
class Weights:
    """The groups of one model.

    Args:
        device: where the model computes.
        groups: in the order of the model.
        double_buffering: the next group comes while one works; else one is there at a time.

    Streams:
        `enter` and `bring` queue copies up and make the current compute stream wait for them; the
        host does not block.
    """

    def __init__(
        self,
        device: AbstractDevice,
        groups: Sequence[WeightGroup],
        *,
        double_buffering: bool = True,
    ) -> None:
        self._most = 2 if double_buffering else 1  # groups, besides those of open modules
        self.device = device
        self.groups = groups
        self._lock = threading.RLock()
        self._resident: dict[WeightGroup, None] = {}  # least recently used first
        self._at: dict[int, WeightGroup] = {}  # by the identity of the buffer's storage
        self._abandoned: list[tuple[torch.Tensor, AbstractEvent]] = []
        self._uses: list[WeightGroup] = []  # since the forward began
        self._expected: list[WeightGroup] = []  # uses since the forward before began
        self._place = 0  # in what is expected: behind the last use
        self._running = 0  # forwards of the model
        self._in_backward: dict[int, Sequence[WeightGroup]] = {}  # by task
        self.peak_groups = 0

    # ---- forward ------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the model begins: the values at rest are what counts."""
        with self._lock:
            self._running += 1
            self._start_over()

    def _start_over(self) -> None:
        with self._lock:
            if self._uses:
                self._expected, self._uses = self._uses, []
            self._place = 0
            for group in list(self._resident):
                self._release(group)  # an optimizer may have been at work since
            for group in self.groups:
                for member in group.members:
                    member.adopt()

    def end_forward(self) -> None:
        """The forward has ended. From now on the host may change values at rest."""
        with self._lock:
            self._running -= 1
        self.settle()

    def enter(self, group: WeightGroup) -> None:
        """A module begins that uses these parameters."""
        with self._lock:
            in_backward = torch._C._current_graph_task_id() != -1
            if not self._running and not in_backward and not self._any_open():
                self._start_over()  # the module is called by itself, outside the model's forward
            buffer = self._bring(group)
            if not group.open:
                for member in group.members:
                    member.parameter.data = member.view_of(buffer)
                    member.version = member.parameter._version
            group.open += 1

    def _any_open(self) -> bool:
        return any(group.open for group in self._resident)

    def leave(self, group: WeightGroup) -> None:
        """The module has ended."""
        with self._lock:
            group.open -= 1
            if not group.open:
                for member in group.members:
                    if member.parameter._version != member.version:
                        # The forward itself has changed it: that must not be lost.
                        member.host.copy_(member.parameter.data)
                    member.parameter.data = member.host

    # ---- backward -----------------------------------------------------------------------------

    def begin_backward(self, task: int, groups: Sequence[WeightGroup]) -> None:
        """The backward of a module begins, and that of the one before it is over.

        What is recomputed in it finds its weights on the device.

        Args:
            task: which backward it is part of.
            groups: that the module uses.
        """
        with self._lock:
            self.end_backward(task)
            for group in groups:
                self.enter(group)
            self._in_backward[task] = groups

    def end_backward(self, task: int) -> None:
        """The backward is over, or has raised."""
        with self._lock:
            for group in self._in_backward.pop(task, ()):
                self.leave(group)

    def group_at(self, storage: torch.UntypedStorage) -> WeightGroup | None:
        """The group whose buffer has this storage."""
        return self._at.get(storage._cdata)

    def bring(self, group: WeightGroup) -> torch.Tensor:
        """The group's buffer, ready for what the calling thread queues next.

        Shape:
            (size_bytes,), uint8.
        """
        with self._lock:
            return self._bring(group)

    def settle(self) -> None:
        """Block the host until no copy reads values at rest: then they may be changed."""
        with self._lock:
            events = [group.loaded for group in self._resident]
            events += [event for _, event in self._abandoned]
            for event in events:
                if event is not None:
                    event.synchronize()
            self._abandoned.clear()

    def close(self) -> None:
        """Let go of all buffers, and of the host memory. The parameters must have left it."""
        with self._lock:
            for group in list(self._resident):
                self._release(group)
        self.settle()
        with self._lock:
            for group in self.groups:
                group.memory.give_back()

    def _bring(self, group: WeightGroup) -> torch.Tensor:
        self._note_use(group)
        if group.buffer is None:
            self._load(group, keep=None)
        self._resident[group] = self._resident.pop(group)  # the most recently used
        assert group.buffer is not None and group.loaded is not None and group.home is not None
        # Kernels queued from now on read the values.
        self.device.compute_stream().wait(group.loaded)
        group.awaited = True
        self.device.note_use(group.buffer, group.home)
        following = self._next()
        if following is not None and following is not group and following.buffer is None:
            self._load(following, keep=group)
        return group.buffer

    def _load(self, group: WeightGroup, keep: WeightGroup | None) -> None:
        for other in list(self._resident):
            if len(self._resident) < self._most:
                break
            if not other.open and other is not keep:
                self._release(other)
        if keep is not None and len(self._resident) >= self._most:
            return  # modules that are open hold theirs: what comes next waits for its turn
        self._abandoned = [held for held in self._abandoned if not held[1].query()]
        group.buffer = self.device.allocate(group.size_bytes)
        group.home = self.device.compute_stream()
        # The allocator may hand out memory that queued kernels still read.
        allocated = group.home.record()
        with profiler_range("reload", group.layer):
            source = group.memory.tensor[: group.size_bytes]
            group.loaded = self.device.copy_up(group.buffer, source, allocated)
        group.awaited = False
        self._resident[group] = None
        self._at[group.buffer.untyped_storage()._cdata] = group
        self.peak_groups = max(self.peak_groups, len(self._resident))

    def _release(self, group: WeightGroup) -> None:
        assert group.buffer is not None and group.loaded is not None
        del self._resident[group]
        del self._at[group.buffer.untyped_storage()._cdata]
        if not group.awaited:
            # No kernel waits for this copy: freed now, the memory could be handed out again while
            # the copy still writes to it.
            self._abandoned.append((group.buffer, group.loaded))
        group.buffer = group.loaded = group.home = None

    # ---- order --------------------------------------------------------------------------------

    def _note_use(self, group: WeightGroup) -> None:
        if self._uses and self._uses[-1] is group:
            return
        self._uses.append(group)
        expected = self._expected
        for place in (*range(self._place, len(expected)), *range(self._place)):
            if expected[place] is group:
                self._place = place + 1
                return

    def _next(self) -> WeightGroup | None:
        """What will be used next, by the order of the forward and backward before."""
        if self._expected:
            return self._expected[self._place] if self._place < len(self._expected) else None
        last = self._uses[-1]
        if torch._C._current_graph_task_id() == -1:  # a first forward: the order of the model
            later = last.number + 1
            return self.groups[later] if later < len(self.groups) else None
        # A first backward: what was used before it, in reverse.
        return self.groups[last.number - 1] if last.number else None


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


def _dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's strides if its elements fill their memory; else those of a packed one."""
    return torch.empty_like(parameter, device="meta").stride()
