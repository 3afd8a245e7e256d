"""The weights of a model on a CPU, and their optimizer's state, in mapped files.

`MappedWeights` reads a layer's pages ahead and lets them go behind it, `MappedOptimizerState` moves
what an optimizer makes to files, and `Pager` keeps its step from filling RAM with their pages.
"""

from __future__ import annotations

import functools
import mmap
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ebbtide.devices.lanes import watch
from ebbtide.devices.process import OptimizerWatch, call_weakly
from ebbtide.errors import StoreFullError, warn_user
from ebbtide.runtime.events import Subject
from ebbtide.runtime.torch_internals import count_storage_users, in_backward
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores.mapped_memory import FileSlot, page_in, page_out
from ebbtide.stores.measured_memory import FreedMemory, return_freed_memory
from ebbtide.stores.store import AbstractStore, RestingSlot
from ebbtide.weights.groups import (
    AbstractWeights,
    GradientBuffers,
    OffloadedParameters,
    WeightGroup,
)
from ebbtide.weights.parameters import ALONE

_PAGER_S = 0.001  # interval at which the pager checks the mapped pages during an optimizer step
_CHECKS_A_LOOK = 20  # checks of the pages between two looks at whether the step still runs


@final
class Pager:
    """A thread that pages files out whenever a step has brought too many pages into RAM.

    It ends with the step, even if that raises: it looks whether the caller's frame still runs. The
    frame refers to the optimizer, so it is let go of as soon as the step is over: the thread may
    not run for a while on a busy machine, and the state of an optimizer that is dropped gives its
    room back at once.

    Args:
        store: the store of the files.
        most_bytes: how much may stay in RAM.
    """

    def __init__(self, store: AbstractStore, most_bytes: int) -> None:
        self._store: AbstractStore | None = store
        self._most_bytes = most_bytes
        self._begin_bytes = _mapped_bytes()  # pages of libraries and of the last layers
        self._step: FrameType | None = _calling_frame()
        self._stepping_thread = threading.get_ident()
        self._num_looks = 0
        watch(self._look, _PAGER_S, "ebbtide-pager")

    def stop(self) -> None:
        """End the thread, and let go of the step. This does not wait for the thread."""
        self._step = self._store = None

    def _look(self) -> bool:
        """Page out if there is too much. Returns whether the step still runs."""
        self._num_looks += 1
        is_due = self._num_looks % _CHECKS_A_LOOK == 0
        if is_due and not _is_running(self._step, self._stepping_thread):
            self.stop()
        store = self._store
        if store is not None and _mapped_bytes() > self._begin_bytes + self._most_bytes:
            store.page_out()
        return store is not None


def _calling_frame() -> FrameType:
    """The frame of the code outside this package that called it."""
    frame = sys._getframe()
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == package:
        frame = frame.f_back
    return frame


def _is_running(sought: FrameType | None, thread: int) -> bool:
    """Whether a frame is on the stack of a thread. None is on no stack."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame is not sought:
        frame = frame.f_back
    return frame is not None


def _mapped_bytes() -> int:
    """Bytes of this process's memory that are pages of mapped files; 0 where unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


# ---- Optimizer state in mapped files, for weights that are in mapped files themselves ----

_LEAST_BYTES = 32 * 2**20  # the pager always tolerates this much


