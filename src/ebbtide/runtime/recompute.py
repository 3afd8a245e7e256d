"""Records the operations of recomputed layers, and runs them again in backward.

`Recording` is the operations of one call of a layer, and `Recorder` notes them while its forward
runs. `Proofs` says which layers can be recomputed.

[Note: recomputed layers] While the forward of a recomputed layer runs, a dispatch mode notes the
operations that reach torch's kernels, with their arguments. What autograd saves of their results is
not kept. When the forward ends, the tensors from outside of the layer that the noted operations
read, such as the layer's input, are saved under ebbtide's hooks, so they are kept, offloaded and
prefetched like any saved tensor. The first time that backward needs something from inside the
layer, the operations run again, as far as what autograd has saved depends on them. No code of the
program runs twice: what its forward counts, draws, caches or decides has happened once.

[Note: proven operations] Operations that write memory without a word to torch, such as a kernel of
an extension, are not noted, and some kernels give other bits each time. So the first time that a
layer uses an operation with arguments of these shapes, the tensors that it saves from then on are
held until its forward ends. Then the operations run again, and their results are compared to the
bit. If they are the same, the tensors are freed, and the operations are proven. If not, the
tensors are saved as if the layer were not recomputed, which it never is again. Code that writes
memory so in a later call only, or between a forward and its backward, is found by samples: some
elements of what is saved are kept, and compared with what is computed again.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from ebbtide.devices.device import (
    AbstractDevice,
    AbstractEvent,
    AbstractStream,
    Layer,
)
from ebbtide.errors import SavedTensorModifiedError, warn_user
from ebbtide.runtime.activations import Activations
from ebbtide.runtime.compiled import skip_in_compiler
from ebbtide.runtime.handles import AbstractProbed, Saved, bits_of, bytes_of, restore
from ebbtide.runtime.record import as_in_forward, kernel_settings
from ebbtide.runtime.saved_tensors import CompositeTensor, SavedTensorHooks, is_plain_subclass
from ebbtide.runtime.stats import RecomputedLayer
from ebbtide.runtime.torch_internals import (
    Operator,
    OwnMode,
    address_of,
    aside,
    compute_as_without_modes,
    has_dispatch_modes,
    identity_of,
    is_written_down,
    neg_view,
    pop_mode,
    push_hooks,
    push_mode,
    release_identity,
    remove_hooks,
    without_function_subclasses,
)
from ebbtide.units import few


@final
class Proofs:
    """Which operations of a model's layers have given the same bits when they ran again.

    Attributes:
        refused: names of the layers that are not recomputed any more, each with the reason.
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._proven: dict[str, set[Hashable]] = {}
        self._unsaid: list[str] = []
        self._samples: list[tuple[Layer, Tensor]] = []
        self._on_way: list[tuple[list[Layer], Tensor, AbstractEvent]] = []

    def of(self, layer: Layer) -> set[Hashable]:
        """Return the proven operations of a layer, to which more may be added."""
        return self._proven.setdefault(layer.name, set())

    def refuse(self, layer: Layer, reason: str) -> None:
        """Never recompute a layer again.

        Args:
            layer: the layer.
            reason: what it does, such as "gives other values when it runs again".
        """
        if layer.name not in self.refused:
            self.refused[layer.name] = reason
            self._unsaid.append(layer.name)

    def compare(self, layer: Layer, one: Tensor, other: Tensor | None) -> None:
        """Compare samples of a tensor and of what was computed again.

        On an accelerator the host does not wait; `check_samples` reads the result later.

        Raises:
            SavedTensorModifiedError: they differ.
        """
        if other is None or one.shape != other.shape:
            self.raise_differs(layer)
        bits = one.view(torch.uint8), other.view(torch.uint8)
        if one.device.type != "cpu":
            self._samples.append((layer, (bits[0] != bits[1]).any()))
        elif not torch.equal(*bits):
            self.raise_differs(layer)

    def check_samples(self, device: AbstractDevice) -> None:
        """Check the samples of the recomputations before; the host does not wait for them.

        Raises:
            SavedTensorModifiedError: one of them differs.
        """
        on_way, self._on_way = self._on_way, []
        for layers, flags, copied in on_way:
            if not copied.query():
                self._on_way.append((layers, flags, copied))
                continue
            for layer, differs in zip(layers, flags.tolist(), strict=True):
                if differs:
                    self.raise_differs(layer)
        if self._samples:
            samples, self._samples = self._samples, []
            flags = torch.stack([differs for _, differs in samples]).to("cpu", non_blocking=True)
            copied = device.compute_stream().record()
            self._on_way.append(([layer for layer, _ in samples], flags, copied))

    def raise_differs(self, layer: Layer) -> NoReturn:
        """Refuse a layer that has not given what it gave in its forward, and say so."""
        self.refuse(layer, _DIFFERS)
        raise SavedTensorModifiedError(
            f"layer {layer.index} ({layer.name}) was computed again in backward and gave other "
            f"values than in its forward, so gradients are wrong: code in it, such as a kernel of "
            f"an extension, writes memory without a word to torch, or the program has written a "
            f"weight through .data before backward. Repeat the step from the weights before it; "
            f"from now on the layer is not recomputed"
        )

    def warn(self) -> None:
        """Warn of the layers that have been refused."""
        if not self._unsaid:
            return
        unsaid, self._unsaid = self._unsaid, []
        why = [f"{name} {self.refused[name]}" for name in unsaid]
        warn_user(
            "not-recomputed",
            f"layers that are not recomputed: {few(why)}. What they save is offloaded instead, and "
            f"gradients are right. Nothing needs to be changed; to leave such layers out, name the "
            f"others: layers=[...]",
        )


