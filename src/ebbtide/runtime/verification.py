"""Verifies that a layer's forward gives the same bits again before it is recomputed.

[Note: verified recomputation] The first time that a call of a kind is to be recomputed, it is not.
Its forward runs as if it were not chosen, and what it saves is offloaded, so the gradients of this
step are right whatever happens. When backward reaches the layer, the forward runs again exactly as
a recomputation would. Digests of what the two forwards save are compared. A layer that differs is
never recomputed: what it saves is offloaded from then on, and one warning names it.

Digests stay on the device, and the host reads them when the next forward begins, so that it waits
for nothing in the step.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from ebbtide.devices.device import AbstractDevice, AbstractEvent, Layer
from ebbtide.errors import SavedTensorModifiedError, warn_user
from ebbtide.runtime.torch_internals import addresses_of, parts_of, sequence_number, tree_leaves
from ebbtide.units import few

_ROW: Final = 2**9  # words in a row, and rows in a piece, which is digested at once
_MOST_KINDS: Final = 4096  # a program that has more is verified again
_SAMPLED: Final = 1024  # elements that later recomputations compare
_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

Digest = Tensor | int | None
"""A 0-dim int64 tensor on an accelerator; a number on a CPU; None for what has no memory."""


class Verified(NamedTuple):
    """What is known of a kind of call whose forward gives the same bits again.

    Attributes:
        sampled: number of a saved tensor that each recomputation compares a sample of; -1: none.
        unsaved: the parameters that the forward does not save; see `ModuleState.copy_unsaved`.
        unfilled: numbers of the saved tensors that are not compared; see `find_unfilled`.
    """

    sampled: int
    unsaved: frozenset[int] = frozenset()
    unfilled: frozenset[int] = frozenset()


def digest(tensor: Tensor) -> list[Digest]:
    """Return digests of the bits of a tensor, one for each part of it. No host waits for them."""
    # Not under `no_grad`: an interrupt as it ends would leave the program without gradients.
    return [_digest_part(part.detach()) for part in parts_of(tensor)]


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
    return int(total) if part.device.type == "cpu" else total


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


@final
class SavedDigests:
    """Digests of the tensors that a forward saves, in their order.

    A tensor may be saved before its kernel fills it. So it is digested when the operation that has
    saved it is done, which is when the next one begins. See [Note: tensors saved before they are
    written] in `ebbtide.runtime.activations`.

    Args:
        first: whether this is the first of two forwards.

    Attributes:
        memory: digests of parameters, large buffers and inputs, which a forward must not change.
        weights: addresses of the storages of the parameters among what is saved.
        unsaved: the parameters that are not among that; see `ModuleState.copy_unsaved`.
        unfilled: numbers of the saved tensors that are not compared; see `find_unfilled`.
    """

    def __init__(self, *, first: bool) -> None:
        self.forms: list[tuple[Any, ...]] = []
        self.digests: list[list[Digest]] = []
        self.operations: list[int] = []
        self.can_be_sampled: list[bool] = []
        self.memory: list[Digest] = []
        self.weights: set[int] = set()
        self.unsaved: frozenset[int] = frozenset()
        self.unfilled: frozenset[int] = frozenset()
        self._is_first = first
        self._pending: list[tuple[int, Tensor]] = []
        self._operation = -1

    def note(self, tensor: Tensor, *, is_weight: bool = False) -> None:
        """Note a tensor that is saved now.

        Args:
            tensor: the tensor.
            is_weight: whether it is a parameter, of which no sample is taken.
        """
        operation = sequence_number()
        if operation != self._operation:
            self.finish()
            self._operation = operation
        strided = tensor.layout is torch.strided
        stride = tensor.stride() if strided and not tensor.is_nested else None
        self.forms.append((tensor.shape, stride, tensor.dtype, tensor.device))
        self.operations.append(operation)
        if self._is_first:
            # A sample is taken when the tensor is saved, so nobody may write it after that.
            made = tensor.grad_fn is not None and not is_weight
            self.can_be_sampled.append(made and sample(tensor) is not None)
            if is_weight:
                self.weights.update(addresses_of(tensor))
        self._pending.append((len(self.digests), tensor.detach()))
        self.digests.append([])

    def finish(self) -> None:
        """Digest the tensors of the last operation, which is done."""
        for number, tensor in self._pending:
            self.digests[number] = digest(tensor)
        self._pending.clear()

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
            numbers = [n for n, each in enumerate(self.operations) if each == operation]
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


def _compare(first: SavedDigests, second: SavedDigests) -> Callable[[], Verified | str]:
    """Compare two forwards of a call on the device; the host does not wait.

    Returns:
        What gives the result: what is known of the kind of call now, or what differs.
    """
    if first.forms != second.forms:
        return lambda: "saves other tensors when it runs again"
    pairs = [(-1, *both) for both in zip(first.memory, second.memory, strict=True)]
    for number, each in enumerate(first.digests):
        if number not in second.unfilled:
            both_forwards = zip(each, second.digests[number], strict=True)
            pairs += [(number, *both) for both in both_forwards]
    left: list[Tensor] = []
    right: list[Tensor] = []
    where: list[int] = []  # the number of a saved tensor; -1: memory that must not change
    differing: list[int] = []
    for number, one, other in pairs:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            where.append(number)
            left.append(one.to(left[0].device) if left else one)
            right.append(other.to(left[0].device))
        elif isinstance(one, Tensor) or isinstance(other, Tensor) or one != other:
            differing.append(number)
    flags = torch.stack(left) != torch.stack(right) if left else None

    def resolve() -> Verified | str:
        found = [*differing]
        if flags is not None:
            found += itertools.compress(where, flags.tolist())
        if any(number >= 0 for number in found):
            return "gives other values when it runs again"
        if found:
            return "changes a weight, a buffer or an input when it runs again"
        can_be = [n for n, can in enumerate(first.can_be_sampled) if can]
        sampled = [n for n in can_be if n not in second.unfilled]
        return Verified(sampled[-1] if sampled else -1, first.unsaved, second.unfilled)

    return resolve


@final
class Verifications:
    """Which layers of a model give the same bits when their forward runs again.

    Attributes:
        refused: names of the layers that do not.
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._verified: dict[Hashable, Verified] = {}
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

    def raise_different(self, layer: Layer, cause: BaseException | None = None) -> NoReturn:
        """Refuse a layer that has computed something else in backward, and raise the error for it.

        Raises:
            SavedTensorModifiedError: always.
        """
        self.refuse(layer, "gives other values when it runs again")
        where = f"layer {layer.index} ({layer.name})"
        raise SavedTensorModifiedError(
            f"{where} has given other values when its forward ran again in backward than it had "
            f"given first, so its gradients are wrong. Something that it depends on has changed in "
            f"between, such as a global, a counter or an iterator outside of the layer; make it an "
            f"argument or an attribute of the layer, or leave the layer out: name the others with "
            f"layers=[...]"
        ) from cause

    def compare(
        self, layer: Layer, kind: Hashable, first: SavedDigests, second: SavedDigests
    ) -> None:
        """Compare what two forwards of a call have saved; `settle` reads the result."""
        self._pending.append((layer, kind, _compare(first, second)))

    def settle(self) -> None:
        """Read the results so far, and warn of layers that are not recomputed."""
        pending, self._pending = self._pending, []
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
                    self.raise_different(layer)
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