@final
class MappedOptimizerState:
    """Lets optimizers step over mapped files without having all their pages in RAM at once.

    [Note: state in files] Optimizers make their state in their first step, one tensor after the
    other. All of it at once may not fit in RAM. So while an optimizer steps, the state that it
    makes anew is in dicts that move each tensor to a file when the optimizer assigns it. The tensor
    object stays the same, so all names that it has elsewhere still mean the same tensor. A tensor
    that shares its memory with another one stays in RAM, where the two stay together.

    Args:
        store: provides the files for the optimizer state.
        parameters: the offloaded parameters, of which some or all are in mapped files.
        page_bytes: how much may stay in RAM while an optimizer steps.
    """

    def __init__(
        self, store: AbstractStore, parameters: OffloadedParameters, page_bytes: int
    ) -> None:
        self._store = store
        self._parameters = parameters
        self._most_bytes = max(_LEAST_BYTES, page_bytes)
        self._warned = False
        self._freed = FreedMemory()
        self._pager: Pager | None = None
        self._stepping: weakref.ref[torch.optim.Optimizer] | None = None
        self._watch = OptimizerWatch(before=self.before_step, after=self.after_step)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Start the pager, and have the state that the optimizer makes moved to files."""
        if not self._is_ours(optimizer):
            return  # and perhaps ours steps in another thread
        self._end_step()  # needed if the step before raised
        self._pager = Pager(self._store, self._most_bytes)
        self._stepping = weakref.ref(optimizer)
        state = optimizer.state
        if isinstance(state, defaultdict) and state.default_factory is dict:
            state.default_factory = _MakeStateAtRest(self, optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Stop the pager, and move state that is still in RAM to files."""
        if not self._is_ours(optimizer):
            return
        self._end_step()
        for parameter, state in optimizer.state.items():
            if isinstance(state, dict):
                for value in state.values():
                    self.move_to_file(parameter, value)
        self._store.page_out()
        return_freed_memory()

    def move_to_file(self, parameter: object, value: object) -> None:
        """Move a state tensor of the shape of a mapped parameter to a file, if it is not there yet.

        A tensor that shares its memory with another one is left alone. If the disk has no room, the
        tensor stays in RAM, which is said once.
        """
        if not isinstance(parameter, torch.Tensor) or not self._is_mapped(parameter):
            return
        if type(value) is not torch.Tensor or value.shape != parameter.shape:
            return
        if self._store.maps(value) or not _can_move(value):
            return
        try:
            value.data = self._copy_to_file(value)
        except StoreFullError as error:
            if not self._warned:
                self._warned = True
                warn_user("state-in-ram", f"optimizer state stays in RAM: {error.strerror}")
            return
        # The C library cannot reuse what the tensor occupied if anything small now lies in it.
        if self._freed.is_due(value.nbytes, 0):
            return_freed_memory()

    def move_to(self, store: AbstractStore) -> None:
        """Make the files of later state in another store, which knows those of the state so far."""
        self._store = store

    def close(self) -> None:
        """Watch no optimizer. Each part of a file is given back when no tensor refers to it."""
        self._end_step()
        self._watch.remove()

    def _copy_to_file(self, value: torch.Tensor) -> torch.Tensor:
        slot = self._store.allocate_resting_on_disk(value.nbytes)
        flat = torch.from_numpy(slot.tensor.numpy()[: value.nbytes]).view(value.dtype)
        self._store.drop(slot)  # the tensor alone keeps the memory
        with torch.no_grad():
            return flat.as_strided(value.shape, value.stride()).copy_(value)

    def _is_mapped(self, tensor: object) -> bool:
        """Whether this is a parameter whose values are in a mapped file."""
        found = self._parameters.find(tensor)
        return found is not None and found[0].resting.is_mapped

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(self._is_mapped(p) for g in optimizer.param_groups for p in g["params"])

    def _end_step(self) -> None:
        pager, self._pager = self._pager, None
        if pager is not None:
            pager.stop()
        optimizer = None if self._stepping is None else self._stepping()
        self._stepping = None
        if optimizer is not None:
            _restore_dicts(optimizer.state)