# ---- What is known of an operator before it runs


class _Traits(NamedTuple):
    """What an operator does beside computing its result.

    Attributes:
        writes: places and names of the arguments that it writes.
        is_view: whether its result is a view of an argument.
        draws: whether it may draw random numbers.
        leaves_blank: whether the memory of its result has no values yet.
        leaves_gaps: whether parts of its smaller results may have no values.
        communicates: whether it exchanges data with other processes.
        repeats: whether it can run again, if it does in the other processes, too.
        completes: whether it waits for what a collective writes to its argument.
        called: what programs call to run it, if autocast may cast within its kernel.
    """

    writes: tuple[int | str, ...]
    is_view: bool
    draws: bool
    leaves_blank: bool
    leaves_gaps: bool
    communicates: bool
    repeats: bool
    completes: bool
    called: str


_BLANK: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "empty_permuted"),
        *("new_empty", "new_empty_strided"),
    )
)
_OF_PROCESSES: Final = frozenset({"c10d", "_c10d_functional", "_dtensor", "symm_mem"})
_WITHOUT_EFFECT: Final = frozenset({"aten::record_stream", "aten::set_"})
"""They compute nothing: the memory of each argument is looked up when it is read."""

# Their schemas do not say that they write the running statistics.
_UNSAID_WRITES: Final[dict[str, tuple[int, ...]]] = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
}

# Of all operators that torch tests with samples, the only ones whose kernels call what autocast
# casts, with what programs call.
_CASTS_INSIDE: Final = {
    "aten::_trilinear": "aten::bilinear",
    "aten::linalg_pinv": "aten::linalg_pinv",
}

# Without dropout, attentions leave the seed and the offset of the random numbers unfilled, and one
# of them pads the sums of its softmax. They follow from what is compared.
_ATTENTION: Final = re.compile(r"attention|fused_attn|_flash|fmha", re.IGNORECASE)


@functools.cache
def _is_wrapper(kind: type[Tensor]) -> bool:
    """Whether tensors of a class consist of others, on which operations run."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


@functools.cache
def _traits_of(function: Any) -> _Traits | None:
    """Return what is known of an operator; None if it is none of torch's, or computes nothing."""
    if not isinstance(function, Operator):
        return None  # a higher-order operator, such as flex attention that is not compiled
    schema = function._schema
    name = schema.name
    if name in _WITHOUT_EFFECT:
        return None
    writes: list[int | str] = [*_UNSAID_WRITES.get(name, ())]
    for place, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            writes.append(argument.name if argument.kwarg_only else place)
    space = function.namespace
    completes = name == "_c10d_functional::wait_tensor"
    if completes:
        writes = [0]  # what a collective fills has its values only then
    return _Traits(
        tuple(writes),
        not writes and any(each.alias_info is not None for each in schema.returns),
        torch.Tag.nondeterministic_seeded in function.tags or space not in ("aten", "prims"),
        name in _BLANK,
        bool(_ATTENTION.search(name)),
        space in _OF_PROCESSES,
        space != "c10d",  # what these fill is seen after they have returned
        completes,
        _CASTS_INSIDE.get(name, ""),
    )


# ---- One operation of a recording, and where its tensors are


