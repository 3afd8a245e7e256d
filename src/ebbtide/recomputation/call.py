"""Calls a layer's forward under a checkpoint, which runs it again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ebbtide.activations.records import KEEP, StorageRecord
from ebbtide.errors import PolicyError
from ebbtide.recomputation.module_state import ModuleState
from ebbtide.recomputation.recomputations import Recomputations, RecomputedHold, RecomputedLayer
from ebbtide.tensors.call_arguments import Arguments
from ebbtide.transfers.layer import Layer, in_range
from ebbtide.transfers.prefetch import ForwardLog

WithWeights = Callable[[nn.Module], AbstractContextManager[None]]
"""Surrounds a forward of a module that is not called as such; its weights are there meanwhile."""


class AbstractHooks(Protocol):
    """The hooks that would be given what a layer saves if it were not recomputed."""

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""

    @property
    def log(self) -> ForwardLog:
        """The log of the forward that runs."""

    def are_on_top(self) -> bool:
        """Whether what autograd saves now is packed by these hooks."""

    def look_at(
        self, tensor: Tensor
    ) -> Iterable[tuple[torch.UntypedStorage, StorageRecord | None]]:
        """Count a saved tensor; return its storages that are no parameters, and their records."""


class Recomputing(NamedTuple):
    """A layer to recompute, who is told of it, and what surrounds its second forward."""

    layer: Layer
    hooks: AbstractHooks
    account: Recomputations
    with_weights: WithWeights


def find_recomputing(
    layer: Layer, hooks: AbstractHooks, account: Recomputations, with_weights: WithWeights
) -> Recomputing | None:
    """Say whether a call that the policy chooses can be recomputed.

    It is not where its activations are not saved for backward or other code decides what becomes of
    them, such as a checkpoint around the layer. Nor is it inside a transform of `torch.func` or
    with tangents of forward-mode AD, of which a second forward would not know.
    """
    if not hooks.are_on_top() or forward_ad._current_level >= 0:
        return None
    if torch._C._functorch.maybe_current_level() is not None:
        return None
    return Recomputing(layer, hooks, account, with_weights)


def recompute_later(
    recomputing: Recomputing,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a forward under a checkpoint; see [Note: recomputed layers].

    Args:
        recomputing: the call, and who is told of it.
        module: the layer's module.
        forward: its forward.
        args: the positional arguments.
        kwargs: the keyword arguments.

    Raises:
        PolicyError: the forward changes something that it would not find again.
    """
    layer = recomputing.layer
    where = f"layer {layer.index} ({layer.name})"
    arguments = Arguments(args, kwargs, where)
    tensors = arguments.take_tensors()
    trained = any(tensor.requires_grad for tensor in tensors)
    if not trained and not any(weight.requires_grad for weight in module.parameters()):
        return forward(*args, **kwargs)  # it saves nothing
    versions = [tensor._version for tensor in tensors]
    state = ModuleState(module, where)
    call = _Call(recomputing, module, forward, arguments, state, (args, kwargs))
    device = recomputing.hooks.device
    if device.type != "cpu" and not any(tensor.device == device for tensor in tensors):
        # The checkpoint restores the random numbers of the devices that it finds tensors on.
        tensors = [*tensors, torch.empty(0, device=device)]
    result = checkpoint(call.run, *tensors, use_reentrant=False)
    for tensor, version in zip(tensors, versions, strict=False):
        if tensor._version != version:
            raise PolicyError(
                f"{where} cannot be recomputed, because its forward changes its input of shape "
                f"{tuple(tensor.shape)} in place; make the operation not in place (such as "
                f"nn.ReLU(inplace=False)), or leave the layer out: name the others with "
                f"layers=[...]"
            )
    arguments.check_after_forward()
    state.check_after_forward()
    return result


@final
class _Call:
    """One call of a recomputed layer. The checkpoint holds it as long as it may run again."""

    def __init__(
        self,
        recomputing: Recomputing,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Arguments,
        state: ModuleState,
        first: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        self._recomputing = recomputing
        self._module = module
        self._forward = forward
        self._arguments = arguments
        self._state = state
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = first
        self._hold: RecomputedHold | None = None

    def run(self, *tensors: Tensor) -> Any:
        """Run the forward, for the first time or again."""
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            return self._run_first(args, kwargs)
        if self._hold is None:  # backward runs within the forward
            return self._run_again(tensors)
        account = self._recomputing.account
        account.begin(self._hold)
        try:
            return in_range("recompute", self._recomputing.layer, self._run_again, tensors)
        finally:
            account.end(self._hold)

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer, hooks, account, _ = self._recomputing
        counter = _SavedCounter(hooks)
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack):
            result = self._forward(*args, **kwargs)
        log = hooks.log
        saved = counter.size_bytes, counter.borrowed_bytes, counter.num_saved
        self._hold = account.add(self, RecomputedLayer(layer, log.number, *saved), log)
        return result

    def _run_again(self, tensors: tuple[Tensor, ...]) -> None:
        args, kwargs = self._arguments.put_together(tensors)
        with self._state.put_back(), self._recomputing.with_weights(self._module):
            self._forward(*args, **kwargs)


@final
class _SavedCounter:
    """Counts what is saved inside a recomputed layer, and leaves it to the checkpoint's hooks.

    Args:
        hooks: the hooks that would be given what the layer saves if it were not recomputed.

    Attributes:
        size_bytes: bytes of the storages, each counted once, without the layer's inputs.
        borrowed_bytes: bytes of its inputs that are used in it and that are not kept on the device.
        num_saved: number of saved tensors.
    """

    def __init__(self, hooks: AbstractHooks) -> None:
        pack, self.unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._pack: Callable[[Tensor], Any] = pack
        self._hooks = hooks
        self.size_bytes = self.borrowed_bytes = self.num_saved = 0
        self._known: dict[int, StorageWeakRef] = {}

    def pack(self, tensor: Tensor) -> Any:
        self.num_saved += 1
        for storage, record in self._hooks.look_at(tensor):
            address = storage._cdata
            if address not in self._known:
                # While the weak reference exists, no other storage gets the same address.
                self._known[address] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                if record is None:
                    self.size_bytes += storage.nbytes()
                elif record.decision is not KEEP:
                    self.borrowed_bytes += record.unpacked_bytes
        return self._pack(tensor)
