"""Verifies that a layer's forward gives the same bits again before it is recomputed.

[Note: verified recomputation] The first time that a call of a kind is to be recomputed, it is not.
Its forward runs as if it were not chosen, and what it saves is offloaded, so the gradients of this
step are right whatever happens. When backward reaches the layer, and nothing has changed that a
second forward would need, the forward runs again exactly as a recomputation would. Digests of what
the two forwards save are compared. A layer that differs is never recomputed: what it saves is
offloaded from then on, and one warning names it.

Digests stay on the device, and the host reads them when the next forward begins, so that it waits
for nothing in the step.
"""

from __future__ import annotations

import functools
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from ebbtide.devices.device import AbstractDevice, AbstractEvent, Layer
from ebbtide.errors import SavedTensorModifiedError, warn_user
from ebbtide.runtime.torch_internals import parts_of, sequence_number, tree_leaves
from ebbtide.units import few

_ROW: Final = 2**9  # words in a row, and rows in a piece, which is digested at once
_MOST_KINDS: Final = 4096  # a program that has more is verified again
_SAMPLED: Final = 1024  # elements that later recomputations compare
_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

Digest = Tensor | None
"""A 0-dim int64 tensor on the device of what was digested; None for what has no memory."""


class Verified(NamedTuple):
    """What is known of a kind of call whose forward gives the same bits again.

    Attributes:
        sampled: number of a saved tensor that each recomputation compares a sample of; -1: none.
        unfilled: numbers of the saved tensors that are not compared; see `find_unfilled`.
    """

    sampled: int
    unfilled: frozenset[int] = frozenset()


def digest(tensor: Tensor) -> Digest:
    """Return a digest of the bits of a tensor. No host waits for it."""
    # Not under `no_grad`: an interrupt as it ends would leave the program without gradients.
    found = [_digest_part(part.detach()) for part in parts_of(tensor)]
    parts = [each for each in found if each is not None]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum() if parts else None


def _digest_part(part: Tensor) -> Digest:
    try:
        if part.layout is not torch.strided or part.is_meta or not part.numel():
            return None
        words = _words_of(part)
    except (RuntimeError, NotImplementedError):  # it has no memory of its own
        return None
    columns, rows = _factors(part.device)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for piece in torch.split(words, _ROW * _ROW):
        whole = len(piece) // _ROW
        sums = (piece[: whole * _ROW].view(whole, _ROW) * columns).sum(1)
        rest = piece[whole * _ROW :]
        total = total * 1_000_003 + (sums * rows[:whole]).sum()
        if len(rest):
            total = total * 1_000_003 + (rest * columns[: len(rest)]).sum()
    return total


def _words_of(part: Tensor) -> Tensor:
    """Return the bits of a tensor as whole numbers, in the order of its memory."""
    part = part.resolve_conj().resolve_neg()
    order = sorted(range(part.dim()), key=part.stride, reverse=True)
    flat = part.permute(order).contiguous().view(-1)
    offset_bytes = flat.storage_offset() * flat.itemsize
    for size_bytes, dtype in _WORDS:
        if not flat.nbytes % size_bytes and not offset_bytes % size_bytes:
            return flat.view(torch.uint8).view(dtype)
    raise AssertionError("every size is a number of bytes")


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return odd numbers, by which words are multiplied so that their order counts.

    Shape:
        Two tensors, (512,) int64: for the columns of a piece, and for its rows.
    """
    chance = torch.Generator().manual_seed(1)
    limit = torch.iinfo(torch.int64)
    drawn = torch.randint(limit.min, limit.max, (2, _ROW), generator=chance, dtype=torch.int64)
    columns, rows = (drawn | 1).to(device)
    return columns, rows


def find_differences(first: Sequence[Digest], second: Sequence[Digest]) -> Callable[[], list[int]]:
    """Compare digests on the device; the host does not wait.

    Returns:
        What gives the numbers of those that differ.
    """
    pairs = [
        (number, one, other)
        for number, (one, other) in enumerate(zip(first, second, strict=True))
        if one is not None and other is not None
    ]
    if not pairs:
        return list
    device = pairs[0][1].device
    left = torch.stack([one.to(device) for _, one, _ in pairs])
    right = torch.stack([other.to(device) for _, _, other in pairs])
    flags, where = left != right, [number for number, _, _ in pairs]
    return lambda: [*itertools.compress(where, flags.tolist())]


class SavedInOrder(ABC):
    """Takes the tensors that a forward saves, in their order, each when it is filled.

    An operator may fill a tensor after it has saved it; see [Note: tensors saved before they are
    written] in `ebbtide.runtime.activations`. So from a tensor without `grad_fn` on, all that the
    same operator saves is taken when it has returned, which is when the next one begins.
    """

    def __init__(self) -> None:
        self._num_saved = 0
        self._waiting: list[tuple[int, Tensor]] = []
        self._operation = -1

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a tensor that is saved now; a pack hook."""
        place, self._num_saved = self._num_saved, self._num_saved + 1
        if self._waiting and sequence_number() != self._operation:
            self.finish()
        if not self._waiting and tensor.grad_fn is not None:
            self._take(place, tensor)
        else:
            self._operation = sequence_number()
            # Without its graph, which holds this: a forward that raises leaves tensors waiting.
            plain = tensor if tensor.grad_fn is None else tensor.detach()
            self._waiting.append((place, plain))
        return tensor.detach()

    def finish(self) -> None:
        """Take what waits. The operator that saved it has returned."""
        waiting, self._waiting = self._waiting, []
        for place, tensor in waiting:
            self._take(place, tensor)

    @abstractmethod
    def check(self) -> None:
        """Check that the forward, which ends, has changed nothing that it has saved."""

    @abstractmethod
    def _take(self, place: int, tensor: Tensor) -> None:
        """Take a tensor, which is the one of this number."""


