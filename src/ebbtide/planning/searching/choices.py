"""The choices that a plan consists of, as the search changes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from ebbtide.planning.plan import Decision, LayerMode, LayerPlan, Plan
from ebbtide.planning.prediction.storage_uses import StorageUses
from ebbtide.planning.searching.relaxation import Relaxation
from ebbtide.planning.searching.resting import Resting
from ebbtide.planning.step_profile import StepProfile

BY_PASS: Final = -1
"""In the place of a bound on bytes in flight: each pass has what it has room for."""

_LARGER: Final = (0, 1, 2, 4)  # bounds on bytes in flight, in what the largest layer can offload


@final
class Choices:
    """Which layers are recomputed, and what becomes of each piece of memory.

    Args:
        recomputed: whether each layer is recomputed.
        decisions: what becomes of each piece, by its number in `StorageUses`. As the input of a
            recomputed layer, a piece that is rebuilt is kept.
        inflight_bytes: bound on the bytes in flight, or `BY_PASS`.
    """

    __slots__ = ("decisions", "inflight_bytes", "recomputed")

    def __init__(
        self, recomputed: list[bool], decisions: list[Decision], inflight_bytes: int
    ) -> None:
        self.recomputed = recomputed
        self.decisions = decisions
        self.inflight_bytes = inflight_bytes

    def copy(self) -> Choices:
        """Return choices that can be changed alone."""
        return Choices(list(self.recomputed), list(self.decisions), self.inflight_bytes)

    def plan(self, uses: StorageUses, resting: Resting) -> Plan:
        """Return the plan that makes these choices. Its windows, if it has any, are closed.

        Args:
            uses: the memory that layers save.
            resting: whose weights rest on the host.
        """
        layers = []
        for index, recomputed in enumerate(self.recomputed):
            source = uses.inputs[index]
            leaves = source is not None and self.decisions[source] is Decision.OFFLOAD
            mode = LayerMode.AS_IS
            if recomputed:
                mode = LayerMode.RECOMPUTE_OFFLOAD if leaves else LayerMode.RECOMPUTE
            decisions = tuple(self.decisions[piece] for _, piece in uses.saves[index])
            layers.append(LayerPlan(mode=mode, decisions=decisions, weights_on_host=resting[index]))
        if self.inflight_bytes == BY_PASS:
            return Plan(layers=tuple(layers), windows=(0,) * (2 * len(layers) + 1))
        return Plan(layers=tuple(layers), max_inflight_bytes=self.inflight_bytes)


def choices_of(plan: Plan, uses: StorageUses) -> Choices:
    """Return the choices of a plan; where layers share memory, those of its first layer."""
    decisions: list[Decision | None] = [None] * len(uses.memories)
    recomputed = []
    for index, layer in enumerate(plan.layers):
        again, source = layer.mode is not LayerMode.AS_IS, uses.inputs[index]
        recomputed.append(again)
        if again:
            leaves = layer.mode is LayerMode.RECOMPUTE_OFFLOAD
            if source is not None and decisions[source] is None:
                decisions[source] = Decision.OFFLOAD if leaves else Decision.KEEP
            continue
        for number, piece in uses.saves[index]:
            if decisions[piece] is None:
                decisions[piece] = layer.decisions[number]
    known = [Decision.KEEP if decision is None else decision for decision in decisions]
    return Choices(recomputed, known, BY_PASS if plan.windows else plan.max_inflight_bytes)


def inflight_choices(profile: StepProfile) -> tuple[int, ...]:
    """Return the bounds on bytes in flight that the search chooses from.

    The smallest, 0, lets copies move alone. The others are multiples of what the largest layer can
    offload.
    """
    largest_bytes = max(
        layer.input_bytes
        + sum(storage.size_bytes for storage in layer.storages if storage.may_leave)
        for layer in profile.layers
    )
    return tuple(dict.fromkeys(times * largest_bytes for times in _LARGER))


def rounded(relaxation: Relaxation, uses: StorageUses, inflight_bytes: int) -> Choices:
    """Return choices near the fractions of a relaxation.

    What rounding adds to one layer or takes from it is made good in the next ones, so that equal
    layers with a fraction of 0.4 become two of five, evenly spread.
    """
    recomputed = list(_spread(relaxation.recomputed))
    decisions = [Decision.KEEP] * len(uses.memories)
    owed_bytes = 0.0
    for index, again in enumerate(recomputed):
        source = uses.inputs[index]
        alone = [piece for _, piece in uses.saves[index] if piece not in relaxation.offloaded]
        for piece in alone:
            if relaxation.rebuilt.get(piece, 0.0) >= 0.5:
                decisions[piece] = Decision.REBUILD
        owed_bytes += relaxation.offloaded_bytes[index]
        if again:
            continue
        for piece in sorted(alone, key=lambda piece: -uses.memories[piece].size_bytes):
            memory = uses.memories[piece]
            free = decisions[piece] is Decision.KEEP and memory.may_leave and piece != source
            if free and owed_bytes >= memory.size_bytes / 2:
                decisions[piece] = Decision.OFFLOAD
                owed_bytes -= memory.size_bytes
    _spread_pieces(relaxation, uses, decisions)
    return Choices(recomputed, decisions, inflight_bytes)


def _spread_pieces(relaxation: Relaxation, uses: StorageUses, decisions: list[Decision]) -> None:
    """Round what is decided piece by piece: inputs, and what layers share."""
    inputs = [(index, source) for index, source in enumerate(uses.inputs) if source is not None]
    alone = [(index, source) for index, source in inputs if source not in relaxation.offloaded]
    leaves = _spread([relaxation.input_offloaded[index] for index, _ in alone])
    for (_, source), leaving in zip(alone, leaves, strict=True):
        if leaving:
            decisions[source] = Decision.OFFLOAD
        elif relaxation.rebuilt.get(source, 0.0) >= 0.5:
            decisions[source] = Decision.REBUILD
    pieces = sorted(relaxation.offloaded)
    leaves = _spread([relaxation.offloaded[piece] for piece in pieces])
    for piece, leaving in zip(pieces, leaves, strict=True):
        if relaxation.rebuilt.get(piece, 0.0) >= 0.5:
            decisions[piece] = Decision.REBUILD
        elif leaving:
            decisions[piece] = Decision.OFFLOAD


def _spread(fractions: list[float] | tuple[float, ...]) -> Iterator[bool]:
    """Yield a choice for each fraction; their running sums stay together."""
    owed = 0.0
    for fraction in fractions:
        owed += fraction
        chosen = owed >= 0.5 and fraction > 1e-6
        owed -= chosen
        yield chosen
