"""Weights of a model on a CPU: they rest on disk, and are in RAM only while their layer works.

There is one memory to compute in, so nothing is copied: parameters, their gradients and their
optimizer's state live in mapped files (`ebbtide.stores.mapped`). What comes and goes are pages:
those of a layer are read ahead while the layer before it works, and let go of when the layer after
it does.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from ebbtide.devices.device import AbstractDevice
from ebbtide.runtime.groups import Landings, RestingIndex, WeightGroup
from ebbtide.runtime.resting import RestingParameter
from ebbtide.runtime.weak import call_weakly
from ebbtide.stores.host_memory import HostMemory
from ebbtide.stores.mapped import MappedMemory, give_back_free_memory, page_in, page_out

_PAGER_S = 0.001  # between two looks at how much is mapped in, while an optimizer steps
_LEAST_BYTES = 32 * 2**20  # mapped in before the pager does anything


@final
class MappedWeights:
    """The groups of a model on a CPU, and where their gradients and their state rest.

    Args:
        device: the CPU.
        groups: in the order of the model.
        index: of their members.
        memory: what they rest in.
        double_buffering: read the next group ahead while one works.
    """

    def __init__(
        self,
        device: AbstractDevice,
        groups: Sequence[WeightGroup],
        index: RestingIndex,
        memory: MappedMemory,
        *,
        double_buffering: bool,
    ) -> None:
        self.groups = groups
        self._ahead = double_buffering
        self._memory = memory
        self._reader = device.lane("ebbtide-weights-read", "disk")
        self._lock = threading.RLock()
        self._recent: list[WeightGroup] = []  # whose pages may be mapped in, oldest first
        self._landings = {group: Landings(group, memory.allocate) for group in groups}
        self._states: set[int] = set()  # addresses of optimizer state
        self._blocks: list[HostMemory] = []
        self._index = index
        self._making: _StateAtRest | None = None
        # All optimizers share these hooks: they must not keep the model alive.
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(call_weakly(self.before_step)),
            register_optimizer_step_post_hook(call_weakly(self.after_step)),
        ]
        self._watched: set[torch.Tensor] = set()
        self._pager: threading.Event | None = None
        for group in groups:
            page_out(group.memory)
        give_back_free_memory()  # where the parameters were

    # ---- forward and backward -----------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the model begins."""
        self._index.begin_forward()
        for group, member in self._index.members():
            if member.parameter not in self._watched and member.parameter.requires_grad:
                self._watched.add(member.parameter)
                self._watch(group, member)

    def end_forward(self) -> None:
        """It has ended."""

    def enter(self, group: WeightGroup) -> None:
        """A module begins that uses these parameters: the layer before last can go."""
        with self._lock:
            if group in self._recent:
                self._recent.remove(group)
            self._recent.append(group)
            # What still works, such as a module around this one, reads its pages again.
            while len(self._recent) > 2:
                self._let_go(self._recent.pop(0))
                give_back_free_memory()  # gradients are in files now; they were made in RAM
            number = group.number + (1 if torch._C._current_graph_task_id() == -1 else -1)
            if self._ahead and 0 <= number < len(self.groups):
                memory = self.groups[number].memory
                self._reader.submit(lambda: page_in(memory))

    def leave(self, group: WeightGroup) -> None:
        """The module has ended."""

    def begin_backward(self, groups: Sequence[WeightGroup]) -> None:
        """The backward of a module begins."""
        for group in groups:
            self.enter(group)

    def _let_go(self, group: WeightGroup) -> None:
        page_out(group.memory)
        for block in self._landings[group].blocks:
            page_out(block)

    # ---- gradients and state ------------------------------------------------------------------

    def _watch(self, group: WeightGroup, member: RestingParameter) -> None:
        def after(parameter: torch.Tensor) -> None:
            gradient = member.parameter.grad
            landings = self._landings[group]
            if (
                parameter is not member.parameter
                or gradient is None
                or gradient.requires_grad
                or landings.holds(gradient)
            ):
                return
            if gradient.layout is torch.strided:
                landing = landings.take(member)
                member.parameter.grad = landing.copy_(gradient)

        hook = member.parameter.register_post_accumulate_grad_hook
        self._handles.append(hook(after))  # type: ignore[no-untyped-call]

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to touch everything."""
        self._end_step()  # the one before may have raised
        if self._is_ours(optimizer):
            self._pager = stop = threading.Event()
            threading.Thread(target=self._page, args=(stop,), daemon=True).start()
            self._making = _StateAtRest(self)
            self._making.__enter__()  # type: ignore[no-untyped-call]

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """It has."""
        if not self._is_ours(optimizer):
            return
        self._end_step()
        for parameter, state in optimizer.state.items():
            if parameter in self._index:
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        state[name] = self._at_rest(parameter, value)
        self.page_out()
        give_back_free_memory()

    def _end_step(self) -> None:
        if self._pager is not None:
            self._pager.set()
            self._pager = None
        # One that is no longer innermost stays; it only knows our parameters.
        innermost = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if self._making is not None and innermost is self._making:
            self._making.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._making = None

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(p in self._index for g in optimizer.param_groups for p in g["params"])

    def _at_rest(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """An optimizer's state in mapped memory, moved there when it is seen first."""
        if value.data_ptr() in self._states or value.dtype != parameter.dtype:
            return value
        return self.like(parameter).copy_(value)

    def like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Zeros like a parameter, in a file of their own."""
        found = self._index.find(parameter)
        assert found is not None
        member = found[1]
        block = self._memory.allocate(member.size_bytes)
        self._blocks.append(block)
        made = member.own_view_at(block.tensor, 0)
        self._states.add(made.data_ptr())
        return made

    def is_mine(self, tensor: object) -> bool:
        """Whether this is a parameter at rest."""
        return tensor in self._index

    def page_out(self) -> None:
        """Let go of all pages; what is used comes back by itself. Any thread may call this."""
        for group in self.groups:
            self._let_go(group)
        for block in list(self._blocks):
            page_out(block)

    def _page(self, stop: threading.Event) -> None:
        """While an optimizer steps it touches everything once: do not let all of it stay."""
        begin_bytes = _mapped_bytes()  # the libraries', and what a layer left
        most_bytes = max(_LEAST_BYTES, *(2 * group.size_bytes for group in self.groups))
        while not stop.wait(_PAGER_S):
            if _mapped_bytes() > begin_bytes + most_bytes:
                self.page_out()

    # ---- ends ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """Nothing reads values at rest but the model itself."""

    def close(self) -> None:
        """Let go of the files, once nobody refers to them."""
        self._end_step()
        while self._handles:
            self._handles.pop().remove()
        self._reader.close()
        for group in self.groups:
            group.memory.give_back()
            self._landings[group].give_back()
        while self._blocks:
            self._blocks.pop().give_back()


class _StateAtRest(TorchFunctionMode):
    """While an optimizer steps, what it makes in the likeness of a parameter is in a file."""

    def __init__(self, weights: MappedWeights) -> None:
        self._weights = weakref.ref(weights)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weights = self._weights()
        plain = func is torch.zeros_like and (not kwargs or set(kwargs) == {"memory_format"})
        if plain and weights is not None and weights.is_mine(args[0]):
            return weights.like(args[0])
        return func(*args, **(kwargs or {}))


def _mapped_bytes() -> int:
    """Pages of files that are mapped into this process now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0
