"""Copies the gradients of offloaded weights to the host as they are made.

They are scaled there by torch's `GradScaler`, which the first part of this file makes wait for its
scale.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.amp import grad_scaler
from torch.autograd.graph import saved_tensors_hooks

from ebbtide.devices.device import AbstractEvent, AbstractStream, in_range
from ebbtide.errors import StoreFullError
from ebbtide.runtime.record import DROPPED, GRADIENT, OFFLOADING, Record
from ebbtide.runtime.torch_internals import current_graph_task, hooks_are_enabled, is_transformed
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores.store import RestingSlot
from ebbtide.weights.parameters import DeviceParameter, OffloadedParameter, WeightGroup

# ---- Makes the scaler right for gradients on the host whose scale is on an accelerator
#
# The scaler copies its scale, and a flag for infinite gradients, to the device of the gradients,
# with ``non_blocking=True``, and uses the copies at once. A copy to the host comes later: the
# host would multiply the gradients by whatever was there, and the flag's first value would
# overwrite what the host has found.

_COPIES: Any = getattr(grad_scaler, "_MultiDeviceReplicator", None)
_SCALES = ("grad_scale", "found_inf")  # what a scaler gives to a fused optimizer


def wait_for_scales() -> None:
    """Let the host wait for what a scaler copies to it, from now on, in the whole process."""
    if _COPIES is not None and not hasattr(_COPIES.get, "__wrapped__"):
        _COPIES.get = _waiting(_COPIES.get)


def _waiting(get: Callable[[Any, torch.device], torch.Tensor]) -> Any:
    @functools.wraps(get)
    def waiting(copies: Any, device: torch.device) -> torch.Tensor:
        known = set(copies._per_device_tensors)
        copy = get(copies, device)
        if device not in known and copy.device.type == "cpu" != copies.master.device.type:
            copy.copy_(copies.master)  # which the host waits for
        return copy

    return waiting


def bring_scales(optimizer: torch.optim.Optimizer) -> None:
    """Copy the scales that a scaler gives to a fused optimizer to the host, and wait for them."""
    for name in _SCALES:
        scale = getattr(optimizer, name, None)
        if isinstance(scale, torch.Tensor) and scale.device.type != "cpu":
            setattr(optimizer, name, scale.cpu())


# ---- Gradients of offloaded weights: each is copied to the host when made, and accumulates there
#
# [Note: gradients on their way] In the autograd graph, a device parameter is the result of moving
# its parameter to the device. The backward of that move receives the gradient, summed over all
# uses. It queues a copy to host memory and returns that memory at once, so the device continues
# during the copy. The next node of the backward pass, `_HostParameter`, waits for the copy.
# Everything after it works as for a parameter on the host: hooks, accumulation in `param.grad`,
# other uses of the parameter by the loss, and the result of `torch.autograd.grad`.
#
# A parameter may come to the device several times before a backward: in several forwards, or in one
# that has released it in between. All these device parameters are results of one move, as all uses
# of a parameter on the device end in one node that accumulates. So autograd adds the gradients in
# the order in which it adds them without an offload, which decides about the last bit. The move
# saves its result for backward, but without memory. When autograd unpacks it, it gives a tensor
# that is the result of the move and has the memory that the group has on the device now. After a
# backward that does not retain its graph there is nothing to unpack, so the next forward moves
# the parameter anew.

_CAST = "ToCopyBackward0"


@final
class GradientRecord(Record):
    """One gradient whose copy to the host is under way.

    It does not hold the gradient in host memory: autograd copies a gradient that somebody else
    refers to, and takes one as it is that nobody does. If the program lets go of it before the copy
    has ended, the next gradient has the same memory, and its copy comes behind.

    Args:
        group: the weight group of its parameter.
        source: the gradient's bytes on the device.
        block: the slot that they are copied to.
        copied: the end of the copy.
        home: the compute stream that made the gradient.
    """

    kind = GRADIENT

    def __init__(
        self,
        group: WeightGroup,
        source: torch.Tensor,
        block: RestingSlot,
        copied: AbstractEvent,
        home: AbstractStream,
    ) -> None:
        super().__init__(group.layer, 0, source.numel(), OFFLOADING)
        self.source, self.home, self.slot = source, home, block
        self.offloaded = copied

    def release_source(self) -> None:
        """Drop the record and its memory on the device."""
        self.source = self.slot = None
        if self.state is not DROPPED:
            self.move_to(DROPPED)


@final
@dataclass(eq=False)
class _Move:
    """The state that the two autograd nodes of one parameter's move to the device share.

    Attributes:
        group: the group of the parameter.
        member: the parameter.
        gradients: sends its gradient.
        version: of the parameter when the device parameter got its values.
        readable: reached when the gradient that a backward has sent is on the host, by the id of
            autograd's graph task: several threads may differentiate one graph at once. A backward
            that failed half-way leaves its event behind.
        leaf: the leaf on the device that the graph has beside the parameter.
    """

    group: WeightGroup
    member: OffloadedParameter
    gradients: Gradients
    version: int
    readable: dict[int, AbstractEvent] = field(default_factory=dict)
    leaf: torch.Tensor | None = None

    def has_left(self) -> bool:
        """Whether the parameter is the leaf on the device now; see [Note: leaves]."""
        return self.member.has_left and self.leaf is self.member.device_leaf

    def view(self) -> torch.Tensor:
        """View the parameter's values on the device."""
        assert self.group.buffer is not None
        return self.member.view_of(self.group.buffer)


