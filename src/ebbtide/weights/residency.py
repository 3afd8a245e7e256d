"""Decides which weight groups are on the device, in which buffers, and which is prefetched next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from ebbtide.devices.device import AbstractEvent, AbstractStream
from ebbtide.parameters.parameters import DeviceParameter, OffloadedParameter
from ebbtide.parameters.sharing import count_users
from ebbtide.stores.store import Target
from ebbtide.transfers.order import AccessLog
from ebbtide.transfers.record import STORED
from ebbtide.transfers.transfers import Transfers
from ebbtide.weights.groups import WeightGroup


@final
@dataclass
class WeightView:
    """What may be changed through views of a weight whose group is not on the device any more.

    Attributes:
        member: the weight.
        counters: device parameters without memory. They share version counters with the views.
        changes: the weight's `changes` when the views' memory last had its values.
    """

    member: OffloadedParameter
    counters: Sequence[DeviceParameter]
    changes: int

    def is_changed(self) -> bool:
        """Whether a view has changed values that the host has not got."""
        return any(tensor.is_changed() for tensor in self.counters)


@final
@dataclass(frozen=True, eq=False)
class ViewedBuffer:
    """The memory of a group that is not on the device any more, to which tensors still refer.

    Attributes:
        group: the group.
        buffer: the memory.
        views: what may be changed through the tensors.
    """

    group: WeightGroup
    buffer: torch.Tensor
    views: Sequence[WeightView]


@final
class ResidentGroups:
    """The weight groups that are on the device. Callers hold the gate's lock.

    At most two groups are on the device at once, the one in use and the next one, plus the groups
    of modules that are still running around them. When a group is released, the next group of the
    same size takes over its buffer. Equal layers therefore alternate between the same two buffers,
    and other allocations of the model cannot fragment them.

    Args:
        transfers: queues the copies.
        groups: the weight groups, in the order of the model's layers.
        double_buffering: prefetch the next group while one is in use; otherwise only one group is
            on the device at a time.

    Attributes:
        peak_groups: the most groups that were on the device at once.
        viewed: buffers of groups that are not on the device any more, to which views of weights or
            graphs still refer.
    """

    # Long: a buffer is found, filled, waited for, watched and given up under one lock.

    def __init__(
        self, transfers: Transfers, groups: Sequence[WeightGroup], *, double_buffering: bool
    ) -> None:
        self.peak_groups = 0
        self.viewed: list[ViewedBuffer] = []
        self._groups = groups
        self._most = 2 if double_buffering else 1  # not counting the groups of running modules
        self._transfers = transfers
        self._device = transfers.device
        self._reloads = transfers.reloads
        self._there: dict[WeightGroup, None] = {}  # least recently used first
        self._at: dict[int, WeightGroup] = {}  # by the identity of the buffer's storage
        self._spare: list[tuple[torch.Tensor, AbstractStream]] = []  # unused buffers
        self._prefetches = True
        self._alone = 0  # the result of `count_users` for an unused buffer
        self._log = AccessLog()  # uses of groups since the forward began
        self._reading: list[AbstractEvent] = []  # copies not known to have read the host values

    def any_open(self, *, or_in_backward: bool) -> bool:
        """Whether a module that uses one of the groups runs, or perhaps its backward."""
        return any(group.open or (or_in_backward and group.num_backwards) for group in self._there)

    def at(self, storage: torch.UntypedStorage) -> WeightGroup | None:
        """The group whose buffer has this storage; None if there is none."""
        return self._at.get(storage._cdata)

    def start_over(self) -> None:
        """Release all groups, because the host values may have changed since they were loaded.

        The order of uses that was recorded since the last call becomes the prefetch order.
        """
        learned = self._log.learned(len(self._groups))
        self._log = AccessLog(learned or self._log.expected)
        # Guard weights-anew: every forward pass reloads the weights. A layer would compute with the
        # values from before the optimizer's step.
        self.release_all()

    def bring(self, group: WeightGroup) -> torch.Tensor:
        """Return the group's buffer, ready for the kernels that the calling thread queues next.

        This also starts to prefetch the group that is expected next.

        Shape:
            (size_bytes,), uint8.
        """
        self._log.use(group.number, from_start=True)
        if group.buffer is None:
            self._load(group, keep=None)
        self._there[group] = self._there.pop(group)  # the most recently used
        self.wait_for(group)
        following = self._next() if self._prefetches else None
        if following is not None and following is not group and following.buffer is None:
            self._load(following, keep=group)
        assert group.buffer is not None
        return group.buffer

    def wait_for(self, group: WeightGroup) -> None:
        """Make the current compute stream wait for a group that is on the device."""
        assert group.buffer is not None and group.ready is not None
        current = self._device.compute_stream()
        # Guard compute-waits-for-weights: the compute stream waits for the reload of the weights. A
        # layer would compute with a buffer that the copy has not filled.
        self._transfers.wait_for_reload(group, group.ready, current)
        if not group.awaited:
            self._fill(group)
        group.awaited = True
        at_home = self._device.note_use(group.buffer, group.home, current, group.ready)
        group.used_elsewhere |= not at_home

    @staticmethod
    def _fill(group: WeightGroup) -> None:
        """Copy the values into a buffer that are not in the group's memory, one by one.

        Streams:
            The host waits for each copy, so that all streams find them.
        """
        for member in group.members:
            if member.loaded is not member.host and not member.is_on_device:
                assert group.buffer is not None and member.loaded is not None
                member.view_of(group.buffer).copy_(member.loaded)

    def release(self, group: WeightGroup) -> None:
        """Release a group's buffer."""
        assert group.buffer is not None
        buffer, home = group.buffer, group.home
        del self._there[group]
        del self._at[buffer.untyped_storage()._cdata]
        # Guard buffer-without-readers: a buffer is taken over only when no tensor refers to it any
        # more. A forward or a backward node that still uses the old weights would find the weights
        # of another layer.
        unread = not self.is_viewed(buffer)
        # Guard buffer-of-one-stream: a buffer is taken over only if no stream but its own used it.
        # The next copy waits only for the stream on which the buffer was allocated; kernels on
        # another stream, such as a backward on a stream of its own, could still read the buffer.
        ordered = not group.used_elsewhere
        self._watch_views(group, buffer, unread=unread)
        if group.awaited and unread and ordered:
            self._spare.append((buffer, home))
        self._reloads.free(group, STORED)
        self._transfers.account.take_weights(-group.size_bytes, group.layer)

    def release_if_outdated(self, group: WeightGroup) -> None:
        """Release a group's buffer if the program has changed the host values since."""
        # Guard weights-of-recomputation: a layer that is recomputed reloads its weights if the
        # program has changed them since the forward, and so does one that was prefetched before a
        # forward changed them. It would compute with the values from before.
        if group.buffer is not None and group.is_outdated():
            self.release(group)

    def is_viewed(self, buffer: torch.Tensor) -> bool:
        """Whether tensors refer to the memory of a buffer: of a graph, of the model, of nodes."""
        return count_users(buffer) != self._alone

    def _watch_views(self, group: WeightGroup, buffer: torch.Tensor, *, unread: bool) -> None:
        """Keep what was changed through views of a group that is released, and watch the views."""
        views = []
        for member in group.members:
            unused = member.unused()
            if unused:
                member.keep_view_changes(unused, buffer, None)
                views.append(WeightView(member, unused, member.changes))
                member.stop_watching(viewed=not unread)
        if views and not unread:
            self.viewed.append(ViewedBuffer(group, buffer, views))

    def on_device(self) -> list[WeightGroup]:
        """The groups that are on the device."""
        return list(self._there)

    def release_all(self) -> None:
        """Release the buffers of all groups."""
        for group in list(self._there):
            self.release(group)

    def close(self) -> None:
        """Release all groups and free all buffers. Nothing is prefetched: most memory is gone."""
        self._prefetches = False
        self.release_all()
        self._spare.clear()

    def forget_read(self) -> None:
        """Forget the copies that have read the host values. Their events hold memory."""
        if self._reading:
            self._reading = [event for event in self._reading if not event.query()]

    def reading(self) -> list[AbstractEvent]:
        """The copies that may still read host values; the caller waits for them."""
        self._reading, reading = [], self._reading
        return [event for event in reading if not event.query()]

    def _load(self, group: WeightGroup, keep: WeightGroup | None) -> None:
        for other in list(self._there):
            if len(self._there) < self._most:
                break
            if not other.is_in_use and other is not keep:
                self.release(other)
        if keep is not None and len(self._there) >= self._most:
            return  # running modules need all groups on the device, so there is no prefetch
        self._reloads.free_abandoned()
        buffer, home = self._find_buffer(group.size_bytes)
        # Queued kernels may still read the memory, whether it is new or another group's buffer.
        self._reloads.start(group, Target(buffer, home.record(), home))
        assert group.ready is not None
        self._reading.append(group.ready)
        group.used_elsewhere = False
        group.note_loaded()
        self._there[group] = None
        self._at[buffer.untyped_storage()._cdata] = group
        self._transfers.account.take_weights(group.size_bytes, group.layer)
        self.peak_groups = max(self.peak_groups, len(self._there))

    def _find_buffer(self, size_bytes: int) -> tuple[torch.Tensor, AbstractStream]:
        """Return an unused or new buffer of this size, and the stream that owns its memory."""
        for place, (buffer, _) in enumerate(self._spare):
            if buffer.numel() == size_bytes:
                return self._spare.pop(place)
        while self._spare and len(self._there) + len(self._spare) >= self._most:
            self._spare.pop(0)
        buffer = self._device.allocate(size_bytes)
        self._alone = count_users(buffer)
        return buffer, self._device.compute_stream()

    def _next(self) -> WeightGroup | None:
        """Predict the next group from the order of the last forward and backward passes."""
        order = self._log.expected
        if order is not None:
            place = self._log.place
            return self._groups[order.items[place]] if place < len(order) else None
        last = self._log.last
        if torch._C._current_graph_task_id() == -1:  # the first forward: assume the model's order
            return self._groups[last + 1] if last + 1 < len(self._groups) else None
        # The first backward: assume the model's order, reversed.
        return self._groups[last - 1] if last else None
