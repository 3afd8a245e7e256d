"""Rebuild records: bytes that are computed again instead of kept or moved.

A rebuild record stands where a storage record would: one for a storage, shared by all saved tensors
that alias it, gone with the last of them. Instead of bytes it holds handles on its inputs, which
keep those recorded for exactly as long as they are needed. An input can be rebuilt itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.base import AbstractEvent, AbstractStream
from ebbtide.runtime.ranges import Layer
from ebbtide.runtime.recipes import Constants, RebuildRecipe

if TYPE_CHECKING:
    from ebbtide.runtime.saved import Saved

MOST_STEPS = 4  # in a chain of rebuilds, each of which waits for the one before


@final
@dataclass(frozen=True)
class Call:
    """One operation of the forward, ready to run again.

    Args:
        recipe: what to run.
        inputs: on what.
        constants: with what else.
        dtype: of the output.
        depth: how many operations deep its inputs are rebuilt themselves, this one counted.
    """

    recipe: RebuildRecipe
    inputs: Sequence[Saved]
    constants: Constants
    dtype: torch.dtype
    depth: int

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """The output as it was; kernels run on the current stream."""
        device_type = inputs[0].device.type
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            return self.recipe.rebuild(inputs, self.constants, self.dtype)


@final
class RebuildRecord:
    """A storage that is rebuilt when it is needed.

    Attributes:
        key: where the session finds it.
        identity: a weak reference to the storage that was saved, see `StorageRecord`.
        version: of the saved tensors that share this record.
        call: what rebuilds it.
        size_bytes: of the storage.
        layer: that saved it first.
        number: of the forward that saved it.
        home: the compute stream to which the memory of `value` belongs.
        value: the storage's bytes while somebody is still to read them.
        ready: `value` holds them after this event.
        generation: counts rebuilds, so that a handle knows which one it has read.
        handles: saved tensors alive that share the record.
        unread: those of them that have not been unpacked since the last rebuild.
    """

    __slots__ = (
        "call",
        "generation",
        "handles",
        "home",
        "identity",
        "key",
        "layer",
        "number",
        "ready",
        "size_bytes",
        "unread",
        "value",
        "version",
    )

    def __init__(
        self,
        key: Hashable,
        storage: torch.UntypedStorage,
        version: int,
        call: Call,
        layer: Layer | None,
        number: int,
    ) -> None:
        self.key = key
        self.identity = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.version = version
        self.call = call
        self.size_bytes = storage.nbytes()
        self.layer = layer
        self.number = number
        self.value: Tensor | None = None
        self.ready: AbstractEvent | None = None
        self.home: AbstractStream | None = None
        self.generation = 0
        self.handles = 0
        self.unread = 0
