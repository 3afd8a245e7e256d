"""Changes of offloaded weights through views that code has taken of them in a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.errors import PolicyError
from ebbtide.parameters.parameters import DeviceParameter, OffloadedParameter
from ebbtide.weights.groups import WeightGroup
from ebbtide.weights.residency import ResidentGroups, ViewedBuffer, WeightView


@final
class ChangesThroughViews:
    """Writes changes through views to the host, and notices those that come too late for that.

    Its methods are called with the gate's lock held.

    Args:
        resident: the groups on the device, whose buffers are viewed.
    """

    def __init__(self, resident: ResidentGroups) -> None:
        self._resident = resident
        # What views that a forward has left behind may share version counters with, by the weight's
        # name and the identity of the views' memory.
        self._viewed_after: dict[
            tuple[str, int], tuple[StorageWeakRef, Sequence[DeviceParameter]]
        ] = {}

    def keep(self, group: WeightGroup | None = None) -> None:
        """Keep what was changed through views of groups that are not on the device any more.

        Args:
            group: look at this group's views and at views that have died. None: at all of them.

        Raises:
            PolicyError: a weight was changed through a view and in another way, too.
        """
        viewed = self._resident.viewed
        for each in list(viewed):
            is_gone = not self._resident.is_viewed(each.buffer)
            if is_gone:
                viewed.remove(each)
            if is_gone or group is None or each.group is group:
                for view in each.views:
                    self._keep_change(view, each)

    def _keep_change(self, view: WeightView, viewed: ViewedBuffer) -> None:
        group = viewed.group
        if not view.is_changed():
            return
        if view.changes != view.member.changes:
            raise PolicyError(
                f"{view.member.name} is offloaded, and was changed in place through a view and, "
                f"since its layer ran, in another way, too. One of the changes would be lost. "
                f"Change the parameter itself, or copy the view: view.clone()"
            )
        if group.buffer is not None and not group.awaited:
            self._resident.release(group)  # a new reload of the group lacks the change
        view.member.keep_view_changes(view.counters, viewed.buffer, group.buffer)
        view.changes = view.member.changes

    def end(self) -> None:
        """Keep what was changed through views; what they change from now on raises an error.

        The program may write the host values from now on, so that changes of both could not be put
        in order.
        """
        for group in self._resident.on_device():
            for member in group.members if group.buffer is not None else ():
                unused = member.unused()
                if unused and group.buffer is not None:
                    member.keep_view_changes(unused, group.buffer, None)
                    if self._resident.is_viewed(group.buffer):
                        self.watch_after(member, unused, group.buffer)
                    member.stop_watching(viewed=True)
        viewed = self._resident.viewed
        if viewed:
            self.keep()
        while viewed:
            each = viewed.pop()
            for view in each.views:
                self.watch_after(view.member, view.counters, each.buffer)

    def watch_after(
        self,
        member: OffloadedParameter,
        counters: Sequence[DeviceParameter],
        memory: torch.Tensor,
    ) -> None:
        """Watch views that a forward has left behind.

        Args:
            member: the weight.
            counters: device parameters that may share the version counter of a view.
            memory: what the views are of.
        """
        alive = StorageWeakRef(memory.untyped_storage())  # type: ignore[no-untyped-call]
        free = [each.counter() for each in counters]  # with neither a graph nor memory
        self._viewed_after[member.name, alive.cdata] = (alive, free)

    def check(self) -> None:
        """Check that no view has changed a weight since the forward that it was taken in.

        Raises:
            PolicyError: one has.
        """
        for place, (alive, counters) in list(self._viewed_after.items()):
            is_changed = any(counter.is_changed() for counter in counters)
            if is_changed or alive.expired():  # type: ignore[no-untyped-call]
                del self._viewed_after[place]
            if is_changed:
                name = place[0]
                raise PolicyError(
                    f"{name} is offloaded, and was changed in place through a view that a forward "
                    f"had taken of it, after that forward; the change is lost. Change the "
                    f"parameter itself, or copy the view in the forward: view.clone()"
                )
