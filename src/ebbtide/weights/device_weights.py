"""Offloaded weights of a model on an accelerator, of which one or two groups are there at a time.

First come the handles that autograd's graph holds instead of weights. `DeviceWeights` decides which
groups are on the device, in which buffers, and which is prefetched next.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, ItemsView, Sequence
from typing import Any, TypeVar, final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.device import AbstractEvent, AbstractStream
from ebbtide.devices.process import call_weakly, watch_forks
from ebbtide.errors import PolicyError, SavedTensorModifiedError
from ebbtide.runtime.handles import AbstractProbed, Deaths, Saved, empty_tensors, is_of_checkpoint
from ebbtide.runtime.record import STORED, AccessLog
from ebbtide.runtime.torch_internals import (
    MODULE_APPLY,
    call_after_backward,
    count_storage_users,
    current_graph_task,
    current_node,
    in_backward,
    let_compiled_code_take,
    outside_modes,
    top_hooks,
)
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores.store import RestingSlot, Target
from ebbtide.weights.gradients import Gradients, cast_parameter, wait_for_scales
from ebbtide.weights.hooks import AbstractWeights
from ebbtide.weights.parameters import (
    Conversion,
    DeviceParameter,
    OffloadedParameter,
    WeightGroup,
    moves_to,
)

# ---- What autograd's graph holds instead of a weight: it finds the values on the device again ----


@final
class WeightTensor(AbstractProbed):
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

    __slots__ = ("_group", "_is_cast", "_mark", "_member", "_parameter", "_weights")

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
        if member.is_changed():
            weights.keep_changes()  # before the mark, which they change
        self._parameter, self._mark = member.parameter, member.mark()
        super().__init__(tensor, tensor._version, weights.empty)
        weights.add_handle(self, group)

    def is_modified(self) -> bool:
        # A change during the forward raises the device parameter's version, which the base class
        # checks, and the parameter's when it is kept. So does one after it, or in a later forward.
        member = self._member
        if member.parameter is not self._parameter:
            self._weights.adopt_given(self._group, member)
        return (
            super().is_modified()
            or member.parameter is not self._parameter
            or member.mark() != self._mark
        )

    def restore(self) -> torch.Tensor:
        if self.is_modified():
            raise SavedTensorModifiedError(
                f"{self._member.name}, whose values are offloaded, was modified between the "
                f"forward that used it and its backward; modify weights after backward, or run "
                f"the forward again"
            )
        self._member.read_by = _running_node()
        buffer = self._weights.bring(self._group, self._member)
        if self._is_cast:
            buffer = self._member.view_of(buffer).to(self._dtype)
        return self._tensor_in(buffer.untyped_storage())


def _running_node() -> tuple[int, int] | None:
    """What identifies the node that the calling thread runs, and holds nothing of its graph."""
    node = current_node()
    return None if node is None else (current_graph_task(), node._sequence_nr())


def _runs_checkpoint() -> bool:
    """Whether a checkpoint runs again, which differentiates all that it uses itself."""
    node, hooks = current_node(), top_hooks()
    if hooks is not None and is_of_checkpoint(hooks[0]):
        return True
    return node is not None and node.name() == "CheckpointFunctionBackward"


# ---- What a module holds instead of a dict of its parameters ----


@final
class SubstitutingDict(dict[str, nn.Parameter | None]):
    """A module's parameters by name. Code that reads one by its name gets its device parameter.

    `module.weight` reads by name; `module.parameters()` and `state_dict()` do not, and give the
    parameter itself, unless the module runs. A copied or unpickled instance is a plain dict.

    Frameworks move a model to its device (`module.to(device)`) whether or not it was offloaded
    before. `nn.Module` then asks for all items, and gets those without the parameters at rest. All
    of these together might not fit on the device, and would leave again in the next forward.

    Args:
        parameters: the parameters of the module.
        weights: the offloaded weights of the model, which are referred to weakly.
    """

    __slots__ = ("_weights",)

    def __init__(self, parameters: dict[str, nn.Parameter | None], weights: DeviceWeights) -> None:
        super().__init__(parameters)
        self._weights = weakref.ref(weights)

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        weights, caller = self._weights(), sys._getframe(1)
        if weights is None:
            return super().items()
        weights.leave_ended()
        items = super().items()
        if caller.f_code is not MODULE_APPLY:
            return items
        convert = caller.f_locals["fn"]
        return {k: p for k, p in items if p is None or not weights.stays(p, convert)}.items()

    def __getitem__(self, name: str) -> Any:
        held: Any = super().__getitem__(name)
        if held is None or type(held) is DeviceParameter:
            return held  # its module runs; compiled code, which traces this call, asks no more
        weights = self._weights()
        return held if weights is None else weights.substitute(held)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


# ---- Offloaded weights of a model on an accelerator, copied to the device one group at a time ----
#
# The parameters stay on the host ([Note: a parameter never moves]). When a module is entered,
# each of its offloaded parameters is replaced by a device parameter: a view of a device buffer
# into which the whole group has been copied.
#
# When autograd saves a weight, it saves a view of such a buffer, or a cast of one. The graph gets a
# `WeightTensor` instead, which finds the values in the buffer that the group has during backward.

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _with_the_lock(method: _Method) -> _Method:
    """Run a method with the gate's lock held, after the deaths were noted.

    It runs outside `torch.inference_mode`, whose tensors could not be used in training, and outside
    dispatch modes. If it raises, the transfers note the error: see [Note: interrupts].
    """

    @functools.wraps(method)
    def call(self: DeviceWeights, *args: Any, **kwargs: Any) -> Any:
        with outside_modes(), self._transfers, self._transfers.gate:
            self.note_deaths()
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


@final
class DeviceWeights(AbstractWeights):
    """The offloaded weights of one model on an accelerator.

    At most two groups are on the device at once, the one in use and the next one, which is
    prefetched, plus the groups of modules that are still running around them; without
    ``double_buffering``, one less. When a group is released, the next group of the same size takes
    over its buffer. Equal layers therefore alternate between the same two buffers, and other
    allocations of the model cannot fragment them.

    Attributes:
        peak_groups: the most groups that were on the device at once.

    Streams:
        `enter` and `bring` queue host-to-device copies and make the current compute stream wait
        for them. The host blocks only for bytes that must still be read from disk.
    """

    # Long: forwards and backwards change the same groups and buffers under one lock.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._deaths = Deaths()
        self._gradients = Gradients()
        self._closed = False
        super().__init__(*args, **kwargs)
        model = self._model()
        self._known = weakref.WeakSet(() if model is None else model.modules())
        for module in self._holders():
            module._parameters = SubstitutingDict(module._parameters, self)
        wait_for_scales()
        watch_forks(self)

    def _holders(self) -> Collection[nn.Module]:
        """The modules that hold offloaded parameters."""
        places = (known() for _, member in self.members() for known, *_ in member.places)
        return dict.fromkeys(module for module in places if module is not None)

    def note_fork(self) -> None:
        """Take the memory of the weights from the parameters, in a forked child.

        Children do not inherit page-locked memory. Reading a parameter would end the process.
        """
        for group, member in self.members():
            if not group.resting.is_mapped:
                member.lose_memory()

    def detach(self, to: torch.device | None = None) -> None:
        for module in self._holders():
            if isinstance(module._parameters, SubstitutingDict):
                module._parameters = dict(module._parameters.items())
        if not self._transfers.gate.is_inherited:
            self._end_all()
        super().detach(to)

    def _use(self, transfers: Transfers) -> None:
        self._device = transfers.device
        self.empty = empty_tensors(self._device.torch_device)
        self._gradients.use(transfers)
        self.peak_groups = 0
        self._running = 0  # forward passes of the model that are running
        self._backwards: set[int] = set()  # ids of autograd's graph tasks that are running
        self._given: dict[OffloadedParameter, WeightGroup] = {}  # those with a device parameter
        # Views that are changed no more, because the buffer that they are of is not written back:
        # the weight's name, the memory, and a tensor that shares the views' version counter.
        self._viewed: list[tuple[str, StorageWeakRef, DeviceParameter]] = []
        self._there: dict[WeightGroup, None] = {}  # on the device, least recently used first
        self._at: dict[int, WeightGroup] = {}  # by the identity of the buffer's storage
        self._spare: list[tuple[torch.Tensor, AbstractStream]] = []  # unused buffers
        self._alone = 0  # the result of `count_storage_users` for an unused buffer
        self._log = AccessLog()  # uses of groups since the forward began
        self._reading: list[AbstractEvent] = []  # copies not known to have read the host values
        transfers.tidiers.append(call_weakly(self.note_deaths))

    # ---- forward ------------------------------------------------------------------------------

    @_with_the_lock
    def _begin_forward(self) -> None:
        if not (self._running or in_backward()):
            self._end_raised()
        if not self._is_in_forward():
            self._start_over()
        self._running += 1

    def end_forward(self) -> None:
        """See the base class. The program may change the host values from now on.

        Streams:
            The host waits until no copy reads the host values any more. The last copy brings the
            weights of the last layer, so the device still has that layer to compute.
        """
        self._wait_for_copies(self._end_forward())

    @_with_the_lock
    def _end_forward(self) -> list[AbstractEvent]:
        self._running -= 1
        if not self._running:
            if not self._backwards and any(group.open for group in self.groups):
                self._leave_all()  # torch calls no hook of modules that an interrupt has ended
            self._forget()
            self._check_views()
        return self._copies_to_wait_for()

    def _start_over(self) -> None:
        """Release all groups, because the host values may have changed since they were loaded.

        The order of uses that was recorded since the last call becomes the prefetch order.
        """
        self._forget()
        for group in self.groups:
            group.is_stale = True
        learned = self._log.learned(len(self.groups))
        self._log = AccessLog(learned or self._log.expected)
        # Guard weights-anew: every forward pass reloads the weights. A layer would compute with the
        # values from before the optimizer's step.
        self._release_all()
        self._check_views()
        self._adopt_all()
        self._bring_added()
        let_compiled_code_take(DeviceParameter)

    def _bring_added(self) -> None:
        """Bring parameters to the device that have come to the model since, such as adapters.

        A library puts an adapter where the weight is that it adapts, which is on the host.
        """
        model = self._model()
        if model is None or self._home.type == "cpu":
            return
        layers = {inner for module, _ in self._used for inner in module.modules()}
        for module in model.modules():
            if module in self._known and module not in layers:
                continue  # what was on the host all the time beside the layers is to be there
            for parameter in module._parameters.values():
                if type(parameter) is not nn.Parameter or parameter in self:
                    continue
                if parameter.device.type == "cpu":
                    gradient, parameter.grad = parameter.grad, None
                    parameter.data = parameter.data.to(self._home)
                    parameter.grad = None if gradient is None else gradient.to(self._home)

    def _copies_to_wait_for(self) -> list[AbstractEvent]:
        """The copies that must have ended before the program goes on; none while weights work."""
        if self.is_working():
            return []
        self._reading, reading = [], self._reading
        return [event for event in reading if not event.query()]

    def _wait_for_copies(self, copies: Sequence[AbstractEvent]) -> None:
        # Guard weights-read-before-return: a forward or a backward of the model returns when no
        # copy reads the host values any more. The program may write them at once, and the device,
        # which is behind, would compute with values from later.
        for copied in copies:
            with contextlib.suppress(OSError):  # compute waits for this copy, and has raised it
                copied.synchronize()

    @_with_the_lock
    def _end_all(self) -> None:
        self._leave_all()
        self._end_raised()
        self._keep_changes()

    def _leave_all(self) -> None:
        for group in self.groups:
            group.open = 0
        for _, member in self.members():
            member.put_back()

    def leave_ended(self) -> None:
        """Leave all groups if an interrupt came, unless a forward or a backward asks.

        Code that neither a forward nor a backward runs finds parameters in modules.
        """
        is_ended = self._backwards and not (self._running or in_backward())
        if self._transfers.is_broken or (is_ended and any(group.open for group in self.groups)):
            with self._transfers.gate:
                self._leave_all()

    @_with_the_lock
    def enter(self, group: WeightGroup) -> None:
        if not in_backward() and not self._is_in_forward():
            self._start_over()  # the module was called directly, outside the model's forward
        if not group.open:
            self._give(group, group.members)
            for member in group.members:
                if member.device is not None:
                    member.install()
        else:
            # The first entry has made another stream wait, if the module is entered by another
            # thread or calls itself on a stream of its own. Only the software accelerator shows it.
            self._wait_for(group)
        group.open += 1

    def leave(self, group: WeightGroup) -> None:
        self._wait_for_copies(self._leave_and_forget(group))

    @_with_the_lock
    def _leave_and_forget(self, group: WeightGroup) -> list[AbstractEvent]:
        if group.open:  # else an error came before the group was entered
            group.open -= 1
            for member in group.members if not group.open else ():
                member.put_back()
        if not self.is_working():
            self._forget()
        return self._copies_to_wait_for()

    def _is_in_forward(self) -> bool:
        """Whether a forward is running, of the model or of one of its modules.

        A backward does not count. It may have raised, and still be alive in autograd's thread.
        """
        return self._running > 0 or any(group.open for group in self.groups)

    def is_working(self) -> bool:
        """Whether the model's forward pass, one of its modules, or a backward is running."""
        return self._is_in_forward() or current_node() is not None

    # ---- device parameters --------------------------------------------------------------------

    def substitute(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor for code that reads a parameter of a module that is not running."""
        found = self.find(parameter)
        return parameter if found is None else self._substitute(*found)

    def stays(self, parameter: torch.Tensor, convert: Conversion) -> bool:
        """Whether a parameter stays at rest although the program converts its module."""
        return parameter in self and moves_to(convert, parameter) == self._home

    @_with_the_lock
    def _substitute(self, group: WeightGroup, member: OffloadedParameter) -> torch.Tensor:
        """Return a device parameter in a forward or its recomputation, else the parameter."""
        # During backward, code that runs without grad mode is a hook, not a recomputation.
        if torch.is_grad_enabled() if in_backward() else self._is_in_forward():
            self._give(group, [member])
        return member.parameter if member.device is None else member.device

    def _give(self, group: WeightGroup, members: Sequence[OffloadedParameter]) -> None:
        """Bring a group, and give parameters of it that have none a device parameter."""
        self._keep_changes()
        if not group.open:
            self._release_if_outdated(group)
        buffer = self._bring(group)
        new = [each for each in members if each.device is None and not each.is_on_device]
        node = None if _runs_checkpoint() else _running_node()
        for each in members if node is not None else ():
            if each.read_by == node and each in new:
                # What autograd has unpacked is of the forward's graph. The program is about to ask
                # for its gradient in a graph of another device parameter, and to get none.
                raise PolicyError(
                    f"{each.name} is offloaded, and the backward of {current_node().name()} reads "
                    f"it and calls its module again to differentiate that itself, as torchdiffeq's "
                    f"odeint_adjoint does; the weight would get no gradient. Leave it on the "
                    f"device: name the other layers with layers=[...], or give "
                    f"weights=ebbtide.WeightPolicy(num_layers=0) beside a budget; or let autograd "
                    f"differentiate the calls (odeint)"
                )
        with torch.enable_grad():  # a later call may need gradients even if this one records none
            trained = [each for each in new if each.parameter.requires_grad]
            made = self._gradients.link(group, trained)
        for member in new:
            device = made[member] if member in made else DeviceParameter.of(member.view_of(buffer))
            device.replace(member.parameter)
            member.device = device
            self._given[member] = group

    @_with_the_lock
    def keep_changes(self) -> None:
        """Write modified device parameters to the host.

        Raises:
            PolicyError: see `OffloadedParameter.keep_change`.
        """
        self._keep_changes()

    def _keep_changes(self) -> None:
        """See `keep_changes`. This also takes back those without a buffer that nobody refers to."""
        for member, group in list(self._given.items()):
            if member.is_changed():
                if group.buffer is not None and not group.awaited:
                    self._release(group)  # a new reload of the group lacks the change
                member.keep_change(group.buffer)
                group.note_samples()
            if group.buffer is None and not member.is_held():
                self._take_back([member])

    def _take_back(self, members: Sequence[OffloadedParameter]) -> None:
        """Take device parameters from the program. Views that it has of them are watched."""
        taken = []
        for member in members:
            assert member.device is not None
            del self._given[member]  # first, so that an interrupt leaves none there without one
            memory = StorageWeakRef(member.device.untyped_storage())  # type: ignore[no-untyped-call]
            taken.append((member.name, memory, member.let_go()))
        for name, memory, device in taken:
            group = self._at.get(memory.cdata)
            buffer = None if group is None else group.buffer
            if not memory.expired() if buffer is None else self._is_viewed(buffer):  # type: ignore[no-untyped-call]
                self._viewed.append((name, memory, device.counter()))

    def _forget(self) -> None:
        """Forget the device parameters of a forward or a backward that ends; see `_take_back`."""
        self._keep_changes()
        self._take_back([each for each, group in self._given.items() if not group.open])

    def _is_viewed(self, buffer: torch.Tensor) -> bool:
        """Whether tensors refer to the memory of a buffer: of a graph, of the model, of nodes."""
        return count_storage_users(buffer) != self._alone

    def _check_views(self) -> None:
        """Check that no view of a weight was changed after the weight's buffer had been released.

        Raises:
            PolicyError: one was.
        """
        viewed, self._viewed = self._viewed, []
        changed = {name for name, _, counter in viewed if counter._version != counter.kept}
        # Guard views-count: a change through a view of a weight is an error when the weight itself
        # is gone. The buffer that the view is of is not written back to the host, so that the
        # change would be lost, and the next use of the layer would compute with the old values.
        if changed:
            raise PolicyError(
                f"{min(changed)} is offloaded, and was changed in place through a view of it, such "
                f"as .data or .detach() give, after other layers or the forward had ended since "
                f"the view was taken; the change is lost. Change the parameter itself, or copy the "
                f"view: view.clone()"
            )
        self._viewed = [each for each in viewed if not each[1].expired()]  # type: ignore[no-untyped-call]

    # ---- which groups are on the device -------------------------------------------------------

    def _bring(self, group: WeightGroup) -> torch.Tensor:
        """Return the group's buffer, ready for the kernels that the calling thread queues next.

        This also starts to prefetch the group that is expected next.

        Shape:
            (size_bytes,), uint8.
        """
        self._check_views()
        self._log.use(group.number, from_start=True)
        if group.buffer is None:
            self._load(group, keep=None)
        self._there[group] = self._there.pop(group)  # the most recently used
        self._wait_for(group)
        following = None if self._closed else self._next()
        if following is not None and following is not group and following.buffer is None:
            self._load(following, keep=group)
        assert group.buffer is not None
        return group.buffer

    def _load(self, group: WeightGroup, keep: WeightGroup | None) -> None:
        most = 2 if self._double_buffering else 1  # not counting the groups of running modules
        for other in list(self._there):
            if len(self._there) < most:
                break
            if not other.open and other is not keep:
                self._release(other)
        if keep is not None and len(self._there) >= most:
            return  # running modules need all groups on the device, so there is no prefetch
        self._transfers.reloads.free_abandoned()
        buffer, home = self._find_buffer(group.size_bytes, most)
        group.note_loaded()
        # Queued kernels may still read the memory, whether it is new or another group's buffer.
        self._transfers.reloads.start(group, Target(buffer, home.record(), home))
        assert group.ready is not None
        self._reading.append(group.ready)
        group.used_elsewhere = False
        self._there[group] = None
        self._at[buffer.untyped_storage()._cdata] = group
        self._transfers.account.take_weights(group.size_bytes)
        self.peak_groups = max(self.peak_groups, len(self._there))

    def _find_buffer(self, size_bytes: int, most: int) -> tuple[torch.Tensor, AbstractStream]:
        """Return an unused or new buffer of this size, and the stream that owns its memory."""
        for place, (buffer, _) in enumerate(self._spare):
            if buffer.numel() == size_bytes:
                return self._spare.pop(place)
        while self._spare and len(self._there) + len(self._spare) >= most:
            self._spare.pop(0)
        buffer = self._device.allocate(size_bytes)
        self._alone = count_storage_users(buffer)
        return buffer, self._device.compute_stream()

    def _next(self) -> WeightGroup | None:
        """Predict the next group from the order of the last forward and backward passes."""
        order = self._log.expected
        if order is not None:
            place = self._log.place
            return self.groups[order.items[place]] if place < len(order) else None
        last = self._log.last
        if not in_backward():  # the first forward: assume the model's order
            return self.groups[last + 1] if last + 1 < len(self.groups) else None
        # The first backward: assume the model's order, reversed.
        return self.groups[last - 1] if last else None

    def _wait_for(self, group: WeightGroup) -> None:
        """Make the current compute stream wait for a group that is on the device."""
        assert group.buffer is not None and group.ready is not None
        current = self._device.compute_stream()
        # Guard compute-waits-for-weights: the compute stream waits for the reload of the weights. A
        # layer would compute with a buffer that the copy has not filled.
        self._transfers.wait_for_reload(group, group.ready, current)
        if not group.awaited:
            self._fill(group, group.buffer)
        group.awaited = True
        at_home = self._device.note_use(group.buffer, group.home, current, group.ready)
        group.used_elsewhere |= not at_home

    def _fill(self, group: WeightGroup, buffer: torch.Tensor) -> None:
        """Copy the values into a buffer that are not in the group's memory, one by one.

        Streams:
            The host waits for each copy, so that all streams find them.
        """
        for member in group.members:
            if member.values is not member.host and not member.is_on_device:
                member.view_of(buffer).copy_(member.values)
            if member.device is not None:
                # The model holds it since the group was here before. Its memory does not show what
                # the program has written on the host since.
                member.device.refer_to(member.view_of(buffer))
            if member.former and not member.is_on_device:
                memory = StorageWeakRef(buffer.untyped_storage())  # type: ignore[no-untyped-call]
                for former in member.show_former(member.view_of(buffer)):
                    self._viewed.append((member.name, memory, former.counter()))

    def _release(self, group: WeightGroup) -> None:
        """Release a group's buffer. Changes of its weights have been kept."""
        assert group.buffer is not None
        buffer, home = group.buffer, group.home
        # Guard held-weights-are-tracked: a weight that the model itself refers to keeps its memory.
        # A forward could take a weight out of a layer, run the layer, and then use the weight after
        # its memory was taken away.
        gone = [each for each in group.members if each in self._given and not each.is_held()]
        self._take_back(gone)
        del self._there[group]
        del self._at[buffer.untyped_storage()._cdata]
        # Guard buffer-without-readers: a buffer is taken over only when no tensor refers to it any
        # more. A forward or a backward node that still uses the old weights would find the weights
        # of another layer.
        unread = not self._is_viewed(buffer)
        # Guard buffer-of-one-stream: a buffer is taken over only if no stream but its own used it.
        # The next copy waits only for the stream on which the buffer was allocated; kernels on
        # another stream, such as a backward on a stream of its own, could still read the buffer.
        ordered = not group.used_elsewhere
        if group.awaited and unread and ordered:
            self._spare.append((buffer, home))
        if unread and self._viewed:
            identity = buffer.untyped_storage()._cdata
            self._viewed = [each for each in self._viewed if each[1].cdata != identity]
        self._transfers.reloads.free(group, STORED)
        self._transfers.account.take_weights(-group.size_bytes)

    def _release_if_outdated(self, group: WeightGroup) -> None:
        """Release a group's buffer if the program has changed the host values since."""
        # Guard weights-of-recomputation: a layer that is recomputed reloads its weights if the
        # program has changed them since the forward, and so does one that was prefetched before a
        # forward changed them. It would compute with the values from before.
        if group.buffer is not None and group.is_outdated():
            self._release(group)

    def _release_all(self) -> None:
        for group in list(self._there):
            self._release(group)

    # ---- backward -----------------------------------------------------------------------------

    @_with_the_lock
    def begin_backward(self, groups: Sequence[WeightGroup]) -> None:
        """See the base class.

        The modules still hold their parameters: if backward raises, nothing has to be put back. A
        module that is called, to recompute its forward, is entered as ever, and code that reads a
        parameter by its name gets its device parameter.
        """
        self._note_backward(current_graph_task())
        if not self._running:
            self._forget()
        for group in groups:
            if group.handles or not self._closed:  # else the graph needs nothing of it
                self._bring(group)

    def _note_backward(self, task: int) -> None:
        """Register a callback for the end of the running backward pass, once for each pass."""
        if task not in self._backwards:
            call_after_backward(functools.partial(self._end_backward, task))
            self._backwards.add(task)
            self._transfers.begin_run()

    def _end_backward(self, task: int) -> None:
        """Clean up after a backward pass that has ended."""
        self._wait_for_copies(self._forget_backward(task))

    @_with_the_lock
    def _forget_backward(self, task: int) -> list[AbstractEvent]:
        if task in self._backwards:  # else it was taken for one that has raised
            self._backwards.remove(task)
            self._transfers.end_run()
        if not self._running:
            self._forget()
        self._transfers.offloads.retire_finished()  # the host has waited for all gradients
        return self._copies_to_wait_for()

    def _end_raised(self) -> None:
        """End backward passes that have raised, of which autograd says nothing.

        One that another thread runs may be among them: then only its statistics are cut in two.
        """
        while self._backwards:
            self._backwards.pop()
            self._transfers.end_run()
        if any(group.open for group in self.groups):
            self._leave_all()

    def pack(self, tensor: torch.Tensor, whole: torch.Tensor) -> Saved | None:
        storage = tensor.untyped_storage()
        group = self._at.get(storage._cdata)
        if group is not None:
            member = group.member_at(int(tensor.storage_offset()) * tensor.element_size())
            return WeightTensor(self, group, member, tensor, is_cast=False)
        cast = cast_parameter(whole)
        found = None if cast is None else self.find(cast.parameter)
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
        self._keep_changes()
        if group.buffer is not None and member.loaded != member.mark():
            self._release(group)
        return self._bring(group)

    @_with_the_lock
    def add_handle(self, handle: WeightTensor, group: WeightGroup) -> None:
        """Count one more saved tensor that needs the values of a group, as long as it lives."""
        group.handles += 1
        self._transfers.live += 1
        self._deaths.expect(handle, (group, self._transfers))

    def note_deaths(self) -> None:
        """Note which saved weights have died.

        Called with the lock held; see [Note: deaths]. Finished copies are forgotten, too, because
        their events hold memory.
        """
        if self._reading:
            self._reading = [event for event in self._reading if not event.query()]
        died = self._deaths.queue
        while died:
            held = self._deaths.awaited.pop(died.popleft(), None)
            if held is not None:
                self._forget_handle(*held)

    def _forget_handle(self, group: WeightGroup, transfers: Transfers) -> None:
        transfers.live -= 1
        if transfers is not self._transfers:  # an interrupt came after the forward
            transfers.poll()
        group.handles -= 1
        if self._closed and not group.handles:
            self._release_all()
            self._spare.clear()
            group.forget_memory()
            self._device.defer(functools.partial(self._give_back_later, group.slots))

    # ---- ends ---------------------------------------------------------------------------------

    def start_anew(self, transfers: Transfers) -> None:
        for _, member in self.members():
            if member.is_changed():
                member.keep_change(None)
            member.put_back()
            self._given.pop(member, None)
            member.device = None
        handles = Counter(group for group, _ in self._deaths.awaited.values())
        for group in self.groups:
            group.handles = handles[group]
        super().start_anew(transfers)

    def settle(self) -> None:
        """Block the host until no copy reads the host values, so that their memory can be freed."""
        with self._transfers.gate:
            copies, self._reading = self._reading, []
            copies += [event for _, event in self._transfers.reloads.abandoned]
        self._wait_for_copies(copies)
        self._transfers.poll()

    def _close(self) -> None:
        """See the base class.

        Values that a live graph still needs are freed together with the last such graph.
        """
        with self._transfers.gate:
            self._release_all()
            self._spare.clear()
        # Guard close-after-streams: host memory of weights and gradients is given back when all
        # streams of the device are empty. A stream of the program's own may be copying them
        # (``p.to(device, non_blocking=True)``): the memory would be unmapped under the copy.
        self._device.finish_other_streams()
        with self._transfers.gate:
            for group in self.groups:
                group.drop_blocks()
        # Inside a forward, copies may be under way, from memory that is ours no more afterwards.
        self.settle()
        with self._transfers.gate:
            self.note_deaths()
            self._closed = True
            if any(group.handles for group in self.groups):
                # Else the last saved weight would take with it whoever notes that it has died.
                self._transfers.tidiers.append(self.note_deaths)
            for group in self.groups:
                if not group.handles:
                    group.forget_memory()
                    for slot in group.slots:
                        self._transfers.store.drop(slot)

    def _give_back_later(self, slots: Sequence[RestingSlot]) -> None:
        """Free the slots of a closed group once no copy reads them. Blocks, so it runs deferred."""
        self._device.finish_copies()
        self._device.finish_other_streams()
        for slot in slots:
            self._transfers.store.drop(slot)
