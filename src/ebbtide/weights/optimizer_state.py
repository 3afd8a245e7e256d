"""Optimizer state in mapped files, for weights that are in mapped files themselves."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from ebbtide.stores.mapped_memory import FileSlot, give_back_free_memory, page_out
from ebbtide.stores.store import AbstractStore, RestingSlot
from ebbtide.weak import call_weakly
from ebbtide.weights.groups import OffloadedParameters

_PAGER_S = 0.001  # interval at which the pager checks the mapped pages during an optimizer step
_LEAST_BYTES = 32 * 2**20  # the pager always tolerates this much


@final
class MappedOptimizerState:
    """Lets optimizers step over mapped files without having all their pages in RAM at once.

    Args:
        store: provides the files for the optimizer state.
        parameters: the offloaded parameters, of which some or all are in mapped files.
        slots: gives the files of weights and gradients.
        page_bytes: how much may stay in RAM while an optimizer steps.
    """

    def __init__(
        self,
        store: AbstractStore,
        parameters: OffloadedParameters,
        slots: Callable[[], Iterable[FileSlot]],
        page_bytes: int,
    ) -> None:
        self._store = store
        self._parameters = parameters
        self._weight_slots = slots
        self._most_bytes = max(_LEAST_BYTES, page_bytes)
        self._slots: list[RestingSlot] = []  # the files of the optimizer state
        self._states: set[int] = set()  # addresses of the state tensors in these files
        self._making: _StateAtRest | None = None
        self._pager: threading.Event | None = None
        # These hooks are global to all optimizers, so they must not keep the model alive.
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(call_weakly(self.before_step)),
            register_optimizer_step_post_hook(call_weakly(self.after_step)),
        ]

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Start the pager, and make the optimizer allocate its new state in files."""
        self._end_step()  # needed if the step before raised
        if self._is_ours(optimizer):
            self._pager = stop = threading.Event()
            threading.Thread(target=self._page, args=(stop,), daemon=True).start()
            self._making = _StateAtRest(self)
            self._making.__enter__()  # type: ignore[no-untyped-call]

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Stop the pager, and move state that the optimizer still allocated in RAM to files."""
        if not self._is_ours(optimizer):
            return
        self._end_step()
        for parameter, state in optimizer.state.items():
            if self.is_mapped(parameter):
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        state[name] = self._at_rest(parameter, value)
        self.page_out()
        give_back_free_memory()

    def is_mapped(self, tensor: object) -> bool:
        """Whether this is a parameter whose values are in a mapped file."""
        found = self._parameters.find(tensor)
        return found is not None and found[0].resting.is_mapped

    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return zeros like a parameter, in a mapped file of their own."""
        found = self._parameters.find(parameter)
        assert found is not None
        member = found[1]
        self._slots.append(self._store.rest_on_disk(member.size_bytes))
        made = member.own_view_of(self._slots[-1].tensor, 0)
        self._states.add(made.data_ptr())
        return made

    def page_out(self) -> None:
        """Page everything out; an access reads its pages back. Any thread may call this."""
        for slot in (*self._weight_slots(), *self._slots):
            if isinstance(slot, FileSlot):
                page_out(slot)

    def close(self) -> None:
        """Remove the hooks and drop the files; each is unmapped once no tensor refers to it."""
        self._end_step()
        while self._handles:
            self._handles.pop().remove()
        while self._slots:
            self._store.drop(self._slots.pop())

    def _end_step(self) -> None:
        if self._pager is not None:
            self._pager.set()
            self._pager = None
        # A mode that is no longer the innermost cannot be exited. It stays active, and does no harm
        # because it only acts on our parameters.
        innermost = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if self._making is not None and innermost is self._making:
            self._making.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._making = None

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(self.is_mapped(p) for g in optimizer.param_groups for p in g["params"])

    def _at_rest(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the state in a mapped file; the first call moves it there."""
        if value.data_ptr() in self._states or value.dtype != parameter.dtype:
            return value
        return self.zeros_like(parameter).copy_(value)

    def _page(self, stop: threading.Event) -> None:
        """Page everything out whenever the optimizer step has brought too many pages into RAM."""
        begin_bytes = _mapped_bytes()  # pages of libraries and of the last layers
        while not stop.wait(_PAGER_S):
            if _mapped_bytes() > begin_bytes + self._most_bytes:
                self.page_out()


class _StateAtRest(TorchFunctionMode):
    """While active, `torch.zeros_like` of a mapped parameter allocates in a file."""

    def __init__(self, state: MappedOptimizerState) -> None:
        self._state = weakref.ref(state)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = self._state()
        plain = func is torch.zeros_like and (not kwargs or set(kwargs) == {"memory_format"})
        if plain and state is not None and state.is_mapped(args[0]):
            return state.zeros_like(args[0])
        return func(*args, **(kwargs or {}))


def _mapped_bytes() -> int:
    """Bytes of this process's memory that are pages of mapped files; 0 where unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0