class _Part(NamedTuple):
    """A tensor in a storage that the recording numbers: all of a tensor but its memory."""

    slot: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor, slot: int) -> _Part:
        conj, neg, offset = tensor.is_conj(), tensor.is_neg(), int(tensor.storage_offset())
        return cls(slot, tensor.dtype, tensor.size(), tensor.stride(), offset, conj, neg)

    def lay(self, memory: Tensor) -> Tensor:
        """Return the tensor in the memory of another tensor."""
        if (
            memory.dtype is self.dtype
            and memory.size() == self.size
            and memory.stride() == self.stride
            and memory.storage_offset() == self.offset
            and memory.is_conj() == self.is_conj
            and memory.is_neg() == self.is_neg
        ):
            return memory
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        tensor.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
        if self.is_conj:
            tensor = tensor.conj()
        return neg_view(tensor) if self.is_neg else tensor


@final
@dataclass(slots=True, eq=False, repr=False)
class _FromOutside:
    """A tensor from outside of the layer that an operation reads.

    Attributes:
        tensor: the tensor, until the forward ends.
        memory: its memory, which the program may exchange meanwhile for another.
        version: its version when it was read.
        saved: what it was saved as; None if it is not needed, or the forward has not ended.
    """

    tensor: Tensor | None
    memory: Tensor | None
    version: int
    saved: Saved | None = None

    def find(self) -> Tensor:
        """Return the tensor as it was when it was read.

        Raises:
            RuntimeError: an interrupt has ended the forward, so that nothing was kept for backward.
        """
        if self.saved is not None:
            return restore(self.saved)
        if self.memory is None:
            raise RuntimeError(
                "backward needs what a recomputed layer has saved in a forward that Ctrl-C, or an "
                "error that is no Exception, has ended; run the forward again"
            )
        return self.memory


@final
@dataclass(slots=True, eq=False, repr=False)
class _Operation:
    """One operation, ready to run again.

    Attributes:
        function: the operator.
        args: its arguments, with what stands for them in the places of tensors.
        kwargs: its named arguments, likewise.
        reads: slots of the storages that it reads or writes.
        writes: slots of those that it writes and has not made.
        makes: place, slot and layout in memory of each result whose storage it makes.
        outer: the tensors from outside that it reads.
        numbers: the random numbers that it may draw.
        begins: of the operations that run again, the slots that it is the first to use and that no
            operation makes.
        ends: the slots, and tensors from outside, that no later one of them uses.
    """

    function: Any
    args: Any = ()
    kwargs: Any = None
    reads: set[int] = field(default_factory=set)
    writes: tuple[int, ...] = ()
    makes: tuple[tuple[int, int, Hashable], ...] = ()
    outer: tuple[_FromOutside, ...] = ()
    numbers: tuple[_Numbers, ...] = ()
    begins: set[int] = field(default_factory=set)
    ends: Sequence[int | _FromOutside] = ()


def _flat(result: Any) -> Sequence[Any]:
    """Return the results of an operator one by one."""
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, list | tuple):
        return [leaf for each in result for leaf in _flat(each)] if result else ()
    return (result,)


