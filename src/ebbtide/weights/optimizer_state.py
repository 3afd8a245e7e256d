"""Optimizer state in mapped files, for weights that are in mapped files themselves.

`MappedOptimizerState` moves what an optimizer makes to files, and keeps its step from filling RAM
with their pages.
"""

from __future__ import annotations

import functools
import mmap
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, final

import torch

from ebbtide.devices.lanes import watch
from ebbtide.devices.process import call_weakly, watch_optimizers
from ebbtide.errors import StoreFullError, warn_user
from ebbtide.runtime.torch_internals import count_storage_users
from ebbtide.stores.measured_memory import FreedMemory, return_freed_memory
from ebbtide.stores.store import AbstractStore
from ebbtide.weights.parameters import ALONE, OffloadedParameter, WeightGroup

_PAGER_S = 0.001  # interval at which the pager checks the mapped pages during an optimizer step


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

    A thread, the pager, pages the files out whenever a step has brought too many pages into RAM. It
    ends with the step. torch tells nobody of a step that raises: the thread then ends when the next
    step begins, or when the optimizer or this object goes.

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
        self._stepping: weakref.ref[torch.optim.Optimizer] | None = None
        self._end_watch = watch_optimizers(before=self.before_step, after=self.after_step)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Start the pager, and have the state that the optimizer makes moved to files."""
        if not self._is_ours(optimizer):
            return  # and perhaps ours steps in another thread
        self._end_step()  # needed if the step before raised
        # With a callback, so that each step has a reference of its own.
        stepping = self._stepping = weakref.ref(optimizer, _do_nothing)
        most_bytes = _mapped_bytes() + self._most_bytes  # with libraries and the last layers
        look = functools.partial(call_weakly(self._page_out_over), most_bytes, stepping)
        watch(look, _PAGER_S, "ebbtide-pager")
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
        self._end_watch()

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

    def _page_out_over(self, most_bytes: int, stepping: weakref.ref[torch.optim.Optimizer]) -> bool:
        """Page out if more than this is in RAM. Returns whether the step still runs."""
        if self._stepping is not stepping or stepping() is None:
            return False
        if _mapped_bytes() > most_bytes:
            self._store.page_out()
        return True

    def _end_step(self) -> None:
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


def _do_nothing(_: object) -> None:
    pass


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