class _HostParameter(torch.autograd.Function):
    """The identity on the host. Its backward waits until the gradient's copy has ended."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, move: _Move) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.move = move
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        readable = ctx.move.readable.pop(current_graph_task(), None)
        # Guard gradient-before-accumulation: the host waits for a gradient's copy before autograd
        # accumulates it. The optimizer would step with a gradient that has not arrived yet.
        if readable is not None:
            readable.synchronize()
        return gradients[0], None


class _MoveToDevice(torch.autograd.Function):
    """Moves a parameter into a device buffer. Its backward sends the gradient to the host."""

    @staticmethod
    def forward(
        ctx: Any,
        resting: torch.Tensor,  # noqa: ARG004
        leaf: torch.Tensor,
        move: _Move,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.move, move.leaf = move, leaf
        made = DeviceParameter.of(move.view())
        if hooks_are_enabled():
            ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradient, move = gradients[0], ctx.move
        if move.has_left():
            return None, gradient, None
        if gradient is not None:
            gradient = move.gradients.send(move, gradient)
        return gradient, None, None


@final
class Gradients:
    """The gradients of all offloaded weights of a model on an accelerator."""

    def use(self, transfers: Transfers) -> None:
        """Have these transfers queue the copies from now on. No copy is under way."""
        self._transfers = transfers

    def link(
        self, group: WeightGroup, members: Sequence[OffloadedParameter]
    ) -> dict[OffloadedParameter, DeviceParameter]:
        """Make device parameters in a group's buffer that autograd takes as computed from others.

        See [Note: gradients on their way].
        """
        made = {m: again for m in members if (again := _result_again(m)) is not None}
        # Autograd runs the nodes that were made last first. All `_MoveToDevice` nodes are made
        # after the `_HostParameter` nodes, so all copies are queued before the host waits for one.
        moves = [_Move(group, m, self, m.parameter._version) for m in members if m not in made]
        resting = [_HostParameter.apply(each.member.parameter, each) for each in moves]  # type: ignore[no-untyped-call]
        for there, move in zip(resting, moves, strict=True):
            made[move.member] = device = _move(there, move)
            move.member.move = weakref.ref(device.grad_fn)  # type: ignore[arg-type]
        return made

    def send(self, move: _Move, gradient: torch.Tensor) -> torch.Tensor:
        """Start to copy a gradient to the host.

        Returns:
            The host memory that will contain the gradient once `move.readable` is reached.

        Streams:
            The copy waits for the kernels queued on the current stream.
        """
        member = move.member
        gradient = gradient.to(member.host.dtype)  # that of its master; see [Note: masters]
        if member.has_left:  # and another parameter was in its place by then
            return gradient.to("cpu")
        plain = gradient.layout is torch.strided and gradient.numel() > 0
        checked = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        if torch.is_grad_enabled() or checked or not plain or is_transformed():
            # A gradient that is part of a graph, sparse or empty, or that anomaly detection reads
            # as soon as it is returned, or one of several at once, whose memory only `vmap` knows:
            # torch's own copy, which blocks.
            return gradient.to(member.host.device)
        source = _packed_bytes(gradient, member.stride)
        try:
            with self._transfers, self._transfers.gate:
                return self._copy_down(move, source)
        except StoreFullError:  # the program keeps earlier gradients: those take all the room
            return gradient.to(member.host.device)

    def _copy_down(self, move: _Move, source: torch.Tensor) -> torch.Tensor:
        group, member, offloads = move.group, move.member, self._transfers.offloads
        offloads.retire_finished()
        offloads.make_room(source.numel())
        gradient, block = group.allocate(member)
        home = self._transfers.device.compute_stream()
        # The copy must wait for the kernels queued so far, because they write the gradient.
        written = home.record()
        write, begin_bytes = self._transfers.store.write, member.offset_bytes
        copied, readable = in_range(
            "offload", group.layer, write, block, begin_bytes, source, written
        )
        record = GradientRecord(group, source, block, copied, home)
        self._transfers.account.note_offload(record)
        # Guard gradient-until-copied: a gradient's device memory is kept until its copy to the host
        # is complete. The allocator would hand the memory out again, and it would be overwritten
        # while the copy reads it.
        offloads.enqueue(record)
        move.readable[current_graph_task()] = readable
        return gradient


def _packed_bytes(gradient: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return the gradient's bytes, laid out with the given dense strides; copy only if needed.

    Shape:
        (size_bytes,), uint8.
    """
    storage = gradient.untyped_storage()
    whole = storage.nbytes() == gradient.nbytes and not gradient.storage_offset()
    plain = not (gradient.is_conj() or gradient.is_neg())
    if gradient.stride() != stride or not whole or not plain:
        packed = torch.empty_strided(
            gradient.shape, stride, dtype=gradient.dtype, device=gradient.device
        )
        storage = packed.copy_(gradient).untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=gradient.device).set_(storage)