def _layout_of(tensor: Tensor) -> Hashable:
    """Return where the elements of a tensor are in memory, beside its first one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return None if 0 in tensor.shape else tuple(each for each in steps if each[0] > 1)


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_Numbers = tuple[Callable[[], Tensor], Callable[[Tensor], object], Tensor]
"""Random numbers that an operation may draw: what reads the state of their generator, what sets it,
and the state before the operation ran."""


def _numbers_of(device: torch.device, arguments: Iterable[object]) -> Iterator[_Numbers]:
    """Note the random numbers that an operation draws: those of its generators, or the default."""
    sources: list[tuple[Callable[[], Tensor], Callable[[Tensor], object]]] = [
        (each.get_state, each.set_state) for each in arguments if isinstance(each, torch.Generator)
    ]
    if not sources:
        sources.append((torch.get_rng_state, torch.set_rng_state))
        if device.type not in ("cpu", "meta"):
            module: Any = torch.get_device_module(device)
            sources.append(
                (
                    lambda: module.get_rng_state(device),
                    lambda state: module.set_rng_state(state, device),
                )
            )
    for read, write in sources:
        yield read, write, read()


_alone = threading.RLock()
"""Held while operations run again: random numbers and settings are those of the whole process."""


def _renew_lock() -> None:
    global _alone
    _alone = threading.RLock()  # a thread that is not in this process may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


Take = Callable[[int, Tensor], None]
"""Is given the number of a storage, and a tensor in it that nothing will write any more."""


@final
class Recording:
    """The operations of one call of a layer, as far as backward needs them.

    The handles of the tensors that are saved inside the layer own it.

    Args:
        activations: the model's activations.
        proofs: is told of the layer if it cannot be recomputed.
        layer: the layer.

    Attributes:
        operations: the operations; only those that run again once the forward has ended.
        outer: the tensors from outside that they read.
        begins: what is in the memory of the storages that no operation makes: a tensor from
            outside, or nothing yet, in so many bytes on a device.
        handles: number of saved tensors in each storage.
        call: counts what is recomputed; None before the forward has ended.
    """

    def __init__(self, activations: Activations, proofs: Proofs, layer: Layer) -> None:
        self.operations: list[_Operation] = []
        self.outer: list[_FromOutside] = []
        self.begins: dict[int, _FromOutside | tuple[int, torch.device]] = {}
        self.handles: Counter[int] = Counter()
        self.call: RecomputedLayer | None = None
        self.activations = activations
        self.proofs = proofs
        self.layer = layer
        self._device = activations.transfers.device
        self._settings = kernel_settings()
        self._values: dict[int, Tensor] = {}
        self._unread: Counter[int] = Counter()
        self._home: AbstractStream | None = None
        self._ready: AbstractEvent | None = None

    def end(self) -> None:
        """Forget what the saved tensors do not depend on. The forward has ended."""
        self.operations = self._plan()
        needed = set[Any]().union(*(each.outer for each in self.operations))
        needed.update(self.begins[slot] for each in self.operations for slot in each.begins)
        for each in self.outer:
            if each not in needed:
                each.tensor = each.memory = None

    def _plan(self) -> list[_Operation]:
        """Return the operations that the saved tensors depend on, in their order."""
        wanted, needed, used = set(self.handles), [], set[int | _FromOutside]()
        for operation in reversed(self.operations):
            made = {slot for _, slot, _ in operation.makes}
            if wanted.isdisjoint(made) and wanted.isdisjoint(operation.writes):
                continue
            needed.append(operation)
            wanted = (wanted | operation.reads) - made
            uses: dict[int | _FromOutside, None] = dict.fromkeys(operation.reads | made)
            uses.update(dict.fromkeys(operation.outer))
            operation.ends = [each for each in uses if each not in used]
            used.update(operation.ends)
        for operation in reversed(needed):
            operation.begins = operation.reads & wanted
            wanted -= operation.reads
        return needed[::-1]

    def find(self, slot: int) -> Tensor:
        """Return a tensor in a storage that is computed again.

        Raises:
            SavedTensorModifiedError: something that it is computed from was modified in place.
        """
        # Recordings that run again do so one after the other: two threads that put back the random
        # numbers would draw from each other's.
        with _alone:
            if slot not in self._values:
                self._run_again()
            value = self._values[slot]
            self._unread[slot] -= 1
            if self._unread[slot] <= 0:
                del self._values[slot]
        current = self._device.compute_stream()
        home, ready = self._home, self._ready
        assert home is not None and ready is not None
        # Backward may read on another stream than the one that has computed again.
        current.wait(ready)
        self._device.note_use(value, home, current, ready)
        return value

    def _run_again(self) -> None:
        if self.call is None:
            self._compute()
        else:
            self.activations.recompute(self.call, self._compute)

    def _read(self, outer: _FromOutside) -> Tensor:
        """Return a tensor from outside as it was in the forward.

        Raises:
            SavedTensorModifiedError: it has been modified in place since.
        """
        layer = self.layer
        try:
            return outer.find()
        except SavedTensorModifiedError as error:
            self.proofs.refuse(layer, "reads what is changed in place before backward")
            raise SavedTensorModifiedError(
                f"layer {layer.index} ({layer.name}) is computed again in backward from a tensor "
                f"that was changed in place since its forward ({error}). Change it after backward, "
                f"clone it before the layer, or leave the layer out: name the others with "
                f"layers=[...]. From the next step on the layer is not recomputed"
            ) from error

    def _compute(self) -> None:
        self._values = {}
        self._unread = self.handles.copy()
        self.run(self._values.__setitem__)
        self._home = self._device.compute_stream()
        self._ready = self._home.record()

    def run(self, take: Take) -> None:
        """Run the operations again.

        Args:
            take: is given the saved storages, each when nothing will write it any more.

        Streams:
            The kernels are queued on the current stream.
        """
        values: dict[Any, Tensor] = {}  # by slot, and of the tensors from outside
        # A backward inside of the layer's forward asks before the forward has ended.
        operations = self._plan() if self.call is None else self.operations
        with as_in_forward(self._settings, self._device.torch_device.type, "cpu"):
            for operation in operations:
                for each in operation.outer:
                    if each not in values:
                        values[each] = self._read(each)
                for slot in operation.begins:
                    values[slot] = self._begin(slot)
                args = _decode(operation.args, values)
                kwargs = {name: _decode(each, values) for name, each in operation.kwargs.items()}
                if operation.numbers:
                    result = _run_with(operation.numbers, operation.function, args, kwargs)
                else:
                    result = operation.function(*args, **kwargs)
                if operation.makes:
                    results = _flat(result)
                    for place, slot, layout in operation.makes:
                        if _layout_of(results[place]) != layout:  # others read it as it was
                            self.proofs.raise_differs(self.layer)
                        values[slot] = results[place]
                    del results
                del args, kwargs, result
                for ended in operation.ends:
                    value = values.pop(ended)
                    if isinstance(ended, int) and ended in self.handles:
                        take(ended, value)

    def _begin(self, slot: int) -> Tensor:
        """Return the memory of a storage that no operation of the recording makes."""
        begin = self.begins[slot]
        if isinstance(begin, _FromOutside):
            return self._read(begin).clone()
        size_bytes, device = begin
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def _decode(value: Any, values: dict[Any, Tensor]) -> Any:
    """Return an argument with tensors in the places of what stands for them."""
    kind = type(value)
    if kind is _Part:
        return value.lay(values[value.slot])
    if kind is _FromOutside:
        return values[value]
    if kind is list or kind is tuple:
        return kind([_decode(each, values) for each in value])
    return value


def _run_with(numbers: Sequence[_Numbers], function: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with the random numbers that it had."""
    before = [read() for read, _, _ in numbers]
    try:
        for _, write, state in numbers:
            write(state)
        return function(*args, **kwargs)
    finally:
        for (_, write, _), state in zip(numbers, before, strict=True):
            write(state)


