"""Gradients of weights that rest on the host: they leave as they are made, and accumulate there.

[Note: gradients on their way] For autograd, a stand-in is its parameter, moved to the device. The
backward of that move sends the gradient, which is the sum over all uses, to host memory, and gives
autograd that memory at once: the copy is under way while the device goes on. The node before it, of
the host, waits for the copy. From then on all is as on the host: hooks, accumulation in
`param.grad`, what else the loss wants of the parameter, or what `torch.autograd.grad` returns.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent, AbstractStream
from ebbtide.runtime.groups import Landings, WeightGroup, allocate_host_memory
from ebbtide.runtime.ranges import profiler_range
from ebbtide.runtime.resting import RestingParameter, StandIn

_CAST = "ToCopyBackward0"


@dataclass(eq=False)
class _Departure:
    """One gradient whose copy to the host may be under way, and both ends of the copy."""

    source: torch.Tensor
    target: torch.Tensor
    copied: AbstractEvent
    home: AbstractStream


class _Stay(torch.autograd.Function):
    """A parameter on the host. Its gradient is waited for, before anybody adds to it."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, member: RestingParameter, gradients: Gradients
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.member, ctx.gradients = member, gradients
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.gradients.wait(ctx.member)
        return gradients[0], None, None


class _Move(torch.autograd.Function):
    """Its values in a buffer of the device. The gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        resting: torch.Tensor,  # noqa: ARG004
        buffer: torch.Tensor,
        member: RestingParameter,
        gradients: Gradients,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.member, ctx.gradients = member, gradients
        return StandIn.of(member.view_of(buffer))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0]
        if gradient is not None:
            gradient = ctx.gradients.send(ctx.member, gradient)
        return gradient, None, None, None


@final
class Gradients:
    """The gradients of the parameters of all groups.

    Args:
        device: that makes them.
        groups: whose gradients.
        bound_bytes: on gradients whose copy down is under way; past it compute waits.
    """

    def __init__(
        self, device: AbstractDevice, groups: Sequence[WeightGroup], bound_bytes: int
    ) -> None:
        self._device = device
        self._bound_bytes = bound_bytes
        self._lock = threading.Lock()
        self._homes = {member: group for group in groups for member in group.members}
        allocate = functools.partial(allocate_host_memory, device)
        self._landings = {group: Landings(group, allocate) for group in groups}
        self._awaited: dict[RestingParameter, list[AbstractEvent]] = {}
        self._under_way: list[_Departure] = []
        self._under_way_bytes = 0

    def link(self, members: Sequence[RestingParameter], buffer: torch.Tensor) -> list[StandIn]:
        """Stand-ins for parameters that want a gradient: their values in this buffer."""
        # Autograd runs the younger nodes first: all gradients are on their way before one is
        # waited for.
        resting = [_Stay.apply(m.parameter, m, self) for m in members]  # type: ignore[no-untyped-call]
        pairs = zip(resting, members, strict=True)
        return [_Move.apply(there, buffer, m, self) for there, m in pairs]  # type: ignore[no-untyped-call]

    def send(self, member: RestingParameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Let a gradient leave.

        Returns:
            Where it will be after `wait`; None if the parameter has it already.

        Streams:
            The copy waits for what is queued on the current stream.
        """
        if member.departed:
            _add_at_home(member, gradient)
            return None
        if torch.is_grad_enabled() or gradient.layout is not torch.strided:
            return gradient.to(member.host.device)  # part of a graph, or sparse: as torch does it
        with self._lock:
            landing, copied = self._copy_down(member, gradient)
            self._awaited.setdefault(member, []).append(copied)
        return landing

    def wait(self, member: RestingParameter) -> None:
        """Block the host until the gradients that this parameter was sent are there."""
        with self._lock:
            events = self._awaited.pop(member, ())
        for event in events:
            event.synchronize()

    def _copy_down(
        self, member: RestingParameter, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, AbstractEvent]:
        group = self._homes[member]
        source = _packed_bytes(gradient, member.host.stride())
        self._make_room(source.numel())
        landing = self._landings[group].take(member)
        target = torch.empty(0, dtype=torch.uint8).set_(landing.untyped_storage())
        home = self._device.compute_stream()
        with profiler_range("offload", group.layer):
            # The copy may start when the kernels queued so far have run: they write it.
            copied = self._device.copy_down(target, source, home.record())
        self._under_way.append(_Departure(source, target, copied, home))
        self._under_way_bytes += source.numel()
        return landing, copied

    def _make_room(self, size_bytes: int) -> None:
        """Let go of gradients whose copies are complete; past the bound compute waits for some."""
        while self._under_way:
            oldest = self._under_way[0]
            if not oldest.copied.query():
                if self._under_way_bytes + size_bytes <= self._bound_bytes:
                    return
                # Memory freed now is reused only once the copy has read it.
                oldest.home.wait(oldest.copied)
            self._under_way.pop(0)
            self._under_way_bytes -= oldest.source.numel()

    def close(self) -> None:
        """Give the host memory back, once no copy is under way.

        A gradient that somebody holds keeps its memory mapped.
        """
        with self._lock:
            for departure in self._under_way:
                departure.copied.synchronize()
            self._make_room(0)
            self._awaited.clear()
        for landings in self._landings.values():
            landings.give_back()


def _add_at_home(member: RestingParameter, gradient: torch.Tensor) -> None:
    """The parameter has left the host while a graph of before was alive."""
    parameter = member.parameter
    with torch.no_grad():
        present = parameter.grad
        parameter.grad = gradient.detach() if present is None else present + gradient


def _packed_bytes(gradient: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A gradient's bytes, laid out by these strides, which are dense.

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


def cast_parameter(tensor: torch.Tensor) -> RestingParameter | None:
    """Whose stand-in this is a cast of, laid out alike; None if it is none.

    Args:
        tensor: with a storage of its own.
    """
    node = tensor.grad_fn
    if node is None or node.name() != _CAST:
        return None
    source: Any = node.next_functions[0][0]
    member: RestingParameter | None = getattr(source, "member", None)
    if type(source) is not _Move._backward_cls or member is None:
        return None
    if tensor.shape != member.host.shape or tensor._version:
        return None
    return member if tensor.stride() == member.host.stride() else None
