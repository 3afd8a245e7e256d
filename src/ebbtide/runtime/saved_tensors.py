"""The pack and unpack hooks: they pass through, keep, offload or leave out what autograd saves.

Before `SavedTensorHooks`, which is called for every saved tensor, come the handles of tensors that
consist of others, and the places where ebbtide steps aside for other code's hooks.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import nn

from ebbtide.errors import PolicyError, warn_user
from ebbtide.runtime.activations import Activations, Scope
from ebbtide.runtime.compiled import skip_in_compiler
from ebbtide.runtime.events import Owner
from ebbtide.runtime.handles import (
    KEEP,
    OFFLOAD,
    AbstractSaved,
    Form,
    Saved,
    StorageRecord,
    is_of_checkpoint,
    pass_through,
    raise_modified,
    restore,
)
from ebbtide.runtime.parameter_index import ParameterIndex, RestingWeights
from ebbtide.runtime.rebuild import Placement, RecordedTensor, can_restore
from ebbtide.runtime.record import ForwardLog, kernel_settings
from ebbtide.runtime.torch_internals import (
    NestedTensor,
    OwnMode,
    address_of,
    has_dispatch_modes,
    hooks_are_enabled,
    is_written_down,
    parts_of,
    push_hooks,
    remove_hooks,
    sequence_number,
    set_version,
    tolerate_hooks,
    top_hooks,
    transform_level,
    without_function_subclasses,
)
from ebbtide.units import format_size

# ---- Saves tensors of wrapper subclasses by saving each of their inner tensors

_VALUES = "_values"
"""The name of the elements among the inner tensors of a nested tensor in the jagged layout."""


@final
class CompositeTensor(AbstractSaved):
    """A saved tensor of a wrapper subclass, such as DTensor, whose inner tensors are saved each."""

    __slots__ = ("_context", "_inner", "_others", "_probe", "_size", "_stride", "_type", "_version")

    def __init__(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Saved]) -> None:
        wait = getattr(tensor, "trigger_wait", None)
        if wait is not None:
            # The result of a collective (AsyncCollectiveTensor) is waited for at its first use,
            # which this is: a copy would read memory that the collective has not filled.
            wait()
        names, self._context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: getattr(tensor, name) for name in names}
        # DTensor's parts are its local tensor and, from torch 2.13 on, its mesh.
        self._others = {n: p for n, p in parts.items() if not isinstance(p, torch.Tensor)}
        if isinstance(tensor, NestedTensor):
            # torch compares the lengths of two jagged tensors by asking whether their offsets are
            # the same object, so everything but the values is handed back as it is.
            self._others = {n: p for n, p in parts.items() if n != _VALUES}
            parts = {_VALUES: parts[_VALUES]}
        version = self._version = tensor._version
        inner = {n: p for n, p in parts.items() if isinstance(p, torch.Tensor)}
        self._inner = {n: pack(_at_version(p, version)) for n, p in inner.items()}
        self._type = type(tensor)
        self._size = tensor.shape
        self._stride = tensor.stride()
        # It shares the version counter of the tensor and, emptied, not the memory. The inner
        # tensors have counters of their own, which changes to the outer tensor do not touch.
        self._probe: Any = tensor.detach()
        for name, part in inner.items():
            with contextlib.suppress(AttributeError):  # nested tensors compute a few small ones
                setattr(self._probe, name, part.new_empty(0))

    def restore(self) -> torch.Tensor:
        if self._probe._version != self._version:
            raise_modified(self._probe, self._version, self._size)
        parts = {name: restore(saved) for name, saved in self._inner.items()} | self._others
        return self._type.__tensor_unflatten__(  # type: ignore[attr-defined, no-any-return]
            parts, self._context, self._size, self._stride
        )


def _at_version(part: torch.Tensor, version: int) -> torch.Tensor:
    """Return an inner tensor that is at a version of its own whenever the outer tensor is.

    An in-place change of the outer tensor does not count in the inner tensors' versions. A record
    of the bytes from before the change would be taken for one of the present bytes.
    """
    if version == 0:
        return part
    alias = part.data
    set_version(alias, version + part._version)
    return alias


@final
class QuantizedTensor(AbstractSaved):
    """A saved quantized tensor of Transformer Engine: its saved data tensors and its empty shell.

    In Transformer Engine's protocol `prepare_for_saving` takes the data out of a tensor, and
    `restore_from_saved` puts them back. Both change the tensor itself, so they are called on
    detached copies only.
    """

    __slots__ = ("_inner", "_shell")

    def __init__(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Saved]) -> None:
        parts, self._shell = tensor.detach().prepare_for_saving()  # type: ignore[attr-defined]
        self._inner = [None if part is None else pack(part) for part in parts]

    def restore(self) -> torch.Tensor:
        shell = self._shell
        shell.restore_from_saved([None if p is None else restore(p) for p in self._inner])
        tensor: torch.Tensor = shell.detach()
        shell.prepare_for_saving()  # the shell is empty again
        return tensor


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the methods of Transformer Engine's protocol."""
    return hasattr(tensor, "prepare_for_saving") and hasattr(tensor, "restore_from_saved")