@final
class RecomputedTensor(AbstractProbed):
    """Stands for a tensor that was saved inside a recomputed layer.

    Args:
        recording: the operations of the layer.
        slot: number of the tensor's storage in it.
        tensor: the tensor that was saved.
        plain: what it was saved as after all, because the layer is not recomputed.
    """

    is_input = False
    __slots__ = ("plain", "recording", "sample", "slot")

    def __init__(self, recording: Recording, slot: int, tensor: Tensor) -> None:
        super().__init__(tensor, _version_of(tensor), recording.activations.empty)
        self.recording: Recording | None = recording
        self.slot = slot
        self.plain: Saved | None = None
        self.sample: Tensor | None = None

    def restore(self) -> Tensor:
        if self.is_modified():
            self._raise_modified()
        if self.plain is not None:
            return restore(self.plain)
        recording = self.recording
        assert recording is not None
        try:
            tensor = self._tensor_in(recording.find(self.slot).untyped_storage())
            sample, self.sample = self.sample, None
            if sample is not None:
                recording.proofs.compare(recording.layer, sample, _sample(tensor))
            return tensor
        except BaseException as error:
            recording.activations.transfers.note_error(error)
            raise

    def is_same(self, value: Tensor, tensor: Tensor) -> bool:
        """Whether a tensor in a storage that was computed again has the bits of the saved one."""
        storage = value.untyped_storage()
        if storage.nbytes() != tensor.untyped_storage().nbytes():
            return False
        return torch.equal(bits_of(self._tensor_in(storage)), bits_of(tensor))


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor whose elements are at the same places in memory.

    Kernels lay out their results as their arguments are. In what order they add up depends on the
    gaps between the elements, and on how the first one's address is aligned.
    """
    if 0 in tensor.shape:
        return tensor.clone()
    part, reach = _Part.of(tensor, 0), _reach(tensor)
    elements = torch.empty(0, dtype=part.dtype, device=tensor.device)
    elements.set_(tensor.untyped_storage(), part.offset, (reach,), (1,))
    lead = tensor.data_ptr() % _ALIGNED_BYTES // tensor.itemsize
    copied = elements.new_empty(lead + reach)
    copied[lead:] = elements
    return part._replace(offset=lead).lay(copied)


def _reach(tensor: Tensor) -> int:
    """Return the number of elements in memory from a tensor's first to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((n - 1) * step for n, step in steps)


