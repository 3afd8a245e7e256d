"""Runs the forwards of recomputed layers under a checkpoint, and again in backward.

`Recomputations` counts what the layers do not save and what backward holds of them, `_Call` and its
two kinds are the calls of a layer, and `RecomputedForward` stands in the place of its forward.

[Note: recomputed layers] A recomputed layer runs under torch's non-reentrant checkpoint, which
saves the layer's inputs and none of what the operations inside it save. The inputs are saved under
ebbtide's hooks, so they are kept, offloaded and prefetched like any saved tensor. The first time
that backward needs something from inside the layer, the checkpoint reads the inputs and runs the
forward again. What that saves is read soon, so it stays on the device, under the checkpoint's
hooks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointError, checkpoint

from ebbtide.devices.device import AbstractEvent, Layer, in_range
from ebbtide.errors import PolicyError, SavedTensorModifiedError
from ebbtide.runtime.activations import Activations
from ebbtide.runtime.compiled import (
    ForwardReplacement,
    compiled_as_here,
    is_traced,
    skip_in_compiler,
)
from ebbtide.runtime.events import Owner, Subject
from ebbtide.runtime.handles import KEEP, Hold, raise_modified, restore
from ebbtide.runtime.module_state import Arguments, ModuleState
from ebbtide.runtime.outside import Outside
from ebbtide.runtime.parameter_index import RestingWeights
from ebbtide.runtime.record import ForwardLog
from ebbtide.runtime.saved_tensors import SavedTensorHooks
from ebbtide.runtime.stats import Account
from ebbtide.runtime.torch_internals import (
    in_backward,
    sequence_number,
    top_hooks,
)
from ebbtide.runtime.transfers import Transfers
from ebbtide.runtime.verification import (
    SavedDigests,
    Verifications,
    differ,
    digest,
    sample,
)
from ebbtide.stores.measured_memory import FreedMemory, return_freed_memory
from ebbtide.units import format_size

_CHANGED: Final = "finds weights, buffers or inputs that were changed before backward"


@final
@dataclass(frozen=True)
class RecomputedLayer:
    """One call of a layer whose forward runs again in backward.

    Attributes:
        layer: the layer.
        microbatch: number of the forward within the step, from 0.
        size_bytes: bytes of the storages saved inside it, each counted once, without its inputs and
            parameters.
        borrowed_bytes: bytes of its inputs that left the device and are used inside it.
        num_saved: number of tensors saved inside it.
    """

    layer: Layer
    microbatch: int
    size_bytes: int
    borrowed_bytes: int
    num_saved: int


@final
class RecomputedHold(Hold):
    """The hold of one call of a recomputed layer, which dies with the last tensor saved inside it.

    Attributes:
        call: what was called.
        forward: the log of its forward.
        held_bytes: device bytes that its last recomputation holds. They count as held until the
            call dies, although each storage is freed when backward has read it.
        transfers: the model's transfers.
        begun: event before the recomputation that runs; set only if steps are traced.
    """

    __slots__ = ("begun", "call", "forward", "held_bytes", "transfers")
    call: RecomputedLayer
    forward: ForwardLog
    held_bytes: int
    transfers: Transfers
    begun: AbstractEvent | None

    def note_death(self) -> None:
        self.transfers.live -= 1
        layer = self.call.layer
        self.transfers.account.take(-self.held_bytes, Owner.RECOMPUTED, layer)


@final
class Recomputations:
    """The recomputed layers of one model.

    Args:
        activations: the model's activations.
        verifications: which layers give the same bits again.

    Attributes:
        verifications: as given.
        outside: finds what the code of layers names outside of modules.
    """

    def __init__(self, activations: Activations, verifications: Verifications) -> None:
        self._activations = activations
        self.verifications = verifications
        self.outside = Outside()
        self._account: Account = activations.transfers.account
        self._gate = activations.transfers.gate
        on_host = activations.transfers.device.computes_on_host
        self._freed = FreedMemory() if on_host else None  # see [Note: freed but resident]

    @property
    def num_verifying(self) -> int:
        """Number of calls verified in the running step, or in the last one if none runs."""
        account = self._account
        meter = account.last_meter if account.origin is None else account.meter
        return 0 if meter is None else meter.num_verifying

    def note_verifying(self) -> None:
        """Count a call that would be recomputed and is not, because it is verified."""
        self._account.meter.num_verifying += 1

    def refuse_changed(self, layer: Layer) -> None:
        """Recompute no layer again in which the program changes what torch may not need.

        Args:
            layer: the layer that cannot run again, because something in it was changed. Others
                whose forward has run, and whose weights or buffers were changed, are refused with
                it, so that they do not end a step each.
        """
        self.verifications.refuse(layer, _CHANGED)
        for hold in list(self._activations.deaths.awaited):
            if isinstance(hold, RecomputedHold):
                call: _RecomputedCall | None = hold()
                if call is not None and call.finds_changes():
                    self.verifications.refuse(hold.call.layer, _CHANGED)

    def add(
        self, owner: _RecomputedCall, call: RecomputedLayer, forward: ForwardLog
    ) -> RecomputedHold:
        """Count a call whose first forward has ended.

        Args:
            owner: what dies when nothing saved inside the call is needed any more.
            call: what was called.
            forward: the log of its forward.
        """
        deaths, transfers = self._activations.deaths, self._activations.transfers
        with transfers, self._gate:
            self._account.meter.recomputed.append(call)
            hold = RecomputedHold(owner, deaths.queue.append)
            hold.call, hold.forward, hold.transfers = call, forward, transfers
            hold.held_bytes, hold.begun = 0, None
            transfers.live += 1
            deaths.awaited.add(hold)
            self._account.meter.recomputed_bytes += call.size_bytes
        self._note_freed(call.size_bytes)
        return hold

    def _note_freed(self, size_bytes: int) -> None:
        """Note that what a layer would have saved is freed, or is about to be."""
        stored_bytes = self._account.stored_bytes["disk"]
        if self._freed is not None and self._freed.is_due(size_bytes, stored_bytes):
            return_freed_memory()

    def begin(self, hold: RecomputedHold) -> None:
        """Note that a layer's forward begins again."""
        self._activations.note_backward(hold.forward)
        self._note_freed(hold.call.size_bytes)  # of the layer whose backward has ended
        with self._gate:
            layer = hold.call.layer
            self._account.take(-hold.held_bytes, Owner.RECOMPUTED, layer)
            hold.held_bytes = hold.call.size_bytes + hold.call.borrowed_bytes
            self._account.take(hold.held_bytes, Owner.RECOMPUTED, layer)
        recorder = self._account.recorder
        hold.begun = None if recorder is None else recorder.mark()

    def end(self, hold: RecomputedHold) -> None:
        """Note that all that backward needs of the layer has been computed."""
        begun, hold.begun = hold.begun, None
        recorder = self._account.recorder
        if recorder is not None and begun is not None:
            call = hold.call
            recorder.compute(
                "recompute", Subject(call.layer, call.microbatch, call.size_bytes), begun
            )

    def calls(self) -> list[RecomputedLayer]:
        """Return the recomputed layers of the last finished step, in the order of their calls."""
        last = self._account.last_meter
        return [] if last is None else last.recomputed


