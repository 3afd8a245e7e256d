"""Optimizer state in mapped files, for weights that are in mapped files themselves.

`MappedOptimizerState` moves what an optimizer makes to files, and `Pager` keeps its step from
filling RAM with their pages.
"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any, final

import torch

from ebbtide.devices.lanes import watch
from ebbtide.devices.process import OptimizerWatch
from ebbtide.errors import StoreFullError, warn_user
from ebbtide.runtime.torch_internals import count_storage_users
from ebbtide.stores.measured_memory import FreedMemory, return_freed_memory
from ebbtide.stores.store import AbstractStore
from ebbtide.weights.parameters import ALONE, OffloadedParameter, WeightGroup

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
        find: returns the group and the offloaded parameter of a parameter, of which some or all are
            in mapped files; None for others.
        page_bytes: how much may stay in RAM while an optimizer steps.
    """

    def __init__(
        self,
        store: AbstractStore,
        find: Callable[[object], tuple[WeightGroup, OffloadedParameter] | None],
        page_bytes: int,
    ) -> None:
        self._store = store
        self._find = find
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
        found = self._find(tensor)
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