def _sample(tensor: Tensor) -> Tensor | None:
    """Return a copy of elements spread over a tensor; None if it is too unusual."""
    size = tensor.numel()
    if not size or _reach(tensor) != size or tensor.is_conj() or tensor.is_neg():
        return None
    count = min(size, _SAMPLED)
    spread = tensor.detach().as_strided((count,), (size // count,), int(tensor.storage_offset()))
    return spread.clone()


# ---- Notes the operations of a layer's forward while it runs


@final
class Recorder(OwnMode):  # type: ignore[no-untyped-call]
    """Notes the operations that reach kernels, and packs what autograd saves of their results.

    Args:
        layer: the layer whose forward is about to begin.
        hooks: the hooks of its model.
        proofs: which operations of the model's layers are proven.
        is_planned: whether a plan has the layer recomputed, and not the policy.
    """

    # Long: what it does for each operation is in one place.

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler for this mode, and call it for each operation."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled runs as it would; its results come from outside, for a recording."""
        return True

    def __init__(
        self, layer: Layer, hooks: SavedTensorHooks, proofs: Proofs, *, is_planned: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_planned = is_planned
        self._layer, self._hooks, self._proofs = layer, hooks, proofs
        self._meter = hooks.activations.transfers.account.meter
        self._proven = proofs.of(layer)
        self._recording = Recording(hooks.activations, proofs, layer)
        self._slots: dict[int, int] = {}  # by the address of the storage
        self._identities: list[Any] = []  # keep the addresses from being used again
        self._blank: set[int] = set()
        self._loose: set[int] = set()
        self._known_outer: dict[Hashable, _FromOutside] = {}
        self._outer_addresses: set[int] = set()
        self._unproven: set[Hashable] = set()
        self._held: list[tuple[RecomputedTensor, Tensor]] = []
        self._sizes: dict[int, int] = {}  # of the saved storages
        self._reason = ""
        # What a mode of the program computes is compared each time: it may be another mode.
        self._verifies = has_dispatch_modes()

    def begin(self) -> None:
        """Note what the calling thread does from now on."""
        push_hooks(self.pack, restore)
        push_mode(self)

    def end(self, *, interrupted: bool = False) -> None:
        """Note no more of it. The layer's forward has returned, or an error has ended it.

        After an error, too, backward may come: programs leave a forward by an error of their own
        when they have the features that they want, and go on with these.

        Args:
            interrupted: whether it has ended without a word, as torch says nothing after Ctrl-C.
        """
        pop_mode(self)
        remove_hooks(self.pack)
        try:
            if not interrupted:
                self._finish()
        finally:
            self._let_go()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_written_down():  # such as a DTensor's shape, found once by fake tensors
            return func(*args, **kwargs)
        if types and any(map(_is_wrapper, types)):
            return NotImplemented  # the operations on what a tensor subclass consists of come here
        traits = _traits_of(func)
        compute_as_without_modes("" if traits is None else traits.called)
        if traits is None or traits.is_view:
            return func(*args, **kwargs)
        if traits.completes and address_of(args[0]) not in self._slots:
            return func(*args, **kwargs)  # a collective from before the layer, not to be repeated
        # A policy is that of all processes, which repeat a collective together. Each makes a plan
        # of its own: one that repeats a collective by itself exchanges other data than the rest.
        if traits.communicates and not self._reason and (self._is_planned or not traits.repeats):
            self._reason = "exchanges data with other processes"
        if traits.leaves_blank:
            blank = func(*args, **kwargs)
            self._note_blank(blank)
            return blank
        operation = _Operation(func, writes=self._note_writes(traits, args, kwargs))
        operation.args = [self._encode(each, operation) for each in args]
        operation.kwargs = {name: self._encode(each, operation) for name, each in kwargs.items()}
        if traits.draws:
            # Some schemas name the generator, and others, such as that of `poisson`, do not.
            arguments = (*args, *kwargs.values())
            operation.numbers = tuple(_numbers_of(self._hooks.device, arguments))
        result = func(*args, **kwargs)
        self._note_results(traits, operation, result)
        if operation.makes or traits.writes:
            self._recording.operations.append(operation)
            self._note_proof(func, args)
        return result

    # ---- what an operation reads, writes and makes --------------------------------------------

    def _note_writes(self, traits: _Traits, args: Any, kwargs: Any) -> tuple[int, ...]:
        """Note what an operation is about to write; return the slots."""
        slots = []
        for place in traits.writes:
            if isinstance(place, str):
                value = kwargs.get(place)
            else:
                value = args[place] if place < len(args) else None
            for tensor in _flat(value):
                if not isinstance(tensor, Tensor):
                    continue
                address = address_of(tensor)
                if not address:
                    self._reason = self._reason or "writes a tensor that is not plain"
                    continue
                slot = self._slots.get(address)
                if slot is None:
                    slot = self._take_in(tensor, address)
                self._blank.discard(slot)
                slots.append(slot)
        return tuple(slots)

    def _note_blank(self, tensor: Tensor) -> None:
        """Number memory that has no values until an operation writes it, or other code does."""
        if address_of(tensor):
            storage = tensor.untyped_storage()
            slot = self._number(storage)
            self._recording.begins[slot] = storage.nbytes(), tensor.device
            self._blank.add(slot)

    def _take_in(self, tensor: Tensor, address: int) -> int:
        """Number a storage from outside that the layer writes, and copy what was in it before.

        What an operation is given as `out=` may be a part of its storage, and one of its inputs.
        """
        storage = tensor.untyped_storage()
        slot = self._number(storage)
        before = bytes_of(storage, torch.empty(0, dtype=torch.uint8, device=tensor.device)).clone()
        outer = self._recording.outer
        for each in outer:
            if each.tensor is not None and address_of(each.tensor) == address:
                each.tensor = each.memory = _Part.of(each.tensor, slot).lay(before)
                each.version = each.tensor._version
        self._recording.begins[slot] = copied = _FromOutside(before, before, before._version)
        outer.append(copied)
        return slot

    def _number(self, storage: torch.UntypedStorage) -> int:
        slot = self._slots[int(storage._cdata)] = len(self._identities)
        # While the weak reference exists, no other storage gets the address of one that was freed.
        self._identities.append(identity_of(storage))
        return slot

    def _encode(self, value: Any, operation: _Operation) -> Any:
        """Return what stands for an argument in a recording."""
        if isinstance(value, Tensor):
            address = address_of(value)
            slot = self._find_slot(address)
            if slot is None:
                outer = self._note_outer(value, address)
                operation.outer += (outer,)
                return outer
            operation.reads.add(slot)
            return _Part.of(value, slot)
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self._encode(each, operation) for each in value])
        return value

    def _find_slot(self, address: int) -> int | None:
        """Return the slot of a storage; None if the layer has neither made nor written it."""
        slot = self._slots.get(address)
        if slot in self._blank:
            del self._slots[address]  # other code has filled it
            return None
        return slot

    def _note_outer(self, tensor: Tensor, address: int) -> _FromOutside:
        key: Hashable = id(tensor)
        if address:
            key = address, _version_of(tensor), _Part.of(tensor, 0)
            self._outer_addresses.add(address)
        outer = self._known_outer.get(key)
        if outer is None:
            outer = _FromOutside(tensor, tensor.detach(), _version_of(tensor))
            self._known_outer[key] = outer
            self._recording.outer.append(outer)
        return outer

    def _note_results(self, traits: _Traits, operation: _Operation, result: Any) -> None:
        results = _flat(result)
        made: list[tuple[int, int, Hashable]] = []
        for place, each in enumerate(results):
            if not isinstance(each, Tensor):
                continue
            address = address_of(each)
            if not address or address in self._slots or address in self._outer_addresses:
                continue  # a view of an argument, or that argument
            slot = self._number(each.untyped_storage())
            made.append((place, slot, _layout_of(each)))
        if traits.leaves_gaps:
            most = max((results[place].dim() for place, *_ in made), default=0)
            self._loose.update(slot for place, slot, _ in made if results[place].dim() < most)
        operation.makes = tuple(made)

    def _note_proof(self, function: Any, args: Any) -> None:
        # Nested tensors in the strided layout have no shape; what makes them never runs again.
        tensors = [each for each in args if isinstance(each, Tensor)]
        key = function, *[(None if t.is_nested else t.shape, t.dtype) for t in tensors]
        if key not in self._proven:
            self._unproven.add(key)
            self._verifies = True

    # ---- what autograd saves ------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Saved:
        """Pack a tensor that autograd saves inside the layer. This is the pack hook."""
        hooks = self._hooks
        if type(tensor) in hooks.plain_types:
            # What the layer computes on another device stays there, as in any layer.
            is_here = tensor.device == hooks.device
            slot = self._find_slot(address_of(tensor)) if is_here else None
            if slot is not None and not self._is_written_weight(tensor, slot):
                return self._pack_recorded(tensor, slot)
        elif hooks.consists_of_others(tensor):
            return CompositeTensor(tensor, self.pack)
        elif is_plain_subclass(tensor, hooks.plain_types):
            with without_function_subclasses():
                return self.pack(tensor.as_subclass(Tensor))
        with aside():
            return hooks.pack(tensor)

    def _is_written_weight(self, tensor: Tensor, slot: int) -> bool:
        """Whether a tensor is a weight that the layer has written; it is saved like any weight."""
        whole = tensor if tensor._base is None else tensor._base
        return slot in self._recording.begins and self._hooks.is_weight(whole)

    def _pack_recorded(self, tensor: Tensor, slot: int) -> Saved:
        with aside():
            handle = RecomputedTensor(self._recording, slot, tensor)
            # What no operation of the graph has made may be written by the operator that saves it.
            if tensor.grad_fn is not None and slot not in self._loose:
                handle.sample = _sample(tensor)
        self._meter.num_saved += 1
        self._meter.saved_bytes += tensor.nbytes
        self._recording.handles[slot] += 1
        self._sizes[slot] = tensor.untyped_storage().nbytes()
        if self._verifies:
            self._held.append((handle, tensor))
        return handle

    # ---- when the forward has ended -----------------------------------------------------------

    def _finish(self) -> None:
        recording, layer = self._recording, self._layer
        if not recording.handles:
            return
        if self._verifies:
            self._meter.num_verifying += 1
        recording.end()
        for each in recording.outer:
            self._copy_outer(each)  # before what is computed from it is compared
        reason = self._reason
        if not reason and self._verifies:
            reason = self._verify()
        if reason:
            self._save_plainly()
            if reason is not _NO_MEMORY:
                self._proofs.refuse(layer, reason)
        else:
            self._proven |= self._unproven
        if not recording.handles:
            return
        for each in recording.outer:
            if each.tensor is not None:
                each.saved = each.saved or self._save_outer(each)
                each.tensor = each.memory = None
        size_bytes = sum(self._sizes[slot] for slot in recording.handles)
        num_saved = sum(recording.handles.values())
        recording.call = RecomputedLayer(layer, self._hooks.log, size_bytes, num_saved)
        self._hooks.activations.add_recomputed(recording, recording.call)

    def _copy_outer(self, each: _FromOutside) -> None:
        """Copy a tensor from outside that may change before backward without an error."""
        tensor, memory = each.tensor, each.memory
        if tensor is None or memory is None or not address_of(tensor):
            return
        # The program may change a bias before backward, which autograd would not notice.
        if _reach(memory) * memory.itemsize <= COPIED_BYTES and self._hooks.is_weight(tensor):
            copied = _copy(memory)
            each.saved = copied, copied._version, None
        elif memory.is_inference():  # no version would tell of changes, and autograd saves none
            each.memory = _copy(memory)

    def _save_outer(self, each: _FromOutside) -> Saved:
        tensor, memory = each.tensor, each.memory
        assert tensor is not None and memory is not None
        if not address_of(tensor):
            return self._hooks.pack(tensor)
        if address_of(tensor) != address_of(memory):
            return self._hooks.pack(memory)
        if _version_of(tensor) != each.version:  # unseen, so that backward must raise an error
            return tensor.detach(), each.version, None
        return self._hooks.hold_weight(tensor) or self._hooks.pack(tensor)

    def _verify(self) -> str:
        """Run the operations again and compare. Returns why they must not; "" if they may."""
        held: dict[int, list[tuple[RecomputedTensor, Tensor]]] = {}
        for handle, tensor in self._held:
            held.setdefault(handle.slot, []).append((handle, tensor))
        differs = False

        def compare(slot: int, value: Tensor) -> None:
            nonlocal differs
            if not differs and slot not in self._loose:
                differs = not all(each.is_same(value, saved) for each, saved in held.get(slot, ()))

        try:
            with _alone:
                self._recording.run(compare)
        except torch.OutOfMemoryError:
            return _NO_MEMORY
        except Exception as error:  # whatever it raises, the gradients of this step are right
            return f"raises {type(error).__name__} when it runs again"
        return _DIFFERS if differs else ""

    def _save_plainly(self) -> None:
        """Save what is held as if the layer were not recomputed."""
        recording = self._recording
        self._hooks.offload_here()
        for handle, tensor in self._held:
            handle.plain, handle.recording = self._hooks.pack(tensor), None
            recording.handles[handle.slot] -= 1
        recording.handles = +recording.handles
        recording.end()

    def _let_go(self) -> None:
        """Let go of tensors: they refer to the graph that owns the recording."""
        for each in self._recording.outer:
            each.tensor = each.memory = None
        self._held.clear()
        identities, self._identities = self._identities, []
        for identity in identities:
            release_identity(identity)
        self._slots.clear()


COPIED_BYTES: Final = 64 * 2**10
_ALIGNED_BYTES: Final = 256  # kernels ask for no more
COMPILED: Final = "is compiled, so that no operations of it can run again by themselves"
_DIFFERS: Final = "gives other values when it runs again"
_SAMPLED: Final = 256
_NO_MEMORY: Final = "needs more memory than there is"


# Autograd and torch call these while a compiled region runs, and the compiler would trace them.
skip_in_compiler(Recorder.pack)
skip_in_compiler(Recorder.__torch_dispatch__)
