"""Weights that are on the device only while they work: groups that come and go.

A parameter of a group rests in host memory ([Note: a parameter never moves]). When a module that
uses it is entered, a stand-in takes its place there: a view of a device buffer into which the whole
group has been copied. The buffer goes when room is needed: at most two groups are there at once,
the one that works and the one that is next, and those of modules that are still open around them.
A group of the same size takes over the buffer: equal layers take turns in the same two, and what
else the model allocates cannot come between.

What autograd saves of a weight is a view of such a buffer, or a cast of one. In its place a graph
has what finds the bytes in whatever buffer the group is in when backward asks
(`ebbtide.runtime.weight_tensors`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent, AbstractStream
from ebbtide.runtime.groups import RestingIndex, WeightGroup
from ebbtide.runtime.ranges import profiler_range
from ebbtide.runtime.resting import Followed, RestingParameter, StandIn
from ebbtide.runtime.weight_tensors import AbstractWeightTensor

Link = Callable[[Sequence[RestingParameter], torch.Tensor], list[StandIn]]
"""Gives parameters' stand-ins: their values in a buffer, computed from them for autograd."""


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _with_plain_tensors(
    method: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Also under `torch.inference_mode`: what is made there could not be used in training."""

    @functools.wraps(method)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return call


@final
class _Backward:
    """One backward that is running. The engine holds it, as what it calls at the end."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        self._end()

    def __del__(self) -> None:  # it may have raised
        self._end()


@final
class Weights:
    """The groups of one model.

    Args:
        device: where the model computes.
        groups: in the order of the model.
        index: of their members.
        link: gives stand-ins.
        double_buffering: the next group comes while one works; else one is there at a time.

    Streams:
        `enter` and `bring` queue copies up and make the current compute stream wait for them; the
        host does not block.
    """

    def __init__(
        self,
        device: AbstractDevice,
        groups: Sequence[WeightGroup],
        index: RestingIndex,
        link: Link,
        *,
        double_buffering: bool = True,
    ) -> None:
        self._most = 2 if double_buffering else 1  # groups, besides those of open modules
        self.device = device
        self.groups = groups
        self._index = index
        self._link = link
        self._lock = threading.RLock()
        self._resident: dict[WeightGroup, None] = {}  # least recently used first
        self._at: dict[int, WeightGroup] = {}  # by the identity of the buffer's storage
        self._abandoned: list[tuple[torch.Tensor, AbstractEvent]] = []
        self._spare: list[tuple[torch.Tensor, AbstractStream]] = []  # buffers that nobody uses
        self._alone = 0  # what `_count_users` says of such a buffer
        self._uses: list[WeightGroup] = []  # since the forward began
        self._expected: list[WeightGroup] = []  # uses since the forward before began
        self._place = 0  # in what is expected: behind the last use
        self._running = 0  # forwards of the model
        self._backwards: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()
        self._in_backward: dict[int, Sequence[WeightGroup]] = {}  # by task
        self._lent: dict[RestingParameter, WeightGroup] = {}
        self._saved: weakref.WeakSet[AbstractWeightTensor] = weakref.WeakSet()
        self.peak_groups = 0

    # ---- forward ------------------------------------------------------------------------------

    @_with_plain_tensors
    def begin_forward(self) -> None:
        """A forward of the model begins: the values at rest are what counts.

        Raises:
            PolicyError: somebody has given a parameter another shape or type.
        """
        with self._lock:
            if not self._running and not self._any_open():
                self._start_over()
            self._running += 1

    def _start_over(self) -> None:
        if self._uses:
            self._expected, self._uses = self._uses, []
        self._place = 0
        for group in list(self._resident):
            self._release(group)  # an optimizer may have been at work since
        self._index.begin_forward()

    @_with_plain_tensors
    def end_forward(self) -> None:
        """The forward has ended.

        The host may change values at rest from now on. A copy up that still reads them is of a
        group that nobody has entered; the next forward lets go of it.
        """
        with self._lock:
            self._running -= 1
            if not self._running:
                self._reclaim(everything=True)
                for group in self.groups:
                    for member in group.members:
                        member.kept = None

    @_with_plain_tensors
    def enter(self, group: WeightGroup) -> None:
        """A module begins that uses these parameters."""
        with self._lock:
            if not self._running and not _in_backward() and not self._any_open():
                self._start_over()  # the module is called by itself, outside the model's forward
            if not group.open:
                self._reclaim()
                for member, stand_in in self._make(group, group.members):
                    member.show(stand_in)
            group.open += 1

    @_with_plain_tensors
    def leave(self, group: WeightGroup) -> None:
        """The module has ended."""
        with self._lock:
            group.open -= 1
            if not group.open:
                for member in group.members:
                    member.hide()
                    self._lent[member] = group
                self._reclaim(everything=not self._running and not self._any_open())

    @_with_plain_tensors
    def lend(self, group: WeightGroup, member: RestingParameter) -> torch.Tensor:
        """What code that takes a parameter from a module that is not open is to work with.

        Returns:
            A stand-in while a forward runs, or a part of one is recomputed; else the parameter.
        """
        with self._lock:
            # Without recording, it is hooks that look at it in backward.
            recomputed = _in_backward() and torch.is_grad_enabled()
            if not (recomputed or (not _in_backward() and (self._running or self._any_open()))):
                return member.parameter
            self._reclaim()
            if member.lent:
                self._point(group, self._bring(group))
            else:
                member.lent += [Followed(made) for _, made in self._make(group, [member])]
                self._lent[member] = group
            return member.lent[0].stand_in

    def _make(
        self, group: WeightGroup, members: Sequence[RestingParameter]
    ) -> list[tuple[RestingParameter, StandIn]]:
        """Stand-ins in the group's buffer."""
        buffer = self._bring(group)
        self._point(group, buffer)
        # Only where hooks take what autograd saves is the memory free after the call.
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        keep = hooked and self._running > 0 and not _in_backward()
        made = []
        fresh = []
        for member in members:
            if not member.parameter.requires_grad:
                made.append((member, StandIn.of(member.view_of(buffer))))
            elif keep and member.kept is not None:
                member.kept.refer_to(member.view_of(buffer))
                made.append((member, member.kept))
            else:
                fresh.append(member)
        with torch.enable_grad():  # they want a gradient whether or not this call records one
            linked = self._link(fresh, buffer)
        for member, stand_in in zip(fresh, linked, strict=True):
            if keep:
                member.kept = stand_in
            made.append((member, stand_in))
        return made

    def _point(self, group: WeightGroup, buffer: torch.Tensor) -> None:
        """What was lent of a group is what its modules see: there is one memory for both."""
        for member, other in self._lent.items():
            if other is group:
                for followed in member.lent:
                    followed.stand_in.refer_to(member.view_of(buffer))

    def _reclaim(self, *, everything: bool = False) -> None:
        """Keep the changes of what was lent, and forget what nobody has any more."""
        for member, group in list(self._lent.items()):
            if member.is_changed():
                if group.buffer is not None and not group.awaited:
                    self._drop(group)  # it was brought again, and the copy knows no change
                member.keep_changes(group.buffer)
            if everything:
                member.lent.clear()
            else:
                member.forget()
            if not member.lent:
                del self._lent[member]

    def _any_open(self) -> bool:
        return any(group.open for group in self._resident)

    # ---- backward -----------------------------------------------------------------------------

    def begin_backward(self, groups: Sequence[WeightGroup]) -> None:
        """The backward of a module begins, and that of the one before it is over.

        What is recomputed in it finds its weights on the device.

        Args:
            groups: that the module uses.
        """
        task = torch._C._current_graph_task_id()
        with self._lock:
            self._note_backward(task)
            self._end_modules(task)
            for group in groups:
                self.enter(group)
            self._in_backward[task] = groups

    def _note_backward(self, task: int) -> None:
        """Let the end of the backward that is running be told."""
        if task not in self._backwards:
            self._backwards[task] = _Backward(functools.partial(self._end_backward, task))

    def _end_backward(self, task: int) -> None:
        """The backward is over, or has raised."""
        self._end_modules(task)

    def _end_modules(self, task: int) -> None:
        with self._lock:
            for group in self._in_backward.pop(task, ()):
                self.leave(group)
            self._reclaim(everything=not self._running)

    def note_saved(self, saved: AbstractWeightTensor) -> None:
        """A graph will ask for a weight."""
        self._saved.add(saved)

    def group_at(self, storage: torch.UntypedStorage) -> WeightGroup | None:
        """The group whose buffer has this storage."""
        return self._at.get(storage._cdata)

    def bring(self, group: WeightGroup) -> torch.Tensor:
        """The group's buffer, ready for what the calling thread queues next.

        Shape:
            (size_bytes,), uint8.
        """
        with self._lock:
            task = torch._C._current_graph_task_id()
            if task != -1:
                self._note_backward(task)
            return self._bring(group)

    def settle(self) -> None:
        """Block the host until no copy reads values at rest: their memory may go."""
        with self._lock:
            events = [group.loaded for group in self._resident]
            events += [event for _, event in self._abandoned]
            for event in events:
                if event is not None:
                    event.synchronize()
            self._abandoned.clear()

    def close(self) -> None:
        """Let go of all buffers, and of the host memory. The parameters must have left it.

        If a graph is alive that needs the values, they go with the last such graph.
        """
        with self._lock:
            for group in list(self._resident):
                self._release(group)
            self._spare.clear()
        self.settle()
        if not self._saved:
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
        group.roamed |= not self.device.note_use(group.buffer, group.home)
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
        group.buffer, group.home = self._find_buffer(group.size_bytes)
        group.roamed = False
        # Queued kernels may still read the memory: the allocator's, or of the group before.
        allocated = group.home.record()
        with profiler_range("reload", group.layer):
            source = group.memory.tensor[: group.size_bytes]
            group.loaded = self.device.copy_up(group.buffer, source, allocated)
        group.awaited = False
        self._resident[group] = None
        self._at[group.buffer.untyped_storage()._cdata] = group
        self.peak_groups = max(self.peak_groups, len(self._resident))

    def _find_buffer(self, size_bytes: int) -> tuple[torch.Tensor, AbstractStream]:
        """A buffer that a group of this size has left, else a new one; and whose memory it is."""
        for place, (buffer, _) in enumerate(self._spare):
            if buffer.numel() == size_bytes:
                return self._spare.pop(place)
        while self._spare and len(self._resident) + len(self._spare) >= self._most:
            self._spare.pop(0)
        buffer = self.device.allocate(size_bytes)
        self._alone = _count_users(buffer)
        return buffer, self.device.compute_stream()

    def _release(self, group: WeightGroup) -> None:
        assert group.buffer is not None and group.loaded is not None
        self._reclaim()
        if group.buffer is not None:
            self._drop(group)

    def _drop(self, group: WeightGroup) -> None:
        assert group.buffer is not None and group.loaded is not None
        del self._resident[group]
        del self._at[group.buffer.untyped_storage()._cdata]
        if not group.awaited:
            # No kernel waits for this copy: freed now, the memory could be handed out again while
            # the copy still writes to it.
            self._abandoned.append((group.buffer, group.loaded))
        elif not group.roamed and _count_users(group.buffer) == self._alone:
            assert group.home is not None
            self._spare.append((group.buffer, group.home))
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
        if not _in_backward():  # a first forward: the order of the model
            later = last.number + 1
            return self.groups[later] if later < len(self.groups) else None
        # A first backward: what was used before it, in reverse.
        return self.groups[last.number - 1] if last.number else None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _count_users(buffer: torch.Tensor) -> int:
    """How many refer to a buffer's memory: itself, and views that a graph or the model holds."""
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))