def is_plain_subclass(tensor: torch.Tensor, plain_types: frozenset[type]) -> bool:
    """Whether a tensor is a plain one, to which its class only adds Python, as MONAI's MetaTensor.

    Args:
        tensor: a saved tensor.
        plain_types: the classes of tensors that are packed without this question.
    """
    kind: Any = type(tensor)
    if kind in plain_types or isinstance(tensor, torch.nn.Parameter):
        return False
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_quantized(tensor):
        return False
    return tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")


# ---- Where ebbtide steps aside, because other code decides what becomes of saved tensors ----
#
# [Note: torch.func inside a forward] `torch.func.grad`, `vjp`, `jacrev` and `hessian` cannot work
# with saved-tensor hooks, so they call `disable_saved_tensors_hooks`. That function raises if hooks
# are pushed already, as ours are during a forward. It need not: while hooks are disabled, autograd
# calls none, so pushed hooks do no harm. `let_others_disable` makes torch disable our hooks there
# instead of raising. Hooks of other code are treated as before.


_warned: weakref.WeakSet[object] = weakref.WeakSet()


def hooks_are_wanted(forward: object = None) -> bool:
    """Whether saved-tensor hooks of ebbtide should be pushed now.

    They are not wanted where autograd records nothing, where hooks are disabled (as inside
    `torch.func.grad`), while a model is exported or traced, and where other code has hooked what
    autograd saves: torch calls only the innermost hooks, so ours would replace those.

    Args:
        forward: the offloaded forward that asks, which is warned of other code's hooks once.
    """
    if not torch.is_grad_enabled() or not hooks_are_enabled():
        return False
    hooks = top_hooks()
    if hooks is not None and isinstance(getattr(hooks[0], "__self__", None), OwnMode):
        return False  # they are of a recomputed layer
    if hooks is not None and hooks[1] is not restore:
        if not is_of_checkpoint(hooks[0]):
            _warn_of_other_hooks(hooks[0], forward)
        return False
    return not is_written_down()


def refuse_moving_weights() -> None:
    """Check that weights can be moved to the device for a forward that begins now.

    Raises:
        PolicyError: the forward is transformed or traced, which would record the move itself.
    """
    if transform_level() is not None:
        what = "runs inside a transform of torch.func (grad, vmap, jvp, ...)"
    elif is_written_down():
        what = "is exported, traced, or run with fake tensors"
    else:
        return
    raise PolicyError(
        f"the model {what} while its weights are offloaded to the host, which is not possible: "
        f"call detach() on the offload's handle first, or offload without weights=..."
    )


def let_others_disable() -> None:
    """See [Note: torch.func inside a forward]. Calling this again does nothing."""
    tolerate_hooks(lambda _, unpack: unpack is restore)


def _warn_of_other_hooks(pack: Any, forward: object) -> None:
    if forward is not None:
        if forward in _warned:
            return
        _warned.add(forward)
    name = f"{getattr(pack, '__module__', '')}.{getattr(pack, '__qualname__', type(pack).__name__)}"
    warn_user(
        "other-hooks",
        f"saved-tensor hooks of other code ({name}) are active around this forward. torch calls "
        f"only the innermost hooks, so ebbtide leaves what this forward saves to them. To offload "
        f"with ebbtide, call the model outside that context",
    )


# ---- Saved-tensor hooks: they pass through, keep, offload or leave out what autograd saves ----


