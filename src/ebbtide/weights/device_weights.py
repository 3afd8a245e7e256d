"""Decides which weight groups are on the device, in which buffers, and which is prefetched next."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.device import AbstractEvent, AbstractStream
from ebbtide.devices.process import call_weakly, watch_forks
from ebbtide.errors import SavedTensorModifiedError
from ebbtide.runtime.handles import AbstractAway, Deaths, Hold, Saved, are_hooked, empty_tensors
from ebbtide.runtime.record import STORED, AccessLog
from ebbtide.runtime.torch_internals import (
    call_after_backward,
    count_storage_users,
    current_graph_task,
    current_node,
    in_backward,
)
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores.store import RestingSlot, Target
from ebbtide.weights.gradients import Gradients, cast_parameter, wait_for_scales
from ebbtide.weights.groups import WeightGroup
from ebbtide.weights.hooks import AbstractWeights
from ebbtide.weights.parameters import (
    Conversion,
    DeviceParameter,
    OffloadedParameter,
    check_views,
    moves_to,
    running_modules,
    start_substituting,
    stop_substituting,
)


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
    """

    # Long: a buffer is found, filled, waited for, watched and given up under one lock.

    def __init__(
        self, transfers: Transfers, groups: Sequence[WeightGroup], *, double_buffering: bool
    ) -> None:
        self.peak_groups = 0
        self._groups = groups
        self._most = 2 if double_buffering else 1  # not counting the groups of running modules
        self._transfers = transfers
        self._device = transfers.device
        self._reloads = transfers.reloads
        self._there: dict[WeightGroup, None] = {}  # least recently used first
        self._at: dict[int, WeightGroup] = {}  # by the identity of the buffer's storage
        self._spare: list[tuple[torch.Tensor, AbstractStream]] = []  # unused buffers
        self._prefetches = True
        self._alone = 0  # the result of `count_storage_users` for an unused buffer
        self._log = AccessLog()  # uses of groups since the forward began
        self._reading: list[AbstractEvent] = []  # copies not known to have read the host values
        # Weights that views still refer to although their layer has ended: the weight's name, the
        # memory, and a tensor that shares its version counter with the views.
        self._viewed: list[tuple[str, StorageWeakRef, DeviceParameter]] = []

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
        self.watch_views(group)
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
        return count_storage_users(buffer) != self._alone

    def watch_views(self, group: WeightGroup) -> None:
        """Watch views of weights in a group's buffer, which nobody writes to the host any more."""
        assert group.buffer is not None
        viewed = self.is_viewed(group.buffer)
        for member in group.members:
            for counter in member.stop_watching(viewed=viewed):
                self.watch(member, counter, group.buffer)

    def watch(
        self, member: OffloadedParameter, counter: DeviceParameter, memory: torch.Tensor
    ) -> None:
        """Have `check_views` raise an error if a view of a weight is changed from now on.

        Args:
            member: the weight.
            counter: shares its version counter with the view.
            memory: what the view is of. When it is freed, no view is left.
        """
        alive = StorageWeakRef(memory.untyped_storage())  # type: ignore[no-untyped-call]
        self._viewed.append((member.name, alive, counter))

    def check_views(self) -> None:
        """Check that no view that has outlived its layer was changed.

        Raises:
            PolicyError: one was.
        """
        if self._viewed:
            viewed, self._viewed = self._viewed, []
            self._viewed = [each for each in viewed if not each[1].expired()]  # type: ignore[no-untyped-call]
            for name, _, counter in viewed:
                check_views(name, [counter])

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
        self._alone = count_storage_users(buffer)
        return buffer, self._device.compute_stream()

    def _next(self) -> WeightGroup | None:
        """Predict the next group from the order of the last forward and backward passes."""
        order = self._log.expected
        if order is not None:
            place = self._log.place
            return self._groups[order.items[place]] if place < len(order) else None
        last = self._log.last
        if not in_backward():  # the first forward: assume the model's order
            return self._groups[last + 1] if last + 1 < len(self._groups) else None
        # The first backward: assume the model's order, reversed.
        return self._groups[last - 1] if last else None