class _StateAtRest(OrderedDict[str, Any]):
    """The state of one parameter while its optimizer steps; see [Note: state in files].

    Copied or pickled, it is an `OrderedDict`, which `torch.load(weights_only=True)` accepts. There
    is one to copy only if the step raised.
    """

    def __init__(self, state: MappedOptimizerState, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._owner = weakref.ref(state)
        self._optimizer = weakref.ref(optimizer)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        state, optimizer = self._owner(), self._optimizer()
        if state is not None and optimizer is not None:
            # It is nearly always the last one, because the optimizer has just asked for it.
            entries = reversed(optimizer.state.items())
            parameter = next((p for p, own in entries if own is self), None)
            state.move_to_file(parameter, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


class _MakeStateAtRest:
    """The default factory of an optimizer's state while it steps."""

    def __init__(self, state: MappedOptimizerState, optimizer: torch.optim.Optimizer) -> None:
        self._owner = weakref.ref(state)
        self._optimizer = weakref.ref(optimizer)

    def __call__(self) -> dict[str, Any]:
        state, optimizer = self._owner(), self._optimizer()
        if state is None or optimizer is None:
            return {}
        return _StateAtRest(state, optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return type, ({},)  # gives `dict`: a copy of the optimizer is a plain optimizer


def _restore_dicts(state: Any) -> None:
    """Make an optimizer's state consist of plain dicts again."""
    if isinstance(state, defaultdict) and isinstance(state.default_factory, _MakeStateAtRest):
        state.default_factory = dict
    for parameter, own in list(state.items()):
        if type(own) is _StateAtRest:
            state[parameter] = dict(own)


def _can_move(value: torch.Tensor) -> bool:
    """Whether a tensor can be given other memory without anybody noticing."""
    if value.device.type != "cpu" or value.layout is not torch.strided or not value.nbytes:
        return False
    if value.requires_grad or value.is_inference() or value.is_conj() or value.is_neg():
        return False
    return value.untyped_storage().nbytes() == value.nbytes and count_storage_users(value) == ALONE


# ---- Offloaded weights of a model on a CPU: on disk, and in RAM only while their layer runs ----
#
# Disk and RAM are not separate tensors here, so nothing is copied: parameters, gradients and
# optimizer state are tensors in memory-mapped files (`ebbtide.stores.mapped_memory`), and the
# kernel moves their pages. The pages of a layer are read ahead while the layer before it runs,
# and paged out two layers later.

_MOST_RECENT = 2  # groups whose pages stay in RAM: the running layer's and the one before it


@final
class MappedWeights(AbstractWeights):
    """The offloaded weights of a model on a CPU, and the files of their gradients.

    Args:
        transfers: provides the device, the store and the recorder.
        groups: the weight groups, in the order of the model's layers.
        parameters: the parameters of all groups.
        double_buffering: read the next group ahead while one is in use.
    """

    def __init__(
        self,
        transfers: Transfers,
        groups: Sequence[WeightGroup],
        parameters: OffloadedParameters,
        *,
        double_buffering: bool,
    ) -> None:
        super().__init__(groups, parameters)
        self._ahead = double_buffering
        self._transfers = transfers
        self._reader = transfers.device.lane("ebbtide-weights-read", "disk")
        self._recent: list[WeightGroup] = []  # groups whose pages may be in RAM, oldest first
        self._gradients = {group: GradientBuffers(group, transfers.store) for group in groups}
        self._handles: list[Any] = []
        # The program decides how long a parameter lives that another one has replaced.
        self._watched = WeakIdKeyDictionary()
        for group in groups:
            self._page_out(group)
        return_freed_memory()  # the RAM that the parameters occupied before

    def begin_forward(self) -> None:
        self.parameters.begin_forward()
        for _, member in self.parameters.members():
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
        if self._ahead and 0 <= number < len(self.groups):
            self._read_ahead(self.groups[number])

    def leave(self, group: WeightGroup) -> None:
        """See the base class. The pages stay in RAM until two other layers have been entered."""

    def begin_backward(self, groups: Sequence[WeightGroup]) -> None:
        for group in groups:
            self.enter(group)

    def resting_slots(self) -> list[RestingSlot]:
        return [slot for group in self.groups for slot in self._slots_of(group)]

    def start_anew(self, transfers: Transfers) -> None:
        self._transfers = transfers
        for group in self.groups:
            group.start_anew()
            self._gradients[group].move_to(transfers.store)

    def settle(self) -> None:
        """See the base class. Nothing to do: no copy reads the mapped files."""

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._reader.close()
        for group in self.groups:
            group.forget_memory()
            self._transfers.store.drop(group.resting)
            self._gradients[group].give_back()

    def _slots_of(self, group: WeightGroup) -> Iterator[FileSlot]:
        for slot in (group.resting, *self._gradients[group].blocks):
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
        found, gradient = self.parameters.find(parameter), parameter.grad
        if found is None or gradient is None or gradient.requires_grad:
            return
        group, member = found
        buffers = self._gradients[group]
        if gradient.layout is torch.strided and not buffers.holds(gradient):
            resting, _ = buffers.allocate(member)
            parameter.grad = resting.copy_(gradient)
