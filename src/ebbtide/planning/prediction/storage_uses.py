"""Which storages a plan puts into memory, from which pass until which pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, final

from ebbtide.errors import PolicyError
from ebbtide.planning.plan import Decision, LayerMode, Plan
from ebbtide.planning.step_profile import StepProfile, StorageId

NOBODY: Final = -1
"""Index of the layer that saves a storage which no layer saves."""


class Memory(NamedTuple):
    """One piece of memory that layers save: once, however many layers save it.

    Attributes:
        size_bytes: its size.
        may_leave: whether it may be offloaded.
        sources: numbers of the pieces it can be rebuilt from.
        rebuild_s: seconds of rebuilding; None if it cannot be rebuilt.
    """

    size_bytes: int
    may_leave: bool
    sources: tuple[int, ...]
    rebuild_s: float | None


class Uses(NamedTuple):
    """What becomes of each piece of memory under one plan; the lists are by its number.

    Attributes:
        decisions: what becomes of it. What cannot leave, or cannot be rebuilt because a source is
            not saved, is kept.
        first: index of the layer that saves it first; `NOBODY` if none does. It is in use until
            that layer's backward has ended.
        last: index of the layer whose backward needs it first, or rebuilds something from it.
        saved: the pieces that each layer saves first.
        needed: the pieces that each layer's backward is the first to need, sources before what is
            rebuilt from them.
    """

    decisions: list[Decision]
    first: list[int]
    last: list[int]
    saved: list[list[int]]
    needed: list[list[int]]


@final
class StorageUses:
    """Finds the uses of memory in a step, for any plan.

    Args:
        profile: the step.

    Attributes:
        memories: all pieces of memory that layers save. What layers save as storages comes first.
        saves: the pieces that each layer saves if it runs as it is: number in the layer and piece.
        inputs: the piece that is each layer's input; None if it has no bytes.
        inside_bytes: size of what each layer saves beside its input.
    """

    def __init__(self, profile: StepProfile) -> None:
        self.memories: list[Memory] = []
        self.saves: list[list[tuple[int, int]]] = []
        self.inputs: list[int | None] = []
        self.pieces: dict[StorageId, int] = {}
        for name in profile.storage_ids():
            storage = profile.storage(name)
            if storage.same_as is not None:
                self.pieces[name] = self.pieces[storage.same_as]
                continue
            sources = tuple(self.pieces[source] for source in storage.sources)
            self.pieces[name] = len(self.memories)
            self.memories.append(
                Memory(storage.size_bytes, storage.may_leave, sources, storage.rebuild_s)
            )
        for index, layer in enumerate(profile.layers):
            self.saves.append(
                [
                    (each.number, self.pieces[StorageId(index, each.number)])
                    for each in layer.storages
                ]
            )
            if layer.input_same_as is not None:
                self.inputs.append(self.pieces[layer.input_same_as])
            elif layer.input_bytes:
                self.inputs.append(len(self.memories))
                self.memories.append(Memory(layer.input_bytes, True, (), None))
            else:
                self.inputs.append(None)
        self.inside_bytes = [profile.inside_bytes(index) for index in range(len(profile.layers))]
        self._may_recompute = [layer.may_recompute for layer in profile.layers]

    def under(self, plan: Plan) -> Uses:
        """Return the uses under a plan.

        Raises:
            PolicyError: the plan is not one for this profile.
        """
        self._check(plan)
        count, layers = len(self.memories), len(self.saves)
        decisions = [Decision.KEEP] * count
        first, last = [NOBODY] * count, [NOBODY] * count
        saved: list[list[int]] = [[] for _ in range(layers)]
        for index in range(layers):
            for piece, decision in self._saved_by(index, plan):
                last[piece] = index
                if first[piece] == NOBODY:
                    first[piece] = index
                    saved[index].append(piece)
                    decisions[piece] = self._possible(piece, decision, first)
        needed: list[list[int]] = [[] for _ in range(layers)]
        for piece in range(count - 1, -1, -1):  # sources have lower numbers
            if decisions[piece] is Decision.REBUILD:
                for source in self.memories[piece].sources:
                    last[source] = max(last[source], last[piece])
        for piece in range(count):
            if first[piece] != NOBODY and decisions[piece] is not Decision.KEEP:
                needed[last[piece]].append(piece)
        return Uses(decisions, first, last, saved, needed)

    def offloaded_bytes(self, uses: Uses, pieces: Iterable[int]) -> int:
        """Return the size of those of the pieces that are offloaded."""
        offloaded = (each for each in pieces if uses.decisions[each] is Decision.OFFLOAD)
        return sum(self.memories[each].size_bytes for each in offloaded)

    def _saved_by(self, index: int, plan: Plan) -> list[tuple[int, Decision]]:
        layer, source = plan.layers[index], self.inputs[index]
        if layer.mode is LayerMode.AS_IS:
            return [(piece, layer.decisions[number]) for number, piece in self.saves[index]]
        if source is None:
            return []
        leaves = layer.mode is LayerMode.RECOMPUTE_OFFLOAD
        return [(source, Decision.OFFLOAD if leaves else Decision.KEEP)]

    def _possible(self, piece: int, decision: Decision, first: list[int]) -> Decision:
        memory = self.memories[piece]
        if decision is Decision.OFFLOAD and not (memory.may_leave and memory.size_bytes):
            return Decision.KEEP
        if decision is Decision.REBUILD:
            there = all(first[source] != NOBODY for source in memory.sources)
            if memory.rebuild_s is None or not there:
                return Decision.KEEP
        return decision

    def _check(self, plan: Plan) -> None:
        if len(plan.layers) != len(self.saves):
            raise PolicyError(
                f"the plan has {len(plan.layers)} layers and the profile {len(self.saves)}; plan "
                f"again for this profile"
            )
        num_passes = 2 * len(self.saves) + 1
        if plan.windows and len(plan.windows) != num_passes:
            raise PolicyError(
                f"the plan has windows for {len(plan.windows)} passes, and the profile has "
                f"{num_passes}; plan again for this profile"
            )
        for index, layer in enumerate(plan.layers):
            if layer.mode is not LayerMode.AS_IS:
                if not self._may_recompute[index]:
                    raise PolicyError(
                        f"the plan recomputes layer {index}, which may not be recomputed; plan "
                        f"again for this profile"
                    )
            elif len(layer.decisions) != len(self.saves[index]):
                raise PolicyError(
                    f"the plan decides on {len(layer.decisions)} storages of layer {index}, which "
                    f"saves {len(self.saves[index])}; plan again for this profile"
                )