# ---- What autograd's graph holds instead of a weight: it finds the values on the device again ----


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
        *(
            "_group",
            "_is_cast",
            "_member",
            "_noted",
            "_parameter",
            "_values",
            "_weights",
            "_writes",
        ),
    )

    def __init__(
        self,
        weights: DeviceWeights,
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
        self._writes = member.coming_writes()
        self._parameter, self._values = member.parameter, member.loaded
        self._noted = self._note()
        super().__init__(tensor, tensor._version, weights.empty)
        weights.add_handle(self, group)

    def share(self) -> WeightTensor:
        return self  # it holds no memory that sharing could duplicate

    def _note(self) -> tuple[int, int, int]:
        """What must not have changed when the weight is read."""
        member = self._member
        # Stricter than autograd: it would still have its own cast copy and use that.
        changes = member.changes if self._is_cast else 0
        return member.parameter._version, member.replacements, changes

    def is_modified(self) -> bool:
        # A change during the forward raises the device parameter's version (checked by the base
        # class); a change after it raises the version of the parameter; and one in a later forward
        # is counted when it is kept.
        member = self._member
        if member.parameter is not self._parameter:
            self._weights.adopt_given(self._group, member)
        return (
            super().is_modified()
            or member.parameter is not self._parameter
            or self._note() != self._noted
            or member.writes > self._writes
            or not member.has_values_in(self._values)
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


# ---- Offloaded weights of a model on an accelerator, copied to the device one group at a time ----
#
# The parameters stay on the host ([Note: a parameter never moves]). When a module is entered,
# each of its offloaded parameters is replaced by a device parameter: a view of a device buffer
# into which the whole group has been copied. `ebbtide.weights.device_weights` decides which
# groups are on the device.
#
# When autograd saves a weight, it saves a view of such a buffer, or a cast of one. The graph gets a
# `WeightTensor` instead, which finds the values in the buffer that the group has during backward.

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate["DeviceWeights", _Arguments], _Result]


def _with_the_lock(method: _Method[_Arguments, _Result]) -> _Method[_Arguments, _Result]:
    """Run a method with the gate's lock held, after the deaths were noted.

    It runs outside `torch.inference_mode`, whose tensors could not be used in training. If it
    raises, what it has left half done is noted: see [Note: interrupts].
    """

    @functools.wraps(method)
    def call(self: DeviceWeights, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            with self._gate:
                self.note_deaths()
                if not torch.is_inference_mode_enabled():
                    return method(self, *args, **kwargs)
                with torch.inference_mode(False):
                    return method(self, *args, **kwargs)
        except BaseException as error:
            self._note_error(error)
            raise

    return call  # type: ignore[return-value]  # `self` has no name in the type


@final
class _BackwardHold(Hold):
    """What one backward pass holds; see [Note: deaths].

    Attributes:
        task: the id of autograd's graph task.
    """

    __slots__ = ("task",)
    task: int


@final
class _WeightHold(Hold):
    """What one saved weight holds; see [Note: deaths].

    Attributes:
        group: the group whose values it needs.
        transfers: the transfers whose step it belongs to.
    """

    __slots__ = ("group", "transfers")
    group: WeightGroup
    transfers: Transfers


@final
class DeviceWeights(AbstractWeights):
    """The offloaded weights of one model on an accelerator.

    With ``double_buffering``, the next group is prefetched while one is in use; otherwise only one
    group is on the device at a time.

    Streams:
        `enter` and `bring` queue host-to-device copies and make the current compute stream wait
        for them. The host blocks only for bytes that must still be read from disk.
    """

    # Long: forwards and backwards change the same groups under one lock.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._deaths = Deaths()
        self._gradients = Gradients()
        self._closed = False
        super().__init__(*args, **kwargs)
        places = (known for _, member in self.members() for known, *_ in member.places)
        self._holders = list(dict.fromkeys(places))
        substitute, settle = call_weakly(self.substitute), call_weakly(self._leave_ended)
        stays = call_weakly(self._stays)
        start_substituting(self._alive_holders(), substitute, stays, settle)
        wait_for_scales()
        watch_forks(self)

    def _alive_holders(self) -> list[nn.Module]:
        """The modules that hold offloaded parameters."""
        return [module for known in self._holders if (module := known()) is not None]

    def note_fork(self) -> None:
        """Take the memory of the weights from the parameters, in a forked child.

        Children do not inherit page-locked memory. Reading a parameter would end the process.
        """
        for group, member in self.members():
            if not group.resting.is_mapped:
                member.lose_memory()

    def detach(self, to: torch.device | None = None) -> None:
        stop_substituting(self._alive_holders())
        super().detach(to)

    def _use(self, transfers: Transfers) -> None:
        self._device = transfers.device
        self._gate = transfers.gate
        self.empty = empty_tensors(self._device.torch_device)
        self._gradients.use(transfers)
        self._resident = ResidentGroups(
            transfers, self.groups, double_buffering=self._double_buffering
        )
        self._running = 0  # forward passes of the model that are running
        # By the id of each of autograd's running graph tasks: the groups of the module whose
        # backward runs.
        self._backwards: dict[int, list[WeightGroup]] = {}
        self._substitutes: dict[OffloadedParameter, WeightGroup] = {}
        transfers.before_tidying(self.note_deaths)

    # ---- forward ------------------------------------------------------------------------------

    @property
    def peak_groups(self) -> int:
        return self._resident.peak_groups

    @_with_the_lock
    def _begin_forward(self) -> None:
        if not self._is_in_forward():
            self._start_over()
        self._running += 1

    def _start_over(self) -> None:
        self._reclaim()
        self._resident.start_over()
        self._resident.check_views()
        self._adopt_all()

    def end_forward(self) -> None:
        """See the base class. The program may change the host values from now on.

        Streams:
            The host waits until no copy reads the host values any more. The last copy brings the
            weights of the last layer, so the device still has that layer to compute.
        """
        self._wait_for_copies(self._end_forward())
        self._check_views()

    @_with_the_lock
    def _end_forward(self) -> list[AbstractEvent]:
        self._running -= 1
        if not self._running:
            self._leave_interrupted()
            self._reclaim(everything=True)
            for group in self._resident.on_device():
                self._resident.watch_views(group)
            for _, member in self.members():
                member.reused = None
        return self._copies_to_wait_for()

    @_with_the_lock
    def _check_views(self) -> None:
        self._resident.check_views()

    def _copies_to_wait_for(self) -> list[AbstractEvent]:
        """The copies that must have ended before the program goes on; none while weights work."""
        return [] if self.is_working() else self._resident.reading()

    def _wait_for_copies(self, copies: Sequence[AbstractEvent]) -> None:
        # Guard weights-read-before-return: a forward or a backward of the model returns when no
        # copy reads the host values any more. The program may write them at once, and the device,
        # which is behind, would compute with values from later.
        for copied in copies:
            with contextlib.suppress(OSError):  # compute waits for this copy, and has raised it
                copied.synchronize()

    def _leave_interrupted(self) -> None:
        """Leave the groups of modules that an interrupt has ended, for which torch calls no hook.

        No module runs now, unless a running backward recomputes it.
        """
        for group in self.groups if not self._backwards else ():
            while group.open:
                self._leave(group)

    def _leave_ended(self) -> None:
        """Leave the groups whose modules an interrupt has ended, for which torch calls no hook."""
        inherited = self._gate.is_inherited
        if not inherited and not self._running and any(group.open for group in self.groups):
            modules = running_modules()
            used = (groups for module, groups in self._used if module in modules)
            self._leave_all_but({group for groups in used for group in groups})

    @_with_the_lock
    def _leave_all_but(self, running: Collection[WeightGroup]) -> None:
        for group in self.groups:
            while group.open and group not in running:
                self._leave(group)

    @_with_the_lock
    def enter(self, group: WeightGroup) -> None:
        self._enter(group)

    def _enter(self, group: WeightGroup) -> None:
        if not in_backward() and not self._is_in_forward():
            self._start_over()  # the module was called directly, outside the model's forward
        if not group.open:
            self._reclaim()
            self._note_writes(group)
            for member, tensor in self._make(group, group.members):
                member.install(tensor)
        else:
            # The first entry has made another stream wait, if the module is entered by another
            # thread or calls itself on a stream of its own. Only the software accelerator shows it.
            self._resident.wait_for(group)
        group.open += 1

    def _note_writes(self, group: WeightGroup) -> None:
        """Have a layer see what the program has written since its weights were loaded."""
        for member in group.members if in_backward() else ():
            if member.is_given():
                raise SavedTensorModifiedError(
                    f"{member.name}, whose values are offloaded, was given other memory between a "
                    f"forward and its recomputation (`parameter.data = ...`); assign weights after "
                    f"backward, or change them in place"
                )
        self._resident.release_if_outdated(group)

    def leave(self, group: WeightGroup) -> None:
        self._wait_for_copies(self._leave_and_reclaim(group))

    @_with_the_lock
    def _leave_and_reclaim(self, group: WeightGroup) -> list[AbstractEvent]:
        if group.open:  # else an error came before the group was entered
            self._leave(group)
        self._reclaim(everything=not self.is_working())
        return self._copies_to_wait_for()

    def _leave(self, group: WeightGroup) -> None:
        group.open -= 1
        if not group.open:
            for member in group.members:
                member.uninstall()
                self._substitutes[member] = group

    def _is_in_forward(self) -> bool:
        """Whether a forward is running, of the model or of one of its modules.

        A backward does not count. It may have raised, and still be alive in autograd's thread.
        """
        return self._running > 0 or any(group.open for group in self.groups)

    def is_working(self) -> bool:
        # Other threads ask, too, while a backward that has raised is still alive in autograd's.
        # It would seem to work.
        in_node = current_node() is not None
        return bool(self._running) or self._resident.any_open(or_in_backward=in_node)

    def substitute(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor for code that reads a parameter of a module that is not running."""
        found = self.find(parameter)
        return parameter if found is None else self._substitute(*found)

    def _stays(self, parameter: torch.Tensor, convert: Conversion) -> bool:
        """Whether a parameter stays at rest although the program converts its module."""
        return parameter in self and moves_to(convert, parameter) == self._home

    @_with_the_lock
    def _substitute(self, group: WeightGroup, member: OffloadedParameter) -> torch.Tensor:
        """Return a device parameter in a forward or its recomputation, else the parameter."""
        # During backward, code that runs without grad mode is a hook, not a recomputation.
        recomputed = in_backward() and torch.is_grad_enabled()
        if not (recomputed or (not in_backward() and self.is_working())):
            return member.parameter
        self._reclaim()
        if not group.open:
            self._note_writes(group)
        if member.is_on_device:
            return member.parameter
        if member.substitutes:
            self._point(group, self._bring(group))
        else:
            made = self._make(group, [member])
            member.substitutes += [tensor.track() for _, tensor in made]
            self._substitutes[member] = group
        return member.substitutes[0]

    def _make(
        self, group: WeightGroup, members: Sequence[OffloadedParameter]
    ) -> list[tuple[OffloadedParameter, DeviceParameter]]:
        """Make device parameters in the group's buffer, or reuse those of this forward pass."""
        buffer = self._bring(group)
        self._point(group, buffer)
        for member in members:
            member.check_views()
            if member.watched and not self._resident.is_viewed(buffer):
                member.watched = []
        # A device parameter can be reused only if saved-tensor hooks replace what autograd saves.
        # Without them, the graph itself keeps the memory in use after the call.
        reuse = are_hooked() and self._running > 0 and not in_backward()
        made = []
        fresh = []
        for member in members:
            if member.is_on_device:
                continue
            if not member.parameter.requires_grad:
                made.append((member, DeviceParameter.of(member.view_of(buffer))))
            elif reuse and member.reused is not None:
                member.reused.refer_to(member.view_of(buffer))
                if member.reused.is_viewed:
                    member.reused = self._gradients.link_again(member.reused)
                made.append((member, member.reused))
            else:
                fresh.append(member)
        with torch.enable_grad():  # a later call may need gradients even if this one records none
            linked = self._gradients.link(group, fresh, buffer)
        for member, tensor in zip(fresh, linked, strict=True):
            if reuse:
                member.reused = tensor
            made.append((member, tensor))
        return made

    def _point(self, group: WeightGroup, buffer: torch.Tensor) -> None:
        """Make all substitutes of a group share the memory that its modules use."""
        for member, other in self._substitutes.items():
            if other is group:
                for tensor in member.substitutes:
                    # Guard one-memory: a weight that the model itself holds shares its memory with
                    # the weight that its layer uses. A forward could hold a weight while the group
                    # is released and reloaded into another buffer, then modify it: the layer would
                    # compute with the old values.
                    tensor.refer_to(member.view_of(buffer))

    def _reclaim(self, *, everything: bool = False) -> None:
        """Write modified substitutes back to the host and drop those that nobody refers to.

        Args:
            everything: drop the others, too.
        """
        for member, group in list(self._substitutes.items()):
            if member.is_changed():
                if group.buffer is not None and not group.awaited:
                    self._resident.release(group)  # a new reload of the group lacks the change
                member.keep_changes(group.buffer)
            member.forget_unused()
            if everything:
                for tensor in member.substitutes:
                    self._resident.watch(member, tensor.counter(), tensor)
                member.substitutes.clear()
            if not member.substitutes:
                del self._substitutes[member]

    # ---- backward -----------------------------------------------------------------------------

    @_with_the_lock
    def begin_backward(self, groups: Sequence[WeightGroup]) -> None:
        """See the base class. This also ends the module whose backward ran before.

        The groups stay on the device. The modules still hold their parameters: if backward raises,
        nothing has to be put back. A module that is called, to recompute its forward, is entered as
        ever, and code that reads a parameter by its name gets a substitute.
        """
        task = current_graph_task()
        if self._closed:  # a graph that has no handles on the weights needs nothing of them
            groups = [group for group in groups if group.handles]
        self._note_backward(task)
        self._end_modules(task)
        self._reclaim(everything=not self._running)
        held = self._backwards[task]
        for group in groups:
            self._bring(group)
            group.num_backwards += 1
            held.append(group)

    def _note_backward(self, task: int) -> None:
        """Register callbacks for the end of the running backward pass, once for each pass."""
        if task not in self._backwards:
            # Autograd alone holds it: it dies with a backward that raises, and is not called then.
            backward = functools.partial(self._end_backward, task)
            call_after_backward(backward)
            hold = _BackwardHold(backward, self._deaths.queue.append)
            hold.task = task
            self._deaths.awaited.add(hold)
            self._backwards[task] = []
            self._transfers.begin_run()

    def _end_backward(self, task: int) -> None:
        """Clean up after a backward pass that has ended."""
        self._wait_for_copies(self._forget_backward(task))

    @_with_the_lock
    def _forget_backward(self, task: int) -> list[AbstractEvent]:
        self._give_up_backward(task)
        self._reclaim(everything=not self._running)
        self._transfers.offloads.retire_finished()  # the host has waited for all gradients
        return self._copies_to_wait_for()

    def _give_up_backward(self, task: int) -> None:
        """Clean up after a backward pass that has ended or raised. Called with the lock held.

        If it raised, the next call of `_reclaim` writes modified weights back.
        """
        if task not in self._backwards:  # it has ended in order, or an interrupt has ended all
            return
        self._end_modules(task)
        del self._backwards[task]
        if not self._running:
            self._leave_interrupted()
            for member in list(self._substitutes):
                if not member.is_changed():
                    member.substitutes.clear()
                    del self._substitutes[member]
        self._transfers.end_run()

    def _end_modules(self, task: int) -> None:
        groups, self._backwards[task] = self._backwards[task], []
        for group in groups:
            group.num_backwards -= 1

    def pack(self, tensor: torch.Tensor, whole: torch.Tensor) -> Saved | None:
        storage = tensor.untyped_storage()
        group = self._resident.at(storage)
        if group is not None:
            member = group.member_at(int(tensor.storage_offset()) * tensor.element_size())
            return WeightTensor(self, group, member, tensor, is_cast=False)
        cast = cast_parameter(whole)
        if cast is None or cast.is_changed():
            return None
        found = self.find(cast.parameter)
        if found is None or storage.nbytes() != whole.nbytes or tensor.dtype is not whole.dtype:
            return None
        return WeightTensor(self, *found, tensor, is_cast=True)

    @_with_the_lock
    def adopt_given(self, group: WeightGroup, member: OffloadedParameter) -> None:
        """Adopt a parameter that the program has put back into its module."""
        self._adopt(group, member)

    @_with_the_lock
    def bring(self, group: WeightGroup, member: OffloadedParameter) -> torch.Tensor:
        """Return the group's buffer, ready for the kernels that the calling thread queues next.

        Args:
            group: the group.
            member: the parameter of the group whose values are read.

        Shape:
            (size_bytes,), uint8.
        """
        task = current_graph_task()
        if task != -1:
            self._note_backward(task)
        if group.buffer is not None and member.loaded is not member.find_values():
            self._resident.release(group)
        return self._bring(group)

    def _bring(self, group: WeightGroup) -> torch.Tensor:
        self._reclaim()  # first: bringing the group may release one whose weights were modified
        self._resident.check_views()
        return self._resident.bring(group)

    @_with_the_lock
    def add_handle(self, handle: WeightTensor, group: WeightGroup) -> None:
        """Count one more saved tensor that needs the values of a group, as long as it lives."""
        hold = _WeightHold(handle, self._deaths.queue.append)
        hold.group, hold.transfers = group, self._transfers
        group.handles += 1
        self._transfers.live += 1
        self._deaths.awaited.add(hold)

    def note_deaths(self) -> None:
        """Note which saved weights, and which backward passes that raised, have died.

        Called with the lock held; see [Note: deaths]. Finished copies are forgotten, too.
        """
        self._resident.forget_read()
        died = self._deaths.queue
        while died:
            hold = died.popleft()
            self._deaths.awaited.discard(hold)
            if isinstance(hold, _BackwardHold):
                self._give_up_backward(hold.task)
            else:
                assert isinstance(hold, _WeightHold)
                self._forget(hold.group, hold.transfers)

    def _forget(self, group: WeightGroup, transfers: Transfers) -> None:
        transfers.live -= 1
        if transfers is not self._transfers:  # an interrupt came after the forward
            transfers.poll()
        group.handles -= 1
        if self._closed and not group.handles:
            self._resident.close()
            group.forget_memory()
            self._device.defer(functools.partial(self._give_back_later, group.resting))

    # ---- ends ---------------------------------------------------------------------------------

    def _note_error(self, error: BaseException) -> None:
        self._transfers.note_error(error)
        if self._transfers.is_broken:
            with self._gate:
                self._put_back()

    def _put_back(self) -> None:
        """Give all modules their parameters back, whatever an interrupt has left half done."""
        for _, member in self.members():
            member.keep_changes(None)
        for _, member in self.members():
            member.put_back()
        self._substitutes.clear()
        for group in self.groups:
            group.open = 0

    def start_anew(self, transfers: Transfers) -> None:
        self._put_back()
        awaited = [hold for hold in self._deaths.awaited if isinstance(hold, _WeightHold)]
        handles = Counter(hold.group for hold in awaited)
        for group in self.groups:
            group.handles = handles[group]
        super().start_anew(transfers)

    def settle(self) -> None:
        with self._gate:
            copies = self._resident.reading()
            copies += [event for _, event in self._transfers.reloads.abandoned]
        self._wait_for_copies(copies)
        self._transfers.poll()

    def _close(self) -> None:
        """See the base class.

        Values that a live graph still needs are freed together with the last such graph.
        """
        with self._gate:
            self._reclaim()
            self._resident.close()
        # Guard close-after-streams: host memory of weights and gradients is given back when all
        # streams of the device are empty. A stream of the program's own may be copying them
        # (``p.to(device, non_blocking=True)``): the memory would be unmapped under the copy.
        self._device.finish_other_streams()
        self._gradients.wait()
        with self._gate:
            for group in self.groups:
                group.drop_blocks()
        # Inside a forward, copies may be under way, from memory that is ours no more afterwards.
        self.settle()
        with self._gate:
            self.note_deaths()
            self._closed = True
            for group in self.groups:
                if not group.handles:
                    group.forget_memory()
                    self._transfers.store.drop(group.resting)

    def _give_back_later(self, slot: RestingSlot) -> None:
        """Free the slot of a closed group once no copy reads it. Blocks, so it runs deferred."""
        self._device.finish_copies()
        self._device.finish_other_streams()
        self._transfers.store.drop(slot)