@final
class SavedDigests(SavedInOrder):
    """Digests of the tensors that a forward saves, in their order.

    Attributes:
        forms: shapes, strides, types and devices of the tensors.
        digests: their digests.
        candidates: numbers of those that a sample may be taken of.
        unfilled: numbers of the saved tensors that are not compared; see `find_unfilled`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[tuple[Any, ...]] = []
        self.digests: list[Digest] = []
        self.candidates: list[int] = []
        self.unfilled: frozenset[int] = frozenset()
        self._operations: list[int] = []

    def note(self, tensor: Tensor, *, is_weight: bool = False) -> Tensor:
        """Note a tensor that is saved now.

        Args:
            tensor: the tensor.
            is_weight: whether it is a parameter, of which no sample is taken.
        """
        strided = tensor.layout is torch.strided
        stride = tensor.stride() if strided and not tensor.is_nested else None
        self.forms.append((tensor.shape, stride, tensor.dtype, tensor.device))
        self._operations.append(sequence_number())
        # A sample is taken when the tensor is saved, so nobody may write it after that.
        if tensor.grad_fn is not None and not is_weight and sample(tensor) is not None:
            self.candidates.append(len(self.digests))
        self.digests.append(None)
        return self.pack(tensor)

    def _take(self, place: int, tensor: Tensor) -> None:
        self.digests[place] = digest(tensor)

    def check(self) -> None:
        """Check nothing: the digests are those of what was saved."""

    def find_unfilled(self, result: object) -> None:
        """Find what an attention saves beside its inputs and its output.

        Without dropout its kernels leave the seed and the offset of the random numbers unfilled,
        and one of them pads the sums of its softmax. They follow from what is compared: the inputs,
        the output, and the random numbers at the begin of the forward.

        Args:
            result: what the forward has returned, with its graph.
        """
        # torch numbers a node before the node saves its first tensor.
        attentions = {node._sequence_nr() + 1 for node in _attentions(result)}
        dims = [len(shape) for shape, *_ in self.forms]
        for operation in attentions:
            numbers = [n for n, each in enumerate(self._operations) if each == operation]
            most = max((dims[n] for n in numbers), default=0)
            self.unfilled |= {n for n in numbers if dims[n] < most}


_ATTENTION: Final = re.compile(r"(ScaledDotProduct|Flash|Efficient|Cudnn|Fused)(Att|Fused)|_fMHA")


def _attentions(result: object) -> Iterator[Any]:
    """Return the nodes of attentions: of torch, flash-attn, Transformer Engine and xFormers."""
    tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
    left = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    known: set[Any] = set(left)
    while left:
        node: Any = left.pop()
        if _ATTENTION.search(node.name()):
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                left.append(following)


def sample(tensor: Tensor) -> Tensor | None:
    """Return a copy of elements spread over a tensor; None if it is too unusual."""
    size = tensor.numel()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not size:
        return None
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    count = min(size, _SAMPLED)
    spread = tensor.detach().as_strided((count,), (size // count,), int(tensor.storage_offset()))
    return spread.clone()


def differ(one: Tensor, other: Tensor) -> Tensor | bool:
    """Whether two samples differ in a bit; on an accelerator as a 0-dim tensor."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return True
    bits = one.view(torch.uint8), other.view(torch.uint8)
    if one.device.type == "cpu":
        return not torch.equal(*bits)
    return (bits[0] != bits[1]).any()


