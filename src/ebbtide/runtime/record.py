"""Records, which say where one piece of memory is, and the order in which a backward reads them.

Before the records come the recipes, which compute the output of an operation again from inputs that
autograd saves anyway, and the access order, which is learned in one step to predict the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any, ClassVar, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from ebbtide.devices.device import AbstractEvent, AbstractStream, Layer
from ebbtide.errors import PolicyError
from ebbtide.policy import refuse
from ebbtide.runtime.torch_internals import KERNEL_SETTINGS, outside_modes
from ebbtide.stores.store import Slot

KernelSettings = tuple[Any, ...] | None
"""What kernels depend on beside their arguments, such as the number of threads. None on an
accelerator, whose cheap kernels depend on no setting.

A kernel on a CPU gives each thread a part of a tensor. It computes the end of a part, which does
not fill a vector register, by other code than the rest: the last bit of a tanh or an exp may differ
between the two. So these bits depend on the number of threads.
"""

Constants = Mapping[str, Any]
Rebuild = Callable[[Sequence[Tensor], Constants, torch.dtype], Tensor]


@final
@dataclass(frozen=True)
class RebuildRecipe:
    """Recognises one operation in autograd's graph and runs it again.

    A recipe must run the kernel that the forward ran, on the same input, so that its output is the
    same to the bit. Its first output for each shape and type is compared with the original; if they
    differ, the recipe is not used for that shape and type again.

    Args:
        node: the name of the operation's backward node, ``tensor.grad_fn.name()``.
        inputs: names of the operation's tensor arguments, in the order of the node's
            ``next_functions``. An input can be used if the node saved it (``_saved_<name>``) or if
            it is the result that the operation before saved (``_saved_result``); if one is missing,
            the output is not rebuilt.
        rebuild: computes the output, called with the inputs, the constants and the type of the
            output while autograd and autocast are off. It must not change its inputs.
        constants: names of other values that the node saved, such as ``approximate``.

    Raises:
        PolicyError: ``node`` or ``inputs`` is empty.
    """

    node: str
    inputs: tuple[str, ...]
    rebuild: Rebuild
    constants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.node or not self.inputs:
            raise PolicyError(
                "a RebuildRecipe needs the name of a backward node and of at least one input, "
                'such as RebuildRecipe("SinBackward0", ("self",), rebuild)'
            )


def kernel_settings() -> tuple[Any, ...]:
    """Return the settings that kernels depend on now, on the calling thread."""
    return tuple([read() for read, _ in KERNEL_SETTINGS])


@contextlib.contextmanager
def as_in_forward(settings: KernelSettings, *kinds: str) -> Iterator[None]:
    """Have operations of a forward run again in the block: alike, and seen by nothing.

    Args:
        settings: what kernels depended on in forward.
        kinds: types of devices on which autocast is off, because what was noted has been cast.
    """
    with contextlib.ExitStack() as stack, outside_modes(), torch.no_grad():
        for kind in filter(torch.is_autocast_enabled, kinds):
            # Not by `torch.autocast`: where it ends, in autograd's thread, the casts that torch has
            # cached for the program's own block would be forgotten.
            torch.set_autocast_enabled(kind, False)
            stack.callback(torch.set_autocast_enabled, kind, True)
        present = kernel_settings()
        if settings is not None and settings != present:
            stack.callback(_put_in_force, present)
            _put_in_force(settings)
        yield


def _put_in_force(settings: Sequence[Any]) -> None:
    for (read, write), value in zip(KERNEL_SETTINGS, settings, strict=True):
        if value != read():
            write(value)


MOST_STEPS: Final = 4
"""Length of the longest chain of rebuilds, each of which waits for the one before."""

RECIPES: dict[str, RebuildRecipe] = {}
"""The registered recipes, by the name of the backward node."""


def register_rebuild(recipe: RebuildRecipe) -> None:
    """Register a recipe, so that outputs of its operation are rebuilt, not kept or offloaded.

    It applies to every model offloaded with ``ActivationPolicy(rebuild=True)``, from the next
    forward on. It replaces an earlier recipe for the same node.
    """
    if not isinstance(recipe, RebuildRecipe):
        refuse("recipe", "an ebbtide.RebuildRecipe", recipe)
    RECIPES[recipe.node] = recipe


def _register(
    node: str, function: Callable[..., Tensor], *constants: str, inputs: tuple[str, ...] = ("self",)
) -> None:
    """Register a function of tensors whose other arguments are named as the node's constants."""

    def rebuild(inputs: Sequence[Tensor], saved: Constants, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
        return function(*inputs, **saved)

    register_rebuild(RebuildRecipe(node, inputs, rebuild, constants))


def _cast(inputs: Sequence[Tensor], saved: Constants, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return inputs[0].to(dtype)


def _clone(x: Tensor) -> Tensor:
    # `clone` is mostly called to get a contiguous copy. If the original is not contiguous, the
    # check of the recipe's first output notices the difference.
    return x.clone(memory_format=torch.contiguous_format)


def _elu(x: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    return torch.ops.aten.elu(x, alpha, scale, input_scale)  # type: ignore[no-any-return]


_TWO = "self", "other"

_register("GeluBackward0", F.gelu, "approximate")
_register("SiluBackward0", F.silu)
_register("MishBackward0", F.mish)
_register("HardswishBackward0", F.hardswish)
_register("SoftplusBackward0", F.softplus, "beta", "threshold")
_register("LeakyReluBackward0", F.leaky_relu, "negative_slope")
_register("EluBackward0", _elu, "alpha", "scale", "input_scale")
_register("SinBackward0", torch.sin)
_register("CosBackward0", torch.cos)
# The next four operations save their own result, so an output that they saved has a record already.
# Their recipes serve saved views and copies of the result.
_register("ReluBackward0", torch.relu)
_register("TanhBackward0", torch.tanh)
_register("SigmoidBackward0", torch.sigmoid)
_register("ExpBackward0", torch.exp)
_register("NegBackward0", torch.neg)
_register("PowBackward0", torch.pow, "exponent")
_register("MulBackward0", torch.mul, inputs=_TWO)
_register("AddBackward0", torch.add, "alpha", inputs=_TWO)
_register("SubBackward0", torch.sub, "alpha", inputs=_TWO)
register_rebuild(RebuildRecipe("ToCopyBackward0", ("self",), _cast))
_register("CloneBackward0", _clone)


# ---- The order in which items are used, learned in one step to predict the next one ----

MOST_USES = 100_000


@final
class AccessOrder:
    """A sequence of uses of numbered items.

    Args:
        items: the numbers of the items, in the order of use; an item used twice is listed twice.
        num_items: number of different items.
    """

    def __init__(self, items: Sequence[int], num_items: int) -> None:
        self.items = items
        self.num_items = num_items
        self._places: list[list[int]] = [[] for _ in range(num_items)]
        for place, item in enumerate(items):
            self._places[item].append(place)

    def __len__(self) -> int:
        return len(self.items)

    def next_use(self, item: int, begin: int) -> int:
        """Return the first place from ``begin`` on that uses the item; the length if none does."""
        if item < self.num_items:
            for place in self._places[item]:
                if place >= begin:
                    return place
        return len(self.items)


class AccessLog:
    """Records the uses of items while following an expected order.

    Args:
        expected: the expected order; None if there is none yet.

    Attributes:
        expected: as given; it may be set later.
        place: place in the expected order of the next use.
        uses: the items used so far, in order; at most `MOST_USES`.
        last: the item that was used last; -1 if none was.
    """

    def __init__(self, expected: AccessOrder | None = None) -> None:
        self.expected = expected
        self.place = 0
        self.uses: list[int] = []
        self.last = -1

    def use(self, item: int, *, from_start: bool = False) -> None:
        """Record a use, and move `place` past the next expected use of the item.

        A repeat of the last use is not recorded. Uses beyond a large number are not recorded
        either: a graph that is retained can have any number of backwards. If no use of the item is
        expected, `place` stays where it is.

        Args:
            item: the item that is used now.
            from_start: whether to search from the start of the order again if no use lies ahead.
        """
        if item == self.last:
            return
        self.last = item
        if len(self.uses) < MOST_USES:
            self.uses.append(item)
        if self.expected is None:
            return
        items = self.expected.items
        end = len(items)
        if self.place < end and items[self.place] == item:  # the item is the expected one
            self.place += 1
            return
        place = self.expected.next_use(item, self.place)
        if place == end and from_start:
            place = self.expected.next_use(item, 0)
        if place < end:
            self.place = place + 1

    def learned(self, num_items: int) -> AccessOrder | None:
        """Return the order of the recorded uses; None if nothing was used.

        Args:
            num_items: number of different items now.
        """
        if not self.uses:
            return None
        known = self.expected
        if known is not None and known.num_items == num_items and known.items == self.uses:
            return known
        return AccessOrder(self.uses, num_items)


# ---- Records: each says where one piece of memory is, on the device, in a lower tier, or in flight
#
# There is a record for everything that is copied: a storage that autograd saved, the weights of a
# layer, a gradient. A storage that is kept or rebuilt has one too, so that the records tell all
# of the memory. The table below defines the states completely; tests/simulation checks every record
# against it. Its second column names the device memory that the record itself
# keeps alive.
#
# | state       | on the device                  | in the store | why
# | ----------- | ------------------------------ | ------------ | ----------------------------------
# | KEPT        | the saved tensors' own memory  | nothing      | it was decided to keep it
# | PENDING     | the source                     | nothing yet  | a schedule will start its copy
# | RETAINED    | the source                     | copy started | a schedule will release the source
# | OFFLOADING  | the source until the copy ends | copy started | it is being offloaded
# | STUCK       | the source                     | not readable | its copy to the store failed
# | STORED      | nothing                        | the bytes    | its copy to the store is complete
# | RELOADED    | a buffer, maybe being filled   | the bytes    | backward reads it, or soon will
# | REBUILDABLE | nothing                        | nothing      | a recipe can compute it again
# | REBUILT     | a buffer                       | nothing      | the recipe was run
# | DROPPED     | nothing, once its copy ended   | nothing      | nothing can read it any more


class State(IntEnum):
    """Where the bytes of a record are."""

    KEPT = auto()
    PENDING = auto()
    RETAINED = auto()
    OFFLOADING = auto()
    STUCK = auto()
    STORED = auto()
    RELOADED = auto()
    REBUILDABLE = auto()
    REBUILT = auto()
    DROPPED = auto()


# A global of this module is looked up faster than a member of the enum.
(
    KEPT,
    PENDING,
    RETAINED,
    OFFLOADING,
    STUCK,
    STORED,
    RELOADED,
    REBUILDABLE,
    REBUILT,
    DROPPED,
) = State

ACTIVATION, WEIGHT, GRADIENT = "activations", "weights", "gradients"
"""The kinds of bytes that a record can hold, as traces and reports name them."""

TRANSITIONS = {
    KEPT: {DROPPED},
    PENDING: {RETAINED, OFFLOADING, DROPPED},
    RETAINED: {OFFLOADING, STORED, STUCK, DROPPED},
    OFFLOADING: {STORED, STUCK, DROPPED},
    STUCK: {DROPPED},
    STORED: {RELOADED, DROPPED},
    RELOADED: {STORED, DROPPED},
    REBUILDABLE: {REBUILT, DROPPED},
    REBUILT: {REBUILDABLE, DROPPED},
    DROPPED: set[State](),
}
"""The states that may follow each state."""


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """Where one piece of memory is; the table above `State` defines the states.

    Args:
        layer: the layer that it belongs to; None outside layers.
        microbatch: number of the forward, within its step, that it belongs to.
        size_bytes: number of bytes in each copy of it.
        state: its first state.

    Attributes:
        kind: `ACTIVATION`, `WEIGHT` or `GRADIENT`.
        layer: as given.
        microbatch: as given.
        size_bytes: as given.
        state: the present state; `move_to` changes it.
        home: the compute stream that owns the memory of `source`, later of `buffer`.
        source: the device bytes until the copy to the store is complete, (size_bytes,) uint8.
        slot: the bytes' place in the store.
        offloaded: event of the completion of the copy to the store.
        buffer: the device bytes after a reload or a rebuild, (size_bytes,) uint8.
        ready: event after which `buffer` holds the bytes.
        awaited: whether the compute stream waits for `ready`, so that `buffer` can be freed in that
            stream's order.
        handles: number of live saved tensors that share the bytes.
        unread: number of reads of the present buffer that are still to come: one for each handle.
            If one handle reads twice, another one has the bytes brought back again.
        buffer_stays: whether the buffer stays until the graph is freed, because a schedule reloaded
            it, or because a graph that a backward made (``create_graph=True``) holds it anyway.
        copies: pairs of ``"offload"`` or ``"reload"`` and the event of that copy's completion;
            empty unless steps are traced.
    """

    layer: Layer | None
    microbatch: int
    size_bytes: int
    state: State
    source: torch.Tensor | None = field(default=None, init=False)
    slot: Slot | None = field(default=None, init=False)
    offloaded: AbstractEvent | None = field(default=None, init=False)
    buffer: torch.Tensor | None = field(default=None, init=False)
    ready: AbstractEvent | None = field(default=None, init=False)
    home: AbstractStream = field(init=False)
    awaited: bool = field(default=False, init=False)
    buffer_stays: bool = field(default=False, init=False)
    handles: int = field(default=0, init=False)
    unread: int = field(default=0, init=False)
    copies: tuple[tuple[str, AbstractEvent], ...] = field(default=(), init=False)
    kind: ClassVar[str] = ACTIVATION

    @property
    def source_address(self) -> int | None:
        """Address of the storage that the program knows as the source; None for a copy of it."""
        return None

    def find_storage(self) -> torch.UntypedStorage | None:
        """Return the storage that the program knows as the source, if it still exists."""
        return None

    def move_to(self, state: State) -> None:
        """Change the state.

        Raises:
            AssertionError: ``state`` cannot follow the present state; this is a bug in ebbtide.
        """
        assert state in TRANSITIONS[self.state], f"{self.state.name} -> {state.name}"
        self.state = state

    def is_copied(self) -> bool:
        """Whether the copy to the store is complete. It must have been queued."""
        assert self.offloaded is not None
        return self.offloaded.query()

    def release_source(self) -> None:
        """Free the source, whose bytes are in the store or can no longer be read by anything."""
        self.source = self.offloaded = None
        if self.state is not DROPPED:
            self.move_to(STORED)
            self.note_stored()

    def take_buffer(
        self, buffer: torch.Tensor, ready: AbstractEvent, home: AbstractStream, state: State
    ) -> None:
        """Take the device buffer that a reload or a rebuild fills."""
        self.move_to(state)
        self.buffer, self.ready, self.home, self.awaited = buffer, ready, home, False
        self.unread = self.handles

    def release_buffer(self, state: State) -> None:
        """Free the buffer. The bytes can be reloaded or rebuilt again."""
        self.move_to(state)
        self.buffer = self.ready = None
        self.buffer_stays = False
        self.unread = 0
        if state is STORED:
            self.note_stored()

    def note_stored(self) -> None:
        """Called when the bytes are only in the store, so that they may have to be reloaded."""

    def is_read(self) -> bool:
        """Whether every handle has read the buffer, and no schedule keeps it."""
        return not self.unread and self.buffer is not None and not self.buffer_stays

    def can_go(self) -> bool:
        """Whether the buffer may be freed to make room: one handle at least has read it.

        The handles that have not read the buffer have the bytes reloaded again.
        """
        return self.unread < self.handles and self.state is RELOADED and not self.buffer_stays

    def precedes(self, other: Record) -> bool:  # noqa: ARG002
        """Whether backward is expected to read this record before another one."""
        return False


# ---- The records that one forward saved, and the expected order of their use in backward ----


@final
class ForwardLog(AccessLog):
    """The offloaded records of one forward, and the order in which backward should read them.

    The expected order is that of the previous backward if it used as many records, else the reverse
    of the order of saves. Both list a record once per use, so a tensor that two distant layers
    saved is reloaded twice. A wrong expectation costs time but never loses bytes: a record that is
    read earlier than expected is reloaded then.

    A position in the order moves forward past records that are done, so finding the next record
    does not search from the start.

    Args:
        learned: the order of the previous backward, or None.
        number: number of the forward in its step, from 0.
        plan: what the forward follows; an order is of use for another forward of that plan.

    Attributes:
        number: as given.
        plan: as given.
        prefetches: whether backward prefetches the records that are expected next. It does not
            while a schedule starts the reloads.
        records: the records by ordinal; None in place of a dropped record.
        live: number of records that are not dropped.
        in_backward: whether backward has begun, so that the expected order is set.
        task: id of autograd's graph task that last read one of the forward's saved tensors.
        settings: what the kernels of the forward depended on when it saved tensors, such as the
            number of threads; None before, and on an accelerator.
        is_mixed: whether they have depended on different settings, or run under a dispatch mode.
    """

    def __init__(self, learned: AccessOrder | None, number: int = 0, plan: object = None) -> None:
        super().__init__()
        self.number, self.plan = number, plan
        self.prefetches = True
        self.records: list[Record | None] = []
        self.live = 0
        self.in_backward = False
        self.task = -1
        self.settings: KernelSettings = None
        self.is_mixed = False
        self._learned = learned
        self._saves: list[int] = []
        self._reloaded = 0  # records before this place: reloaded, or still on the device

    def note_settings(self, settings: KernelSettings) -> None:
        """Note what the kernels depend on now."""
        if settings != self.settings:
            self.is_mixed = self.settings is not None
            self.settings = settings

    def add(self, record: Record) -> int:
        """Add a record that autograd has just saved. Returns its ordinal."""
        ordinal = len(self.records)
        self.records.append(record)
        self._saves.append(ordinal)
        self.live += 1
        return ordinal

    def remove(self, ordinal: int) -> None:
        """Remove a record that nothing can read any more."""
        self.records[ordinal] = None
        self.live -= 1

    def note_save(self, ordinal: int) -> None:
        """Note that autograd saved another tensor that shares this record."""
        if not self._saves or self._saves[-1] != ordinal:
            self._saves.append(ordinal)

    def note_backward(self) -> None:
        """Note that backward has begun. Nothing more is saved, so the expected order is now set."""
        if self.expected is None:
            order, count = self._learned, len(self.records)
            if order is None or order.num_items != count:
                order = AccessOrder(self._saves[::-1], count)
            self.expected = order
            self._saves = []
        self.in_backward = True

    def note_unpack(self, ordinal: int) -> None:
        """Note that backward reads a record, and move on in the expected order."""
        if not self.in_backward:
            self.note_backward()
        self.use(ordinal)  # after an unexpected use, the place stays where it is

    def note_stored(self, ordinal: int) -> None:
        """Note that a record's bytes are only in the store, so it may have to be reloaded."""
        if self.expected is not None:
            place = self.expected.next_use(ordinal, self.place)
            if place < self._reloaded:
                self._reloaded = place

    def expects_before(self, one: int, other: int) -> bool:
        """Whether the next use of one record is expected before that of another.

        Before backward has begun, no use is.
        """
        order, place = self.expected, self.place
        return order is not None and order.next_use(one, place) < order.next_use(other, place)

    def next_reload(self) -> Record | None:
        """Return the live record expected soonest in backward and not yet reloaded, if any."""
        if self.expected is None:
            return None
        ordinals = self.expected.items
        place = self._reloaded if self._reloaded > self.place else self.place
        while place < len(ordinals):
            record = self.records[ordinals[place]]
            if record is not None:
                break
            place += 1
        else:
            record = None
        self._reloaded = place
        return record

    def pass_reload(self) -> None:
        """Move past the record that `next_reload` returned."""
        self._reloaded += 1
