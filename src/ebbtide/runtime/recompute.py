"""Runs the forwards of recomputed layers under a checkpoint, and again in backward.

`Recomputations` counts what the layers do not save and what backward holds of them, `_Call` is one
call of a layer, and `RecomputedForward` stands in the place of its forward.

[Note: recomputed layers] A recomputed layer runs under torch's non-reentrant checkpoint, which
saves the layer's inputs and none of what the operations inside it save. The inputs are saved under
ebbtide's hooks, so they are kept, offloaded and prefetched like any saved tensor. The first time
that backward needs something from inside the layer, the checkpoint reads the inputs and runs the
forward again. What that saves is read soon, so it stays on the device, under the checkpoint's
hooks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointError, checkpoint

from ebbtide.devices.device import AbstractEvent, Layer, in_range
from ebbtide.errors import SavedTensorModifiedError
from ebbtide.runtime.activations import Activations
from ebbtide.runtime.compiled import (
    ForwardReplacement,
    compiled_as_here,
    is_traced,
    skip_in_compiler,
)
from ebbtide.runtime.events import Owner, Subject
from ebbtide.runtime.handles import KEEP, raise_modified, restore
from ebbtide.runtime.module_state import Arguments, ModuleState
from ebbtide.runtime.outside import Outside
from ebbtide.runtime.parameter_index import RestingWeights
from ebbtide.runtime.record import ForwardLog
from ebbtide.runtime.saved_tensors import SavedTensorHooks
from ebbtide.runtime.stats import Account
from ebbtide.runtime.torch_internals import (
    has_modes,
    in_backward,
    outside_modes,
    top_hooks,
)
from ebbtide.runtime.transfers import Transfers
from ebbtide.runtime.verification import (
    SavedDigests,
    SavedInOrder,
    Verifications,
    Verified,
    differ,
    digest,
    find_differences,
    sample,
)
from ebbtide.stores.measured_memory import FreedMemory, return_freed_memory
from ebbtide.units import format_size

Pack = Callable[[Tensor], Any]
"""Is called with each tensor that autograd saves, and returns what autograd keeps in its place."""


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
class RecomputedHold:
    """What one call of a recomputed layer holds, which dies with the last tensor saved inside it.

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

    def add(self, owner: _Call, call: RecomputedLayer, forward: ForwardLog) -> RecomputedHold:
        """Count a call whose first forward has ended.

        Args:
            owner: what dies when nothing saved inside the call is needed any more.
            call: what was called.
            forward: the log of its forward.
        """
        deaths, transfers = self._activations.deaths, self._activations.transfers
        with transfers, self._gate:
            self._account.meter.recomputed.append(call)
            hold = RecomputedHold()
            hold.call, hold.forward, hold.transfers = call, forward, transfers
            hold.held_bytes, hold.begun = 0, None
            transfers.live += 1
            deaths.expect(owner, hold)
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

    """
    layer, hooks, account, weights = recomputing
    arguments = Arguments(args, kwargs)
    tensors, arguments.tensors = arguments.tensors, []
    trained = any(tensor.requires_grad for tensor in tensors)
    if not trained and not any(weight.requires_grad for weight in module.parameters()):
        return forward(*args, **kwargs)  # it saves nothing
    state = ModuleState(module, account.outside, weights, arguments.others)
    if state.is_lazy:  # only this forward knows the shapes of its weights
        account.note_verifying()
        return forward(*args, **kwargs)
    modes = has_modes()
    kind = layer.name, id(module), arguments.kind, state.kind, _autocast(hooks.device), modes
    verified = account.verifications.find(kind)
    if verified is None:
        account.note_verifying()
    call = _Call(recomputing, module, forward, arguments, state, modes, kind, verified)
    device = hooks.device
    if device.type != "cpu" and not any(tensor.device == device for tensor in tensors):
        # The checkpoint restores the random numbers of the devices that it finds tensors on.
        tensors = [*tensors, torch.empty(0, device=device)]
    return checkpoint(call.run, *tensors, use_reentrant=False)


def _autocast(device: torch.device) -> Hashable:
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return torch.is_autocast_enabled("cpu"), device
    return torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled(), device


def _has_plain_memory(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not hasattr(type(tensor), "__tensor_flatten__")
    return plain and bool(tensor.numel()) and not tensor.is_meta


@final
@dataclass(eq=False, repr=False)
class _Call:
    """One call of a layer whose forward runs again: what it finds, and who is told of it.

    The second forward saves what the first one has not. If the kind of call is not verified, the
    first forward saves everything, as if the layer were not recomputed, and the second one is only
    compared; see [Note: verified recomputation]. The checkpoint holds this object as long as the
    forward may run again.

    Attributes:
        recomputing: the layer, who is told of the call, and what surrounds its second forward.
        module: the layer's module.
        forward: its forward.
        arguments: the arguments, without their tensors.
        state: the state of the module.
        under_modes: whether the first forward runs under modes of the program.
        kind: the kind of call.
        verified: what is known of the kind; None: it is verified now.
        digests: digests of what the first forward has saved, if this call is verified.
        samples: what a recomputation is compared by: the 0-dim tensors on the host that the first
            forward has saved, and a sample of one large tensor, by their numbers.
        changed_memory: gives what the first forward has changed without a version, by number.
        changed_cache: what it has changed in a cache; "" if nothing.
        hold: the hold of a recomputed call, once its first forward has ended.
    """

    recomputing: Recomputing
    module: nn.Module
    forward: Callable[..., Any]
    arguments: Arguments
    state: ModuleState
    under_modes: bool
    kind: Hashable
    verified: Verified | None
    digests: SavedDigests = field(default_factory=SavedDigests)
    samples: dict[int, Tensor] = field(default_factory=dict)
    changed_memory: Callable[[], list[int]] = list
    changed_cache: str = ""
    hold: RecomputedHold | None = None

    @property
    def layer(self) -> Layer:
        """The layer."""
        return self.recomputing.layer

    @property
    def verifications(self) -> Verifications:
        """Which layers give the same bits again."""
        return self.recomputing.account.verifications

    def run(self, *tensors: Tensor) -> Any:
        """Run the forward, for the first time or again."""
        first = self.arguments.take_first()
        if first is not None:
            return self._run_first(tensors, *first)
        if self.verified is None:
            self._verify(tensors)
            _save_number()
        elif self.hold is None:  # backward runs within the forward
            self._compute_again(tensors)
        else:
            self.recomputing.account.begin(self.hold)
            try:
                in_range("recompute", self.layer, self._compute_again, tensors)
            finally:
                self.recomputing.account.end(self.hold)
        return None

    def _run_first(
        self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        saved = _SavedFirst(self)
        memory: list[Tensor] = []
        if self.verified is None:
            self.recomputing.hooks.offload_here()
            memory = [each for each in self.state.memory(tensors) if _has_plain_memory(each)]
        before = [digest(each) for each in memory]
        with saved_tensors_hooks(saved.pack, saved.unpack):
            result = self.forward(*args, **kwargs)
        self.changed_cache = self.arguments.find_change()
        if self.verified is None:
            self.digests.finish()
            # What a version does not show: a write through `.data`, a kernel of a large batch norm.
            self.changed_memory = find_differences(before, [digest(each) for each in memory])
            saved.number = _save_number()
        else:
            log = self.recomputing.hooks.log
            counted = saved.size_bytes, saved.borrowed_bytes, saved.num_saved
            call = RecomputedLayer(self.layer, log.number, *counted)
            self.hold = self.recomputing.account.add(self, call, log)
        return result

    def _find_change(self) -> str:
        """Say what the forward, or the program since, has changed that a second one needs."""
        change = self.changed_cache or self.state.find_change()
        return change or ("a weight, a buffer or an input" if self.changed_memory() else "")

    def _run_as_first(self, tensors: tuple[Tensor, ...], saved: SavedInOrder, pack: Pack) -> Any:
        """Run the forward again, with all as the first one found it."""
        args, kwargs = self.arguments.put_together(tensors)
        weights = self.recomputing.weights
        opened = nullcontext() if weights is None else weights.open(self.module)
        # The program may have entered a mode for its backward only.
        outside = nullcontext() if self.under_modes else outside_modes()
        with outside, self.state.put_back(), opened, saved_tensors_hooks(pack, _same):
            try:
                result = self.forward(*args, **kwargs)
                saved.finish()
            finally:
                saved.check()
        return result

    def _compute_again(self, tensors: tuple[Tensor, ...]) -> None:
        change = self._find_change()
        if change:
            self.verifications.raise_changed(self.layer, change)
        again = _SavedAgain(self)
        self._run_as_first(tensors, again, again.pack)

    def _verify(self, tensors: tuple[Tensor, ...]) -> None:
        """Run the forward again and compare what it saves; no error of it is raised."""
        change = self._find_change()
        if change:
            self.verifications.note_change(self.layer, change)
            return
        again = SavedDigests()
        try:
            result = self._run_as_first(tensors, again, again.note)
            again.find_unfilled(result)
            del result
        except torch.OutOfMemoryError:
            return  # the next call is verified
        except Exception as error:  # whatever it raises, the gradients of this step are right
            reason = f"raises {type(error).__name__} when it runs again"
            self.verifications.refuse(self.layer, reason)
            return
        self.verifications.compare(self.layer, self.kind, self.digests, again)


@final
class _SavedFirst:
    """Is given what the first forward of a call saves, and hands it on.

    The checkpoint is given what will be recomputed, and ebbtide's hooks what a verified call saves.
    In that case the checkpoint saves one number after the forward. When backward begins, it is
    asked for this number, and so it runs the forward again exactly as for a recomputation.

    Attributes:
        size_bytes: bytes of the storages, each counted once, without the layer's inputs.
        borrowed_bytes: bytes of its inputs that are used in it and that are not kept on the device.
        num_saved: number of saved tensors.
        number: the node that saved a number under the checkpoint, from the end of the first forward
            on until backward begins; None if the forward does not run again.
    """

    def __init__(self, call: _Call) -> None:
        hooks: tuple[Any, Any] = (None, None) if call.verified is None else top_hooks()
        self._pack, self._unpack = hooks
        self._call = call
        self.size_bytes = self.borrowed_bytes = self.num_saved = 0
        self.number: Any = None
        self._known: dict[int, StorageWeakRef] = {}

    def pack(self, tensor: Tensor) -> Any:
        call, place = self._call, self.num_saved
        self.num_saved = place + 1
        if call.verified is None:
            call.digests.note(tensor, is_weight=call.recomputing.hooks.is_weight(tensor))
            return call.recomputing.hooks.pack(tensor)
        on_host = tensor.device.type == "cpu" and not tensor.dim()
        if place == call.verified.sampled or (on_host and place not in call.verified.unfilled):
            taken = sample(tensor)
            if taken is not None:
                call.samples[place] = taken
        self._count(tensor)
        return self._pack(tensor)

    def _count(self, tensor: Tensor) -> None:
        for storage, record in self._call.recomputing.hooks.look_at(tensor):
            address = storage._cdata
            if address not in self._known:
                # While the weak reference exists, no other storage gets the same address.
                self._known[address] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                if record is None:
                    self.size_bytes += storage.nbytes()
                elif record.decision is not KEEP:
                    self.borrowed_bytes += record.unpacked_bytes

    def unpack(self, packed: Any) -> Tensor:
        call = self._call
        if call.verified is None:
            if self.number is not None and in_backward():
                number, self.number = self.number, None
                if number is not None:  # else another thread has been faster
                    self._verify(number)
            return restore(packed)
        try:
            # Forwards that run again do so one after the other. Two
            # threads that put back the random numbers would draw from each other's.
            with _alone:
                tensor: Tensor = self._unpack(packed)
        except CheckpointError as error:
            call.verifications.raise_changed(call.layer, "", error)
        except SavedTensorModifiedError as error:
            # torch may train with such a program. The next steps do, too.
            if call.layer.name not in call.verifications.refused:
                call.verifications.raise_changed(call.layer, "an input or a weight", error)
            raise
        if call.recomputing.weights is not None:
            call.recomputing.weights.note_read(tensor)
        return tensor

    def _verify(self, number: Any) -> None:
        """Have the checkpoint run the forward again."""
        try:
            with _alone:
                number._saved_result  # noqa: B018
        except SavedTensorModifiedError:  # an input was changed: backward may not need it
            self._call.verifications.note_change(self._call.layer, "an input")


@final
class _SavedAgain(SavedInOrder):
    """Checks what the second forward saves, and hands it to the checkpoint's hooks.

    The checkpoint ends the forward when it is given the last tensor that backward needs.
    """

    def __init__(self, call: _Call) -> None:
        super().__init__()
        pack, _ = top_hooks()
        # The checkpoint's hook keeps the compiler out, at a cost; `pack` here does, too.
        self._pack = getattr(pack, "__wrapped__", pack)
        self._call = call
        self._handed: list[tuple[Tensor, int]] = []

    def _take(self, place: int, tensor: Tensor) -> None:
        call = self._call
        if place in call.samples:
            # What a recomputation gives is compared with what the forward gave.
            # A layer that depends on a counter outside of it gives gradients of another
            # computation.
            again = sample(tensor)
            differs = True if again is None else differ(call.samples[place], again)
            if isinstance(differs, Tensor):
                call.verifications.note_sample(call.layer, differs)
            elif differs:
                call.verifications.raise_changed(call.layer, "")
        if not tensor.is_inference():
            self._handed.append((tensor.detach(), tensor._version))
        self._pack(tensor)

    def check(self) -> None:
        # What was changed after it was saved is not used: plain autograd refuses it, and a
        # checkpoint would compute with the changed values.
        for tensor, version in self._handed:
            if tensor._version != version:
                raise_modified(tensor, version, tensor.shape)


def _save_number() -> Any:
    """Have autograd save a number. Returns the node that has saved it."""
    return torch.ones((), requires_grad=True, device="cpu", dtype=torch.float32).exp().grad_fn


def _same(tensor: Tensor) -> Tensor:
    return tensor


# Autograd calls these while a compiled layer runs, and the compiler would trace them, too.
for _hook in (
    _SavedFirst.pack,
    _SavedFirst.unpack,
    SavedInOrder.pack,
    SavedDigests.note,
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
        of_copy = self.find_forward_of_copy()
        if of_copy is not None:
            return of_copy(*args, **kwargs)
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