def recomputed_lines(calls: Iterable[RecomputedLayer]) -> Iterator[str]:
    """Yield the lines of a table of recomputed layers."""
    yield f"{'recomputed layer':<24} {'':>3} {'size':>10}  {'':<15} {'saves':>5}"
    for each in calls:
        place = f"{each.layer.index} {each.layer.name}"
        if each.microbatch:
            place = f"{place}.m{each.microbatch}"
        size = format_size(each.size_bytes)
        yield f"{place[:24]:<24} {'':>3} {size:>10}  {'':<15} {each.num_saved:>5}"


# ---- Calls a layer's forward under a checkpoint, which runs it again in backward ----

# Long: the two forwards of a call, and what is compared between them, belong together.


_alone = threading.RLock()
"""Held while a second forward runs: random numbers and modules are those of the whole process."""


def _renew_lock() -> None:
    global _alone
    _alone = threading.RLock()  # a thread that is not in this process may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class Recomputing(NamedTuple):
    """A layer to recompute, who is told of it, and what surrounds its second forward."""

    layer: Layer
    hooks: SavedTensorHooks
    account: Recomputations
    weights: RestingWeights | None


def recompute_later(
    recomputing: Recomputing,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a forward under a checkpoint; see [Note: recomputed layers].

    The first call of a kind is not recomputed; see [Note: verified recomputation].

    Args:
        recomputing: the call, and who is told of it.
        module: the layer's module.
        forward: its forward.
        args: the positional arguments.
        kwargs: the keyword arguments.

    Raises:
        PolicyError: the forward changes something that it would not find again, and did not when
            it was verified.
    """
    layer, hooks, account, weights = recomputing
    where = f"layer {layer.index} ({layer.name})"
    arguments = Arguments(args, kwargs)
    tensors = arguments.take_tensors()
    trained = any(tensor.requires_grad for tensor in tensors)
    if not trained and not any(weight.requires_grad for weight in module.parameters()):
        return forward(*args, **kwargs)  # it saves nothing
    versions = _no_versions if weights is None else weights.versions_of
    state = ModuleState(module, where, versions, account.outside)
    if state.is_lazy:  # only this forward knows the shapes of its weights
        account.note_verifying()
        return forward(*args, **kwargs)
    if state.iterator:  # not even to verify it
        account.verifications.refuse(layer, f"may advance an iterator ({state.iterator})")
        account.note_verifying()
        return forward(*args, **kwargs)
    kind = layer.name, id(module), arguments.kind, state.kind, _autocast(hooks.device)
    verified = account.verifications.find(kind)
    parts = recomputing, module, forward, arguments, tensors, state
    call: _Call
    hooks_of_first: _VerifyingHooks | None = None
    if verified is None:
        account.note_verifying()
        call = verifying = _VerifiedCall(kind, *parts)
        hooks_of_first = verifying.hooks
    else:
        state.copy_unsaved(verified.unsaved)
        call = _RecomputedCall(verified.sampled, verified.unfilled, *parts)
    device = hooks.device
    if device.type != "cpu" and not any(tensor.device == device for tensor in tensors):
        # The checkpoint restores the random numbers of the devices that it finds tensors on.
        tensors = [*tensors, torch.empty(0, device=device)]
    result = checkpoint(call.run, *tensors, use_reentrant=False)
    change = call.find_change(tensors)
    if change and verified is not None:
        raise PolicyError(
            f"{where} cannot be recomputed, because its forward {change}, which it did not the "
            f"first time; leave the layer out: name the others with layers=[...]"
        )
    if hooks_of_first is not None and change:
        account.verifications.refuse(layer, change)
        hooks_of_first.number = None
    return result


def _no_versions(_: nn.Module) -> Hashable:
    return None


def _none_rests(_: Tensor) -> bool:
    return False


def _autocast(device: torch.device) -> Hashable:
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return torch.is_autocast_enabled("cpu"), device
    return torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled(), device


def _has_plain_memory(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not hasattr(type(tensor), "__tensor_flatten__")
    return plain and bool(tensor.numel()) and not tensor.is_meta


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _Call(ABC):
    """One call of a layer whose forward runs again: what it finds, and who is told of it.

    The checkpoint holds it as long as the forward may run again.

    Args:
        recomputing: the call, and who is told of it.
        module: the layer's module.
        forward: its forward.
        arguments: the arguments, without their tensors.
        tensors: the tensors among them.
        state: the state of the module.
    """

    def __init__(
        self,
        recomputing: Recomputing,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Arguments,
        tensors: list[Tensor],
        state: ModuleState,
    ) -> None:
        self._recomputing = recomputing
        self._module = module
        self._forward = forward
        self._arguments = arguments
        self._versions = [_version(tensor) for tensor in tensors]
        self._state = state

    def run(self, *tensors: Tensor) -> Any:
        """Run the forward, for the first time or again."""
        first = self._arguments.take_first()
        return self._run_again(tensors) if first is None else self._run_first(*first)

    @abstractmethod
    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it for the first time, with these arguments."""

    @abstractmethod
    def _run_again(self, tensors: tuple[Tensor, ...]) -> None:
        """Run it again, with the checkpoint's tensors in the places of the first ones."""

    def find_change(self, tensors: Sequence[Tensor]) -> str:
        """Say what the forward, which has ended, has changed that it would not find again."""
        for tensor, version in zip(tensors, self._versions, strict=False):
            if _version(tensor) != version:
                return (
                    f"changes its input of shape {tuple(tensor.shape)} in place (as "
                    f"nn.ReLU(inplace=True) does)"
                )
        change = self._state.find_change()
        if change:
            return f"changes {change} in place"
        return self._arguments.find_change()

    def finds_changes(self) -> bool:
        """Whether a parameter or a large buffer is not as the first forward has used it."""
        return bool(self._state.find_later_change())

    @contextlib.contextmanager
    def _as_first(
        self, tensors: tuple[Tensor, ...]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Within the block all is as the first forward found it; gives its arguments."""
        weights = self._recomputing.weights
        arguments = self._arguments.put_together(tensors)
        opened = contextlib.nullcontext() if weights is None else weights.open(self._module)
        with self._state.put_back(), opened:
            yield arguments


@final
class _RecomputedCall(_Call):
    """A call whose forward runs again in backward to save what the first one has not.

    What the two save is compared, as far as that costs little: the number of tensors, the bits of
    the numbers among them, and a sample of one large tensor.

    Args:
        sampled: the place, among all tensors, of the one that a sample is taken of.
        unfilled: the places of those that are not compared.
        call: see the base class.

    Attributes:
        layer: the layer.
        account: the recomputed layers of the model.
        sampled: as given.
        unfilled: as given.
        numbers: the 0-dim tensors on the host that the first forward has saved, by their place.
        sample: the sample, once the first forward has saved the tensor.
    """

    def __init__(self, sampled: int, unfilled: frozenset[int], *call: Any) -> None:
        super().__init__(*call)
        self.layer, self.account = self._recomputing.layer, self._recomputing.account
        self.sampled = sampled
        self.unfilled = unfilled
        self.numbers: dict[int, Any] = {}
        self.sample: Tensor | None = None
        self._hold: RecomputedHold | None = None

    def compare(self, place: int, tensor: Tensor) -> None:
        """Compare a tensor that the second forward saves with that of the first one.

        Raises:
            SavedTensorModifiedError: it differs.
        """
        # What a recomputation gives is compared with what the forward gave.
        # A layer that depends on a counter outside of it gives gradients of another computation.
        verifications = self.account.verifications
        if not tensor.dim() and place in self.numbers:
            number = tensor.item()
            if repr(number) != repr(self.numbers[place]):
                verifications.raise_different(self.layer)
        if place == self.sampled and self.sample is not None:
            again = sample(tensor)
            differs = True if again is None else differ(self.sample, again)
            if isinstance(differs, Tensor):
                verifications.note_sample(self.layer, differs)
            elif differs:
                verifications.raise_different(self.layer)

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hooks = self._recomputing.hooks
        counter = _SavedCounter(hooks, self)
        with saved_tensors_hooks(counter.pack, counter.unpack):
            result = self._forward(*args, **kwargs)
        log = hooks.log
        saved = counter.size_bytes, counter.borrowed_bytes, counter.num_saved
        self._hold = self.account.add(self, RecomputedLayer(self.layer, log.number, *saved), log)
        return result

    def _run_again(self, tensors: tuple[Tensor, ...]) -> None:
        if self._hold is None:  # backward runs within the forward
            self._compute_again(tensors)
            return
        self.account.begin(self._hold)
        try:
            in_range("recompute", self.layer, self._compute_again, tensors)
        finally:
            self.account.end(self._hold)

    def _compute_again(self, tensors: tuple[Tensor, ...]) -> None:
        again = _SavedAgain(self)
        with (
            self._as_first(tensors) as (args, kwargs),
            saved_tensors_hooks(again.pack, again.unpack),
        ):
            self._forward(*args, **kwargs)
            again.hand_over()


@final
class _SavedCounter:
    """Counts what is saved inside a recomputed layer, and leaves it to the checkpoint's hooks.

    Args:
        hooks: the hooks that would be given what the layer saves if it were not recomputed.
        call: notes what its second forward is checked by.

    Attributes:
        size_bytes: bytes of the storages, each counted once, without the layer's inputs.
        borrowed_bytes: bytes of its inputs that are used in it and that are not kept on the device.
        num_saved: number of saved tensors.
    """

    def __init__(self, hooks: SavedTensorHooks, call: _RecomputedCall) -> None:
        self._pack, self._unpack = top_hooks()
        self._hooks = hooks
        self._call = call
        self.size_bytes = self.borrowed_bytes = self.num_saved = 0
        self._known: dict[int, StorageWeakRef] = {}

    def pack(self, tensor: Tensor) -> Any:
        place, call = self.num_saved, self._call
        self.num_saved += 1
        if place == call.sampled:
            call.sample = sample(tensor)
        on_host = tensor.device.type == "cpu" and type(tensor) is Tensor
        if not tensor.dim() and on_host and place not in call.unfilled:
            call.numbers[place] = tensor.item()
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

    def unpack(self, packed: Any) -> Tensor:
        try:
            # Forwards that run again do so one after the other. Two
            # threads that put back the random numbers would draw from each other's.
            with _alone:
                tensor: Tensor = self._unpack(packed)
        except CheckpointError as error:
            self._call.account.verifications.raise_different(self._call.layer, error)
        except SavedTensorModifiedError:
            # torch may train with such a program. The next steps do, too.
            self._call.account.refuse_changed(self._call.layer)
            raise
        version = getattr(tensor, _VERSION, None)
        if version is not None and version != tensor._version:
            # A tensor that the second forward has changed after it
            # had saved it is not used. Plain autograd refuses it; a checkpoint would compute with
            # the changed values.
            raise_modified(tensor, version, tensor.shape)
        return tensor


_VERSION: Final = "_ebbtide_version"
"""The attribute of a tensor saved by a second forward that has its version at that moment."""


@final
class _SavedAgain:
    """Checks what the second forward saves, and hands it to the checkpoint's hooks.

    The checkpoint ends the forward when it is given the last tensor that backward needs. An
    operator may fill a tensor after it has saved it; see [Note: tensors saved before they are
    written] in `ebbtide.runtime.activations`. So from a tensor without `grad_fn` on, all that
    the same operator saves is handed over when it has returned.
    """

    def __init__(self, call: _RecomputedCall) -> None:
        pack, self.unpack = top_hooks()
        # The checkpoint's hook keeps the compiler out, at a cost; `pack` here does, too.
        self._pack = getattr(pack, "__wrapped__", pack)
        self._call = call
        self._place = 0
        self._waiting: list[tuple[int, Tensor]] = []
        self._sequence = 0

    def pack(self, tensor: Tensor) -> Any:
        place = self._place
        self._place = place + 1
        if self._waiting and sequence_number() != self._sequence:
            self.hand_over()
        if not self._waiting and tensor.grad_fn is not None:
            return self._hand_on(place, tensor)
        self._sequence = sequence_number()
        self._waiting.append((place, tensor))
        return tensor.detach()

    def hand_over(self) -> None:
        """Hand over what waits. The operator that saved it has returned."""
        waiting, self._waiting = self._waiting, []
        for place, tensor in waiting:
            self._hand_on(place, tensor)

    def _hand_on(self, place: int, tensor: Tensor) -> Any:
        call = self._call
        if place == call.sampled or place in call.numbers:
            call.compare(place, tensor)
        if type(tensor) is Tensor or type(tensor) is nn.Parameter:
            version = tensor._version
            tensor = tensor.detach()  # as the checkpoint does
            setattr(tensor, _VERSION, version)
        return self._pack(tensor)


skip_in_compiler(_SavedAgain.pack)


@final
class _VerifiedCall(_Call):
    """A call whose forward runs again in backward only to be compared.

    See [Note: verified recomputation]. A checkpoint surrounds the first forward without being given
    what that saves, and then saves one number. When backward begins, the checkpoint is asked for
    this number, and so it runs the forward again exactly as it would for a recomputation.

    Attributes:
        hooks: what the first forward is surrounded with; None once that has begun.
    """

    def __init__(self, kind: Hashable, *call: Any) -> None:
        super().__init__(*call)
        self._kind = kind
        self._digests = SavedDigests(first=True)
        self.hooks: _VerifyingHooks | None = _VerifyingHooks(self._recomputing, self._digests)

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The graph holds the hooks, and these hold the checkpoint, which holds this object.
        hooks, self.hooks = self.hooks, None
        assert hooks is not None
        self._recomputing.hooks.offload_here()
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            result = self._forward(*args, **kwargs)
        self._digests.finish()
        weights = self._recomputing.weights
        rests = _none_rests if weights is None else weights.rests
        self._digests.unsaved = self._state.find_unsaved(self._digests.weights, rests)
        self._state.copy_unsaved(self._digests.unsaved)
        hooks.number = _save_number()
        return result

    def _run_again(self, tensors: tuple[Tensor, ...]) -> None:
        self._verify(tensors)
        _save_number()

    def _verify(self, tensors: tuple[Tensor, ...]) -> None:
        """Run the forward again and compare what it saves; no error of it is raised."""
        layer, _, account, _ = self._recomputing
        again = SavedDigests(first=False)

        def note(tensor: Tensor) -> Tensor:
            again.note(tensor)
            return tensor.detach()

        skip_in_compiler(note)
        try:
            with (
                self._as_first(tensors) as (args, kwargs),
                self._untouched(tensors, again),
                saved_tensors_hooks(note, _same),
            ):
                result = self._forward(*args, **kwargs)
            again.finish()
            again.find_unfilled(result)
            del result
        except torch.OutOfMemoryError:
            return  # the next call is verified
        except SavedTensorModifiedError:
            account.refuse_changed(layer)
            return
        except Exception as error:  # whatever it raises, the gradients of this step are right
            reason = f"raises {type(error).__name__} when it runs again"
            account.verifications.refuse(layer, reason)
            return
        account.verifications.compare(layer, self._kind, self._digests, again)

    @contextlib.contextmanager
    def _untouched(self, tensors: Sequence[Tensor], again: SavedDigests) -> Iterator[None]:
        """Undo what the block does to the memory of weights, large buffers and inputs.

        That memory is digested before the block and after it.

        Args:
            tensors: the inputs.
            again: of the forward that runs again in the block.
        """
        weights = self._recomputing.weights
        own = [w for each in self._module.modules() for w in dict.values(each._parameters)]
        found = {id(t): t for t in (*self._state.unchanged(), *own, *tensors) if t is not None}
        kept = [tensor for tensor in found.values() if _has_plain_memory(tensor)]
        if weights is not None:
            kept = [tensor for tensor in kept if not weights.rests(tensor)]
        copies = [(tensor, tensor.detach().clone()) for tensor in kept]
        try:
            yield
        finally:
            for tensor, copied in copies:
                # Not through the tensor itself: its version would count the change.
                memory = Tensor.data.__get__(tensor)  # type: ignore[attr-defined]
                # Digests go by the layout of memory, which a copy of a view need not share.
                is_alike = memory.stride() == copied.stride() and not memory.storage_offset()
                self._digests.memory += digest(copied)
                again.memory += digest(memory if is_alike else memory.clone())
                if memory.device.type != "cpu" or not torch.equal(memory, copied):
                    memory.copy_(copied)


@final
class _VerifyingHooks:
    """Hands what a verified layer saves to ebbtide's hooks, and notices the begin of its backward.

    Attributes:
        number: the node that saved a number under the checkpoint, from the end of the first forward
            on until backward begins; None if the forward does not run again.
    """

    def __init__(self, recomputing: Recomputing, digests: SavedDigests) -> None:
        self._hooks = recomputing.hooks
        self._digests = digests
        self._recomputing = recomputing
        self.number: Any = None

    def pack(self, tensor: Tensor) -> Any:
        self._digests.note(tensor, is_weight=self._hooks.is_weight(tensor))
        return self._hooks.pack(tensor)

    def unpack(self, saved: Any) -> Tensor:
        if self.number is not None and in_backward():
            number, self.number = self.number, None
            if number is not None:  # else another thread has been faster
                with _alone:
                    self._verify(number)
        return restore(saved)

    def _verify(self, number: Any) -> None:
        """Have the checkpoint run the forward again."""
        try:
            number._saved_result  # noqa: B018
        except SavedTensorModifiedError:  # an input was changed: backward may not need it
            self._recomputing.account.refuse_changed(self._recomputing.layer)


def _save_number() -> Any:
    """Have autograd save a number. Returns the node that has saved it."""
    return torch.ones((), requires_grad=True, device="cpu", dtype=torch.float32).exp().grad_fn


def _same(tensor: Tensor) -> Tensor:
    return tensor


# Autograd calls these while a compiled layer runs, and the compiler would trace them, too.
for _hook in (
    _SavedCounter.pack,
    _SavedCounter.unpack,
    _SavedAgain.pack,
    _VerifyingHooks.pack,
    _VerifyingHooks.unpack,
    _same,
):
    skip_in_compiler(_hook)


# ---- A replacement for a layer's forward that backward runs again, instead of saving what it saves


@final
class RecomputedForward(ForwardReplacement):
    """Calls a layer's forward under a checkpoint where the policy says so; else as it is.

    Args:
        find: says whether the call that begins now is recomputed.
        module: the module whose forward is replaced.
        forward: the forward to call.
    """

    def __init__(
        self,
        find: Callable[[], Recomputing | None],
        module: nn.Module,
        forward: Callable[..., Any],
    ) -> None:
        super().__init__(forward)
        self._find = find
        self._known = weakref.ref(module)  # see [Note: what a model owns]

    @property
    def _module(self) -> nn.Module | None:
        return self._known()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, module = self._forward, self._module
        if is_traced():
            return forward(*args, **kwargs)
        if args and args[0] is module:
            args = args[1:]  # accelerate binds what it finds in `module.forward` to it again
        recomputing = self._find_recomputing()
        if recomputing is None or module is None:
            return forward(*args, **kwargs)
        return recompute_later(recomputing, module, compiled_as_here(forward), args, kwargs)

    def _find_recomputing(self) -> Recomputing | None:
        return self._find()

    def restore(self) -> None:
        """Give the module its own forward back."""
        module = self._module
        if module is None or module.__dict__.get("forward") is not self:
            return  # other code has wrapped this object, which now only forwards calls
        del module.__dict__["forward"]
        if module.forward != self._forward:
            module.__dict__["forward"] = self._forward


skip_in_compiler(RecomputedForward.__call__, with_callees=False)
# Within a module that is compiled and that the compiler does not trace, such as an nn.Sequential.
skip_in_compiler(RecomputedForward._find_recomputing)
skip_in_compiler(recompute_later)
skip_in_compiler(vars(RecomputedForward)["_module"].fget)
