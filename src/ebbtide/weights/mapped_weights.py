"""The weights of a model on a CPU, in mapped files, and in RAM only while their layer runs.

Disk and RAM are not separate tensors here, so nothing is copied: parameters, gradients and
optimizer state are tensors in memory-mapped files (`ebbtide.stores.mapped_memory`), and the kernel
moves their pages. The pages of a layer are read ahead while the layer before it runs, and paged out
two layers later.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ebbtide.devices.process import call_weakly
from ebbtide.runtime.events import Subject
from ebbtide.runtime.torch_internals import in_backward
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores.mapped_memory import FileSlot, page_in, page_out
from ebbtide.stores.measured_memory import return_freed_memory
from ebbtide.weights.groups import WeightGroup
from ebbtide.weights.hooks import AbstractWeights

_MOST_RECENT = 2  # groups whose pages stay in RAM: the running layer's and the one before it


@final
class MappedWeights(AbstractWeights):
    """The offloaded weights of a model on a CPU, and the files of their gradients.

    With ``double_buffering``, the next group is read ahead while one is in use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recent: list[WeightGroup] = []  # groups whose pages may be in RAM, oldest first
        self._handles: list[Any] = []
        # The program decides how long a parameter lives that another one has replaced.
        self._watched = WeakIdKeyDictionary()
        super().__init__(*args, **kwargs)
        self._reader = self._device.lane("ebbtide-weights-read", "disk")
        for group in self.groups:
            self._page_out(group)
        return_freed_memory()  # the RAM that the parameters occupied before

    def _use(self, transfers: Transfers) -> None:
        """See the base class. Nothing to do: nothing is copied."""

    def _begin_forward(self) -> None:
        self._adopt_all()
        for _, member in self.members():
            if member.parameter not in self._watched and member.parameter.requires_grad:
                self._watch(member.parameter)
                self._watched[member.parameter] = None

    def end_forward(self) -> None:
        """See the base class. Nothing to do: `enter` reads pages and pages them out."""

    def enter(self, group: WeightGroup) -> None:
        """See the base class. This pages out the groups used before the last two."""
        with self._transfers.gate:
            if group in self._recent:
                self._recent.remove(group)
            self._recent.append(group)
            gone = self._recent[:-_MOST_RECENT]
            del self._recent[:-_MOST_RECENT]
        # A module that is still running around this one reads its pages back on the next access.
        for other in gone:
            self._page_out(other)
        if gone:
            return_freed_memory()  # autograd made the gradients in RAM; now they are in files
        number = group.number + (-1 if in_backward() else 1)
        if self._double_buffering and 0 <= number < len(self.groups):
            self._read_ahead(self.groups[number])

    def leave(self, group: WeightGroup) -> None:
        """See the base class. The pages stay in RAM until two other layers have been entered."""

    def begin_backward(self, groups: Sequence[WeightGroup]) -> None:
        for group in groups:
            self.enter(group)

    def settle(self) -> None:
        """See the base class. Nothing to do: no copy reads the mapped files."""

    def _close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._reader.close()
        for group in self.groups:
            group.forget_memory()
            self._transfers.store.drop(group.resting)
            group.drop_blocks()

    def _slots_of(self, group: WeightGroup) -> Iterator[FileSlot]:
        for slot in (group.resting, *group.blocks):
            assert isinstance(slot, FileSlot)
            yield slot

    def _page_out(self, group: WeightGroup) -> None:
        for slot in self._slots_of(group):
            page_out(slot)

    def _read_ahead(self, group: WeightGroup) -> None:
        assert isinstance(group.resting, FileSlot)
        read = self._reader.submit(functools.partial(page_in, group.resting))
        recorder = self._transfers.account.recorder
        if recorder is not None:
            about = Subject(group.layer, 0, group.size_bytes, group.kind)
            recorder.copy("reload", about, read)

    def _watch(self, parameter: torch.Tensor) -> None:
        """Register a hook that moves a parameter's new gradient to the group's file."""
        # A parameter owns its hooks, and the garbage collector cannot see them: a hook that refers
        # to the parameter would keep a model that is dropped without `detach` alive for ever.
        hook = call_weakly(self._take_gradient)
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        found, gradient = self.find(parameter), parameter.grad
        if found is None or gradient is None or gradient.requires_grad:
            return
        group, member = found
        if gradient.layout is torch.strided and not group.holds(gradient):
            resting, _ = group.allocate(member)
            parameter.grad = resting.copy_(gradient)
