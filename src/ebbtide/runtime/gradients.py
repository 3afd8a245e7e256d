"""Gradients of weights that rest on the host: they leave as they are made, and accumulate there.

[Note: gradients on their way] Autograd adds a gradient to `param.grad` on the device that made
it. Around that, for a parameter at rest: just before, what has accumulated on the host is put
aside; right after, the new gradient is taken, its copy down begins, and what was put aside is
`param.grad` again. When the backward ends, the host waits for the copies and adds what they
brought, in the order in which it came. A backward that raises adds nothing, and leaves
`param.grad` as it was.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.base import AbstractDevice, AbstractEvent, AbstractStream
from ebbtide.runtime.ranges import profiler_range
from ebbtide.runtime.weights import RestingParameter, WeightGroup, Weights, allocate_host_memory
from ebbtide.stores.host_memory import HostMemory


@dataclass(eq=False)
class _Arrival:
    """One gradient on its way to the host."""

    member: RestingParameter
    landing: torch.Tensor
    source: torch.Tensor | None
    copied: AbstractEvent
    home: AbstractStream


@final
class _Landings:
    """Host memory for the gradients of one group, in blocks that hold one of each."""

    def __init__(self, group: WeightGroup, device: AbstractDevice) -> None:
        self._group = group
        self._device = device
        self._blocks: list[HostMemory] = []
        self._given: dict[tuple[int, int], StorageWeakRef] = {}  # by offset and block

    def take(self, member: RestingParameter) -> torch.Tensor:
        """Memory for one gradient that nobody holds any more, in a storage of its own."""
        number = 0
        while True:
            if number == len(self._blocks):
                self._blocks.append(allocate_host_memory(self._device, self._group.size_bytes))
            given = self._given.get((member.offset_bytes, number))
            if given is None or given.expired():  # type: ignore[no-untyped-call]
                break
            number += 1
        landing = member.own_view_of(self._blocks[number].tensor)
        reference = StorageWeakRef(landing.untyped_storage())  # type: ignore[no-untyped-call]
        self._given[member.offset_bytes, number] = reference
        return landing

    def give_back(self) -> None:
        """Give the memory back; a gradient that somebody holds keeps it mapped."""
        while self._blocks:
            self._blocks.pop().give_back()
        self._given.clear()


@final
class _Backward:
    """One backward that is running. The engine holds it, as what it calls at the end.

    Attributes:
        aside: what had accumulated, of parameters whose new gradient autograd is adding now.
        arrivals: new gradients, in the order in which they were made.
    """

    def __init__(self, finish: Callable[[list[_Arrival]], None], end: Callable[[], None]) -> None:
        self.aside: dict[RestingParameter, torch.Tensor] = {}
        self.arrivals: list[_Arrival] = []
        self._finish = finish
        self._end = end
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        self._put_back()
        self._end()
        self._finish(self.arrivals)

    def __del__(self) -> None:  # it may have raised
        self._put_back()
        self._end()

    def _put_back(self) -> None:
        """Gradients that were only asked for (`torch.autograd.grad`) were not added."""
        for member, aside in self.aside.items():
            if member.parameter.grad is None:
                member.parameter.grad = aside
        self.aside.clear()


@final
class Gradients:
    """The gradients of the parameters of all groups.

    Args:
        device: that makes them.
        weights: whose groups.
        bound_bytes: on gradients whose copy down is under way; past it compute waits.
    """

    def __init__(self, device: AbstractDevice, weights: Weights, bound_bytes: int) -> None:
        self._device = device
        self._weights = weights
        self._bound_bytes = bound_bytes
        self._lock = threading.Lock()
        self._landings = {group: _Landings(group, device) for group in weights.groups}
        self._backwards: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()
        self._under_way: list[_Arrival] = []
        self._under_way_bytes = 0
        self._handles: list[Any] = []
        self._watched: set[RestingParameter] = set()

    def watch(self) -> None:
        """Hook the parameters that want a gradient, now and later."""
        for group in self._weights.groups:
            for member in group.members:
                if member not in self._watched and member.parameter.requires_grad:
                    self._watched.add(member)
                    self._hook(group, member)

    def _hook(self, group: WeightGroup, member: RestingParameter) -> None:
        def before(_: torch.Tensor) -> None:
            backward, parameter = self._backward(), member.parameter
            if parameter.grad is not None:
                backward.aside[member] = parameter.grad
                parameter.grad = None

        def after(_: torch.Tensor) -> None:
            self._take(group, member)

        parameter = member.parameter
        self._handles.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
        late = parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
        self._handles.append(late)

    def _take(self, group: WeightGroup, member: RestingParameter) -> None:
        """Autograd has made a gradient: let it leave, and put back what was put aside."""
        backward, parameter = self._backward(), member.parameter
        gradient, parameter.grad = parameter.grad, None
        aside = backward.aside.pop(member, None)
        if gradient is None:
            parameter.grad = aside
            return
        if gradient.requires_grad or gradient.layout is not torch.strided:
            # Part of a graph, or sparse: it moves as torch moves it.
            here = gradient.to(member.host.device)
            parameter.grad = here if aside is None else aside + here
            return
        parameter.grad = aside
        backward.arrivals.append(self._send(group, member, gradient))

    def _backward(self) -> _Backward:
        """The backward that is running in this thread."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            backward = self._backwards.get(task)
            if backward is None:
                end = functools.partial(self._weights.end_backward, task)
                backward = self._backwards[task] = _Backward(self._finish, end)
            return backward

    def begin_backward(self, groups: Sequence[WeightGroup]) -> None:
        """The backward of a module begins: it may compute with its weights again."""
        self._backward()  # whose end is the end of that at the latest
        self._weights.begin_backward(torch._C._current_graph_task_id(), groups)

    def _send(
        self, group: WeightGroup, member: RestingParameter, gradient: torch.Tensor
    ) -> _Arrival:
        source = _packed_bytes(gradient, member.host.stride())
        with self._lock:
            self._make_room(source.numel())
            landing = self._landings[group].take(member)
            target = torch.empty(0, dtype=torch.uint8).set_(landing.untyped_storage())
            home = self._device.compute_stream()
            with profiler_range("offload", group.layer):
                # The copy may start when the kernels queued so far have run: they write it.
                copied = self._device.copy_down(target, source, home.record())
            arrival = _Arrival(member, landing, source, copied, home)
            self._under_way.append(arrival)
            self._under_way_bytes += source.numel()
            return arrival

    def _make_room(self, size_bytes: int) -> None:
        """Let go of gradients whose copies are complete; past the bound compute waits for some."""
        while self._under_way:
            oldest = self._under_way[0]
            assert oldest.source is not None
            if not oldest.copied.query():
                if self._under_way_bytes + size_bytes <= self._bound_bytes:
                    return
                # Memory freed now is reused only once the copy has read it.
                oldest.home.wait(oldest.copied)
            self._under_way.pop(0)
            self._under_way_bytes -= oldest.source.numel()
            oldest.source = None

    def _finish(self, arrivals: list[_Arrival]) -> None:
        """A backward has ended: its gradients become part of `param.grad`."""
        sums: dict[RestingParameter, torch.Tensor] = {}
        for arrival in arrivals:
            arrival.copied.synchronize()
            if arrival.member in sums:
                sums[arrival.member].add_(arrival.landing)
            else:
                sums[arrival.member] = arrival.landing
        with self._lock:
            self._make_room(0)
        arrivals.clear()
        with torch.no_grad():
            for member, total in sums.items():
                parameter = member.parameter
                if parameter.grad is None:
                    parameter.grad = total
                else:
                    parameter.grad.add_(total)
        self._weights.settle()

    def give_back(self) -> None:
        """Give the host memory back, after `close`."""
        for landings in self._landings.values():
            landings.give_back()

    def close(self) -> None:
        """Unhook the parameters, once no copy is under way."""
        with self._lock:
            for arrival in self._under_way:
                arrival.copied.synchronize()
            self._make_room(0)
        while self._handles:
            self._handles.pop().remove()
        self._watched.clear()


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