PackWeight = Callable[[torch.Tensor, torch.Tensor], Saved | None]
"""Returns the handle of a saved tensor that is a view, or a cast, of an offloaded weight."""


@final
class SavedTensorHooks:
    """The pack and unpack hooks of one model.

    Args:
        activations: keeps the records of saved storages.
        placement: decides whether a storage is kept, offloaded or rebuilt.
        parameters: recognises tensors that are parameters and no activations.

    Attributes:
        activations: as given.
        plain_types: types of tensors that are packed as plain tensors.
        device: the device that the model computes on.
    """

    # Long: what runs for every saved tensor is in one place, and calls as little as it can.

    def __init__(
        self,
        activations: Activations,
        placement: Placement,
        parameters: ParameterIndex,
    ) -> None:
        self._pack_weight: PackWeight | None = None
        self.plain_types: frozenset[type] = frozenset({torch.Tensor, nn.Parameter})
        self.activations = activations
        self._placement = placement
        self._parameters = parameters
        self._unsharded = parameters.unsharded
        self._account = activations.transfers.account
        self.device = activations.transfers.device.torch_device
        self._min_bytes = placement.min_bytes
        self._finds_settings = self.device.type == "cpu"
        self._scopes = activations.scopes
        self._running = activations.scopes.running
        self._has_looked = False
        placement.wanted_again = activations.wanted_again

    def use(self, weights: RestingWeights | None) -> None:
        """Let offloaded weights pack what is saved of them from now on; None: there are none."""
        self._parameters.resting = () if weights is None else weights
        self._pack_weight = None if weights is None else weights.pack
        if weights is not None:
            self.plain_types |= weights.plain_types

    @property
    def running(self) -> list[Scope]:
        """The scopes of the forwards that run now on the calling thread, innermost last."""
        return self._running.forwards

    def begin(self, held: Iterable[torch.Tensor] = ()) -> bool:
        """Hook what autograd saves from now on.

        Nothing is hooked where autograd does not record, nor where other code decides what becomes
        of saved tensors, such as `torch.utils.checkpoint`: see `hooks_are_wanted`.

        Args:
            held: tensors that stay on the device in any case, like parameters.

        Returns:
            Whether `end` must follow.
        """
        if not hooks_are_wanted():
            return False
        self._parameters.refresh(held)
        self._warn_if_nothing_left()
        self.activations.end_step_with_graphs()
        offloads = self._placement.offloads(None)
        with self.activations.transfers:
            self._scopes.begin_forward(offloads=offloads)
            push_hooks(self.pack, restore)
        return True

    def end(self) -> Scope:
        """End what the last `begin` began. Returns the scope of the forward."""
        self.pop()
        scope = self._running.forwards[-1]
        try:
            self.activations.begin_copies(scope.unwritten)
        finally:
            self._scopes.end_forward(scope)
            self.activations.transfers.settle()
        return scope

    def _warn_if_nothing_left(self) -> None:
        """Say after the first step that it has offloaded nothing, if so."""
        meter = self._account.last_meter
        if self._has_looked or meter is None or not self._account.num_steps:
            return
        self._has_looked = True
        left = meter.offloaded_bytes + meter.rebuilt_bytes + meter.recomputed_bytes
        if left or not self._placement.wants_any:
            return
        warn_user(
            "nothing-offloaded",
            f"ebbtide offloaded nothing in this model's first training step: of the "
            f"{meter.num_saved} tensors that autograd saved, {format_size(meter.parameter_bytes)} "
            f"are parameters, and none of the others is in a chosen layer, has "
            f"{format_size(self._placement.min_bytes)} or more, and is no input of a layer that is "
            f"recomputed. Lower ActivationPolicy(min_bytes=...), choose other or larger layers "
            f"with layers=[...], or offload parameters with weights=ebbtide.WeightPolicy()",
        )

    def note_values(self, owner: Owner, values: Any) -> None:
        """Note whose the tensors are that a forward was given or returned, for the trace."""
        if self._account.memory is not None and len(self.running) <= 1:
            self._account.memory.note_values(owner, values)

    def pop(self) -> bool:
        """Take the hooks from autograd's stack; return whether they were there."""
        return remove_hooks(self.pack)

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Pack a tensor that autograd saves. This is the pack hook.

        A step packs thousands of small tensors, so each look-up here shows in benchmarks/overhead.
        """
        if (
            type(tensor) not in self.plain_types
            or tensor.device != self.device
            or tensor.layout is not torch.strided
        ):
            return self._pack_unusual(tensor)
        scopes = self._running.scopes
        scope = scopes[-1] if scopes else self._scopes.current
        if scope is None:  # an interrupt has left the hooks behind
            return pass_through(tensor)
        size_bytes = tensor.nbytes
        meter = self._account.meter
        meter.num_saved += 1
        meter.saved_bytes += size_bytes
        base = tensor._base
        whole = tensor if base is None else base
        try:
            pointer = whole.data_ptr()
        except RuntimeError:  # it has no memory of its own, inside a transform of torch.func
            return pass_through(tensor)
        if self._pack_weight is not None:
            saved = self._pack_weight(tensor, whole)
            if saved is not None:
                meter.parameter_bytes += size_bytes
                return saved
        if self._parameters.owns(tensor, pointer):
            meter.parameter_bytes += size_bytes
            return pass_through(tensor)
        if size_bytes < self._min_bytes and whole.nbytes < self._min_bytes:
            small = scope.small
            if pointer not in small.sizes:
                small.sizes[pointer] = whole.nbytes
            # A leaf refers to no graph, so holding it leaks nothing, and it is cheaper.
            held = tensor if tensor.grad_fn is None else tensor.detach()
            return held, tensor._version, small
        # No bytes, no copy. A zero tangent has none whatever its shape; a nested tensor no strides.
        if not size_bytes or not pointer or tensor.is_nested:
            return pass_through(tensor)
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        if begin != pointer and self._parameters.owns(tensor, begin):
            meter.parameter_bytes += size_bytes
            return pass_through(tensor)
        try:
            return self._pack_large(tensor, storage, scope)
        except BaseException as error:
            self.activations.transfers.note_error(error)
            raise

    @property
    def log(self) -> ForwardLog:
        """The log of the forward that runs."""
        return self._scopes.here.forward

    def are_on_top(self) -> bool:
        """Whether what autograd saves now is packed by these hooks."""
        if not hooks_are_wanted() or not self.running:
            return False
        top = top_hooks()
        return top is not None and bool(top[0] == self.pack)

    def offload_here(self) -> None:
        """Offload what the layer that runs saves from now on, whatever the policy says."""
        self.activations.scopes.here.offloads = True

    def _pack_large(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, scope: Scope
    ) -> Saved:
        """Share the record of a storage, or place the storage and make one."""
        activations = self.activations
        if scope.unwritten and scope.unwritten[0][0] != sequence_number():
            activations.begin_copies(scope.unwritten)
        if self._placement.may_rebuild:
            if self._finds_settings:
                scope.forward.note_settings(kernel_settings())
            if has_dispatch_modes():  # what it has computed may be what no kernel gives
                scope.forward.is_mixed = True
        record = activations.find(storage._cdata, tensor._version)
        if record is not None and not self._may_share(record, tensor, scope):
            record = None
        call = None
        if record is not None:
            number, decision = scope.number_storage(record), record.decision
        else:
            if self._unsharded.is_sharded and self._unsharded.own(storage):
                self._account.meter.parameter_bytes += tensor.nbytes
                return pass_through(tensor)
            number = scope.number_storage(None)
            decision, call = self._placement.decide(scope, number, tensor, storage)
        form: Form = None
        if decision is OFFLOAD:
            if record is None or record.form is not None:  # else the first record has all bytes
                form = _find_form(tensor, storage)
            if record is not None:
                record = activations.find_form(record, form)
                if record is None and scope.must_stay:
                    decision = KEEP
        if record is not None:
            activations.share(record)
        else:
            record = activations.add(tensor, storage, scope, number, decision, call=call, form=form)
        return RecordedTensor(activations, record, tensor)

    def _may_share(self, record: StorageRecord, tensor: torch.Tensor, scope: Scope) -> bool:
        """Whether a record of a tensor's storage has the bytes that the tensor has now."""
        # Guard inputs-of-one-forward: the record of a tensor that no operation of the graph has
        # made is not shared across forwards. Other code may have filled the memory anew without a
        # word to torch: backward would get the bytes of the forward before.
        if tensor.grad_fn is None and not self._scopes.is_of(record.forward, scope):
            return False
        call = record.call
        if call is None:
            return True
        # A tensor that its own graph would not rebuild, such as `output.detach()`, may outlive the
        # graph that holds what the record is rebuilt from, and the program may then change that.
        whole = tensor if tensor._base is None else tensor._base
        made_by = None if tensor.grad_fn is None else whole.grad_fn
        if made_by is None or made_by.name() != call.recipe.node:
            return False
        # What it is rebuilt from may have changed. The bytes are still here.
        return all(can_restore(saved) for saved in call.inputs)

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer, or stands for one that rests elsewhere."""
        if type(tensor) in self.plain_types and type(tensor) is not torch.Tensor:
            return True
        return tensor.layout is torch.strided and self._parameters.has_at(tensor.data_ptr())

    def hold_weight(self, tensor: torch.Tensor) -> Saved | None:
        """Return the handle of a weight that a recomputed layer reads again; None if it is none.

        It does not count as saved by autograd.
        """
        whole = tensor if tensor._base is None else tensor._base
        if not address_of(whole):  # a sparse tensor, whose values are a view of it
            return None
        if self._pack_weight is not None:
            saved = self._pack_weight(tensor, whole)
            if saved is not None:
                return saved
        if not self._parameters.owns(tensor, whole.data_ptr()):
            return None
        # The memory that it has now, whatever `weight.data = ...` gives it before backward; but
        # DeepSpeed takes a weight's memory away when the forward has used it.
        held = tensor if hasattr(whole, "ds_id") else tensor.detach()
        return held, tensor._version, None

    def consists_of_others(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a wrapper subclass whose inner tensors are saved each."""
        if tensor.device != self.device or not hasattr(tensor, "__tensor_flatten__"):
            return False
        return not self._parameters.owns_outer(tensor)

    def _pack_unusual(self, tensor: torch.Tensor) -> Saved:
        if is_plain_subclass(tensor, self.plain_types):
            # From hooks, torch itself gives backward no tensors of other classes.
            with without_function_subclasses():
                return self.pack(tensor.as_subclass(torch.Tensor))
        if self.consists_of_others(tensor):
            return CompositeTensor(tensor, self.pack)  # its inner tensors count
        if tensor.device == self.device and hasattr(tensor, "__tensor_flatten__"):
            size_bytes = sum(part.nbytes for part in parts_of(tensor))
            meter = self._account.meter
            meter.num_saved += 1
            meter.saved_bytes += size_bytes
            meter.parameter_bytes += size_bytes
            return pass_through(tensor)
        if tensor.device == self.device and is_quantized(tensor):
            return QuantizedTensor(tensor, self.pack)  # so do these
        meter = self._account.meter
        meter.num_saved += 1
        with contextlib.suppress(RuntimeError):  # sparse tensors and some subclasses cannot say
            meter.saved_bytes += tensor.nbytes
        return pass_through(tensor)