@final
class Verifications:
    """Which layers of a model give the same bits when their forward runs again.

    Attributes:
        refused: names of the layers that do not, each with the reason.
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._verified: dict[Hashable, Verified] = {}
        self._changed: dict[str, tuple[Layer, str]] = {}  # in this step
        self._changed_before: set[str] = set()
        self._pending: list[tuple[Layer, Hashable, Callable[[], Verified | str]]] = []
        self._samples: list[tuple[Layer, Tensor]] = []
        self._on_way: list[tuple[list[Layer], Tensor, AbstractEvent]] = []
        self._unsaid: list[str] = []

    def forget(self) -> None:
        """Verify every kind of call again when it is to be recomputed next."""
        self.settle()
        self._verified.clear()

    def find(self, kind: Hashable) -> Verified | None:
        """Return what is known of a kind of call; None if it was not verified yet."""
        return self._verified.get(kind)

    def refuse(self, layer: Layer, reason: str) -> None:
        """Never recompute a layer again.

        Args:
            layer: the layer.
            reason: what it does, such as "changes its input in place".
        """
        if layer.name not in self.refused:
            self.refused[layer.name] = reason
            self._unsaid.append(layer.name)

    def note_change(self, layer: Layer, change: str) -> None:
        """Note that a layer could not be verified; it is refused if the next step says the same.

        A first forward may fill what later ones find, such as a table of positions.

        Args:
            layer: the layer.
            change: what has changed that its second forward would need.
        """
        self._changed[layer.name] = layer, change

    def raise_changed(
        self, layer: Layer, change: str, cause: BaseException | None = None
    ) -> NoReturn:
        """Raise the error for a layer that cannot run again, which it could when it was verified.

        The layer is refused, and all others are verified again, so that they do not end a step
        each.

        Args:
            layer: the layer.
            change: what has changed; "" if its second forward has given other values.
            cause: the error that told of it.

        Raises:
            SavedTensorModifiedError: always.
        """
        self._verified.clear()
        reason = f"changes, or finds changed before backward, {change}"
        self.refuse(layer, reason if change else "gives other values when it runs again")
        what = change or "something outside of it, such as a global, a counter or an iterator,"
        raise SavedTensorModifiedError(
            f"layer {layer.index} ({layer.name}) runs its forward again in backward, and has found "
            f"{what} changed (in place, or given other memory as by `parameter.data = ...`) since "
            f"its forward began, so its gradients would be wrong. Change it after backward, and "
            f"call backward before optimizer.step(); or leave the layer out: name the others with "
            f"layers=[...]"
        ) from cause

    def compare(
        self, layer: Layer, kind: Hashable, first: SavedDigests, second: SavedDigests
    ) -> None:
        """Compare what two forwards of a call have saved; `settle` reads the result."""
        if first.forms != second.forms:
            self.refuse(layer, "saves other tensors when it runs again")
            return
        find, unfilled = find_differences(first.digests, second.digests), second.unfilled
        sampled = [number for number in first.candidates if number not in unfilled]

        def resolve() -> Verified | str:
            if any(number not in unfilled for number in find()):
                return "gives other values when it runs again"
            return Verified(sampled[-1] if sampled else -1, unfilled)

        self._pending.append((layer, kind, resolve))

    def settle(self) -> None:
        """Read the results so far, and warn of layers that are not recomputed."""
        pending, self._pending = self._pending, []
        changed, self._changed = self._changed, {}
        for name, (layer, change) in changed.items():
            if name in self._changed_before:
                self.refuse(layer, f"changes, or finds changed before backward, {change}")
        self._changed_before |= changed.keys()
        for layer, kind, resolve in pending:
            result = resolve()
            if isinstance(result, str):
                self.refuse(layer, result)
            else:
                if len(self._verified) >= _MOST_KINDS:
                    self._verified.clear()
                self._verified[kind] = result
        if self._unsaid:
            self._warn()

    def note_sample(self, layer: Layer, differs: Tensor) -> None:
        """Note whether a sample of a recomputation on an accelerator differs."""
        self._samples.append((layer, differs))

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
                    self.raise_changed(layer, "")
        if self._samples:
            samples, self._samples = self._samples, []
            flags = torch.stack([differs for _, differs in samples]).to("cpu", non_blocking=True)
            copied = device.compute_stream().record()
            self._on_way.append(([layer for layer, _ in samples], flags, copied))

    def _warn(self) -> None:
        unsaid, self._unsaid = self._unsaid, []
        why = [f"{name} {self.refused[name]}" for name in unsaid]
        warn_user(
            "not-recomputed",
            f"layers that are not recomputed, because their forward would not do the same again: "
            f"{few(why)}. What they save is offloaded instead, and gradients are right. To have "
            f"them recomputed, make what they compute depend on nothing but their arguments, "
            f"parameters, buffers, attributes and torch's, Python's and NumPy's own random "
            f"numbers, and change none of these in place; or leave them out: layers=[...]",
        )
