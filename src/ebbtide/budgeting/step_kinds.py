"""Tells steps apart that need plans of their own, and remembers the plans of a few of them.

[Note: kinds of steps] Two forwards are of one kind if autograd saves the same tensors in them, as
far as their arguments tell: types and shapes of tensors, truth values and text, the modes of the
modules, which parameters are trained, autocast. A number, such as the step or an annealing factor,
is taken to change nothing until a step shows that it does.

Shapes that change from step to step share what they can. A step with smaller tensors than a planned
one follows that one's plan and needs less, until its shapes have come so often that a plan of their
own pays. Larger tensors are always planned for. Only the kinds that came last are remembered.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any, Final, Generic, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

_MOST_KINDS: Final = 8  # that are remembered; each has up to a few hundred KiB
_LAST_STEPS: Final = 64  # among which shapes that have no plan yet must come
_OFTEN: Final = 8  # this many times to get one

Study = TypeVar("Study")


class Kind(NamedTuple):
    """A kind of step. See [Note: kinds of steps].

    Attributes:
        structure: all but the sizes of the arguments' tensors.
        sizes: number of elements of each tensor.
        shapes: their shapes.
        numbers: the numbers among the arguments.
    """

    structure: Hashable
    sizes: tuple[int, ...]
    shapes: tuple[Hashable, ...]
    numbers: tuple[float, ...]

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        """Return the kind of a forward.

        Args:
            model: the model.
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
        """
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        numbers = tuple(leaf for leaf in leaves if type(leaf) in (int, float))
        modes = hash(tuple(module.training for module in model.modules()))
        trained = hash(tuple(each.requires_grad for each in model.parameters()))
        device = next(model.parameters()).device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        kinds = tuple(map(_describe, leaves))
        return cls(
            (kinds, str(structure), modes, trained, autocast),
            tuple(each.numel() for each in tensors),
            tuple(each.shape for each in tensors),
            numbers,
        )

    def covers(self, other: Kind) -> bool:
        """Whether each tensor of another kind, alike in all else, is no larger."""
        pairs = zip(self.sizes, other.sizes, strict=True)
        return self.structure == other.structure and all(one >= two for one, two in pairs)


def _describe(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, bool | str | None):
        return leaf
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"


@final
class StudiesByKind(Generic[Study]):
    """The studies of the kinds of steps that came last."""

    def __init__(self) -> None:
        self._studies: OrderedDict[Kind, Study] = OrderedDict()  # the last one used comes last
        self._latest: deque[Kind] = deque(maxlen=_LAST_STEPS)
        self._numbers_count = False

    def key_of(self, kind: Kind) -> Kind:
        """Return a kind without the numbers, if these change nothing as far as is known."""
        return kind if self._numbers_count else kind._replace(numbers=())

    def find(self, kind: Kind) -> tuple[Kind, Study] | None:
        """Return the study that a step is to follow, with its kind; None if it needs a new one.

        Args:
            kind: the kind of the step.
        """
        key = self.key_of(kind)
        self._latest.append(key)
        found = key
        if key not in self._studies:
            covering = [
                each for each in self._studies if each.covers(key) and each.numbers == key.numbers
            ]
            if not covering or self._latest.count(key) >= _OFTEN:
                return None
            found = min(covering, key=lambda each: sum(each.sizes))
        self._studies.move_to_end(found)
        return found, self._studies[found]

    def add(self, kind: Kind, study: Study) -> None:
        """Remember a study, and forget the one that was used longest ago if there are many."""
        self._studies[self.key_of(kind)] = study
        if len(self._studies) > _MOST_KINDS:
            self._studies.popitem(last=False)

    def note_numbers_count(self, kind: Kind) -> None:
        """Note that the numbers among the arguments do change what is saved."""
        if kind.numbers and not self._numbers_count:
            self._numbers_count = True
            self.clear()

    def clear(self) -> None:
        """Forget all studies."""
        self._studies.clear()
        self._latest.clear()
