"""The ledger of a step: which storages are alive during which part of it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Set
from typing import Any, Final, NamedTuple, final

from torch import Tensor


class Part(NamedTuple):
    """A part of a step: the forward or the backward of a layer, or of what comes right after it.

    Attributes:
        backward: whether it is the backward.
        layer: index of the layer; -1 for what comes before the first one.
        inside: whether it is the layer itself, and not what comes after it.
    """

    backward: bool
    layer: int
    inside: bool


START: Final = Part(backward=False, layer=-1, inside=False)


class _Entry(NamedTuple):
    """One line of the ledger: a part begins (no storage), or a storage comes or goes."""

    part: Part
    key: int | None
    size_bytes: int  # less than 0 if it goes


@final
class StorageLedger:
    """Numbers the storages of a step and notes when each is allocated and freed.

    Attributes:
        sizes: sizes in bytes of all storages that there ever were, by key.
        part: the part of the step that runs now.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.part = START
        self._entries = [_Entry(START, None, 0)]
        self._alive: dict[int, tuple[int, Any]] = {}  # key and weak reference, by address

    def enter(self, part: Part) -> None:
        """Note that a part of the step runs from now on."""
        if part != self.part:
            self.part = part
            self._entries.append(_Entry(part, None, 0))

    def key_of(self, tensor: Tensor) -> int:
        """Return the key of a tensor's storage, which is noted as allocated if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._alive.get(address)
        if known is not None:
            return known[0]
        key, size_bytes = len(self.sizes), storage.nbytes()
        self.sizes.append(size_bytes)
        # The reference's callback runs when the storage itself is freed, so an address that comes
        # back is never taken for the storage that had it before.
        self._alive[address] = key, weakref.ref(storage, functools.partial(self._free, address))
        self._entries.append(_Entry(self.part, key, size_bytes))
        return key

    def known_key_of(self, tensor: Tensor) -> int | None:
        """Return the key of a tensor's storage; None if it has none yet."""
        known = self._alive.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def _free(self, address: int, _: object) -> None:
        key, _reference = self._alive.pop(address)
        self._entries.append(_Entry(self.part, key, -self.sizes[key]))

    def peaks(self, without: Set[int]) -> dict[Part, int]:
        """Return the most bytes that were alive in each part of the step.

        Args:
            without: keys of storages that do not count.
        """
        live_bytes = 0
        peaks: dict[Part, int] = {}
        for part, key, size_bytes in self._entries:
            if key is None or key not in without:
                live_bytes += size_bytes
            peaks[part] = max(peaks.get(part, 0), live_bytes)
        return peaks