def _move(resting: torch.Tensor, move: _Move) -> DeviceParameter:
    leaf = move.member.leaf_on(move.view().device)
    if not hooks_are_enabled():
        return _MoveToDevice.apply(resting, leaf, move)  # type: ignore[no-any-return, no-untyped-call]
    with saved_tensors_hooks(lambda _: move, _Move.view):
        return _MoveToDevice.apply(resting, leaf, move)  # type: ignore[no-any-return, no-untyped-call]


def _result_again(member: OffloadedParameter) -> DeviceParameter | None:
    """Make another result of the last move of a parameter; None if no graph waits for its gradient.

    It has the values that are on the device now, and a version counter of its own.
    """
    node: Any = None if member.move is None else member.move()
    if node is None or node.move.leaf is not member.device_leaf:  # of a parameter before
        return None
    try:
        made = node.saved_tensors
    except RuntimeError:  # a backward has freed the graph
        return None
    return DeviceParameter.take(made[0]) if made else None


def cast_parameter(tensor: torch.Tensor) -> OffloadedParameter | None:
    """Find the parameter whose device parameter was cast to this tensor.

    Args:
        tensor: a tensor that is no view.

    Returns:
        The parameter; None if the tensor is no such cast, has other strides, or was modified, or
        the forward has modified the weight.
    """
    node = tensor.grad_fn
    if node is None or node.name() != _CAST:
        return None
    source: Any = node.next_functions[0][0]
    move: _Move | None = getattr(source, "move", None)
    if type(source) is not _MoveToDevice._backward_cls or move is None:
        return None
    member = move.member
    is_changed = tensor._version or member.is_changed() or move.version != member.parameter._version
    is_alike = tensor.shape == member.shape and tensor.stride() == member.stride
    return member if is_alike and not is_changed else None