def _find_form(tensor: torch.Tensor, storage: torch.UntypedStorage) -> Form:
    """Return which bytes of a storage are offloaded for a tensor; see `StorageRecord`.

    A view is gathered in the shape of the tensor, with broadcast dimensions of size 1. If it covers
    half of its storage or more, the storage is offloaded as a whole.
    """
    if tensor.is_contiguous() and tensor.nbytes >= storage.nbytes():
        return None
    size, stride = tensor.shape, tensor.stride()
    distinct = tuple(n if step else 1 for n, step in zip(size, stride, strict=True))
    whole = tensor if tensor._base is None else tensor._base
    # Of memory that no operation of the graph has made as a whole, the view
    # alone is copied. Programs fill such a buffer part by part without a version, as torchdiffeq's
    # solvers do: a later part would share the bytes from before it was filled.
    least_bytes = storage.nbytes() if whole.grad_fn is None else storage.nbytes() / 2
    if math.prod(distinct) * tensor.itemsize >= least_bytes:
        return None
    if _may_overlap(distinct, stride):
        return None
    return tensor.dtype, distinct, stride, int(tensor.storage_offset())


def _may_overlap(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements of a view may share memory. Such a view cannot be scattered back."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(size, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


# Autograd calls these while a compiled region runs, and the compiler would trace them, too.
skip_in_compiler(SavedTensorHooks.pack)
skip_in_compiler(restore)
