"""The bytes of all storages that torch has made and not freed: memory that no allocator blurs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ebbtide.stores import AbstractMemory


class LiveMemory(AbstractMemory):
    """Counts while its `with` block runs."""

    def __init__(self) -> None:
        self._mode = _Watch(self)
        self._alive: dict[int, weakref.ref] = {}
        self._now_bytes = self._peak_bytes = 0

    def __enter__(self) -> LiveMemory:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size_bytes = storage._cdata, storage.nbytes()
        if address in self._alive:
            return

        def free(_: object) -> None:
            del self._alive[address]
            self._now_bytes -= size_bytes

        self._alive[address] = weakref.ref(storage, free)
        self._now_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._now_bytes)

    def now_bytes(self) -> int:
        return self._now_bytes

    def peak_bytes(self) -> int:
        return self._peak_bytes

    @property
    def total_bytes(self) -> int:
        return 2**30

    def reset_peak(self) -> None:
        self._peak_bytes = self._now_bytes


class _Watch(TorchDispatchMode):
    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            fake = type(leaf) is not torch.Tensor and type(leaf) is not torch.nn.Parameter
            if isinstance(leaf, torch.Tensor) and not fake:
                self._memory.note(leaf)
        return result
