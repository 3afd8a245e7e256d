"""What `handle.plan` gives: the plan of a step, why it is so, and what was measured."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Final, NamedTuple, final

from ebbtide.devices.hardware import Hardware
from ebbtide.documents import read_as, read_document
from ebbtide.planning.plan import LayerMode, LayerPlan, Plan
from ebbtide.planning.prediction import CautiousTiming
from ebbtide.planning.profile import LayerProfile, StepProfile
from ebbtide.runtime.handles import Decision
from ebbtide.units import format_seconds, format_size, text_block

FORMAT: Final = "ebbtide-planned-step"
VERSION: Final = 2


_WIDTH: Final = 14  # columns of the names of layers,
_SIZE_WIDTH: Final = 10  # and of a size


class StepCost(NamedTuple):
    """What a step under a plan costs.

    Attributes:
        peak_bytes: the peak of memory: of what tensors use, or of the process's RSS on a CPU.
        step_s: seconds from the begin of the step to the begin of the next.
    """

    peak_bytes: int
    step_s: float


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The plan of a training step, with what it was made from; printing it gives a table.

    Attributes:
        plan: what becomes of each layer and storage, with the predicted time and peak.
        profile: the step that it is for.
        hardware: the bandwidths that it was made for.
        budget_bytes: the budget, in bytes.
        settled: whether the plan stays as it is from now on.
        at_first: what was predicted before the plan ran, while `plan` has what is predicted now;
            None if the plan was not made from measured steps.
        measured: what the last measured step under the plan cost; None before the first one.
    """

    plan: Plan
    profile: StepProfile
    hardware: Hardware
    budget_bytes: int
    settled: bool = False
    at_first: StepCost | None = None
    measured: StepCost | None = None

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file that `load` reads.

        Args:
            path: path of the file, such as ``"plan.json"``.

        Raises:
            OSError: the file cannot be written.
        """
        entry = dataclasses.asdict(self)
        saved = {name: entry[name] for name in ("plan", "profile", "hardware", "budget_bytes")}
        content = {"format": FORMAT, "version": VERSION, "step": saved}
        Path(path).write_text(json.dumps(content, allow_nan=False, default=lambda each: each.value))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> PlannedStep:
        """Read what `save` wrote.

        Raises:
            OSError: the file cannot be read.
            PolicyError: the file is something else.
        """
        text = Path(path).read_text(errors="replace")
        return read_as(cls, read_document(text, FORMAT, VERSION, "step", "plan again"))

    @property
    def summary(self) -> str:
        """What the plan is predicted to cost, and what it was measured to cost, in a line."""
        plan, measured = self.plan, self.measured
        peak_bytes = plan.peak_bytes if measured is None else measured.peak_bytes
        budget = format_size(self.budget_bytes)
        if plan.changes_nothing and peak_bytes is not None and peak_bytes <= self.budget_bytes:
            free = format_size(self.budget_bytes - peak_bytes)
            return f"fits: nothing moves; {free} of a budget of {budget} are free at the peak"
        words = f"predicted peak {_size(plan.peak_bytes)}, step {_seconds(plan.step_s)}"
        if measured is not None:
            size, seconds = format_size(measured.peak_bytes), _seconds(measured.step_s)
            words += f"; last measured peak {size}, step {seconds}"
        return f"budget {budget}, {words}"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        return text_block(str(self))

    def _lines(self) -> Iterator[str]:
        yield self._state
        for name, size, step in (("", "peak", "step"), *self._costs()):
            yield f"{name:<12} {size:>11} {step:>12}"
        if (gap := self.plan.gap) is not None:
            bound = _seconds(self.plan.bound_s)
            yield f"No plan within the budget has a step below {bound}: a gap of {gap:.1%}."
        if self.plan.has_weights_on_host:
            yield self._weights()
        yield from self._table()

    def _weights(self) -> str:
        """Say whose weights rest on the host, and how much of their updates is hidden."""
        owners = self.profile.weight_owners().values()
        resting = sum(self.plan.layers[calls[0]].weights_on_host for calls in owners)
        whose = "" if resting == len(owners) else f" of {resting} of {len(owners)} modules"
        text = f"Weights, gradients and the optimizer's state{whose} rest on the host."
        pairs = zip(self.profile.layers, self.plan.layers, strict=True)
        update_s = sum(layer.host_update_s for layer, chosen in pairs if chosen.weights_on_host)
        if self.profile.ahead is None or not update_s:
            return text
        predicted = CautiousTiming(self.profile, self.hardware).predict(self.plan)
        hidden_share = max(0.0, 1 - predicted.exposed_update_s / update_s)
        return f"{text} Backward hides {hidden_share:.0%} of the optimizer's step there."

    @property
    def _state(self) -> str:
        state = "settled" if self.settled else "not settled yet"
        peak_bytes = self.plan.peak_bytes if self.measured is None else self.measured.peak_bytes
        if self.settled and peak_bytes is not None and peak_bytes > self.budget_bytes:
            state = "which no plan fits: this one needs least of those that were tried"
        return f"budget {format_size(self.budget_bytes)}, {state}"

    def _costs(self) -> list[tuple[str, str, str]]:
        """Return what was predicted at first and now, and measured, each as name, peak, step."""
        found = {
            "at first": self.at_first,
            "predicted": (self.plan.peak_bytes, self.plan.step_s),
            "measured": self.measured,
        }
        return [
            (name, _size(cost[0]), _seconds(cost[1]))
            for name, cost in found.items()
            if cost is not None
        ]

    def _table(self) -> Iterator[str]:
        heads = "".join(f"{each.value:>{_SIZE_WIDTH}}" for each in Decision)
        yield f"{'layers':<{_WIDTH}}{heads}  why"
        for name, cells, why in self._rows():
            if len(name) > _WIDTH:  # the numbers stay, and the end of the name
                place, _, last = name.rpartition(" ")
                name = f"{place} ...{last[len(place) + 4 - _WIDTH :]}"
            done = f"  {cells[0]}"
            if len(cells) > 1:
                done = "".join(f"{each:>{_SIZE_WIDTH}}" for each in cells)
            yield f"{name:<{_WIDTH}}{done:<{len(Decision) * _SIZE_WIDTH}}  {why}"

    def _rows(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield each run of equal layers: its name, what is done with it, and why.

        What is done is the mode of layers that are recomputed, and else a size for each decision.
        """
        entries = list(zip(self.profile.layers, self.plan.layers, strict=True))
        number = first = 0
        for (done, why), run in groupby(entries, key=self._key):
            layers = [layer for layer, _ in run]
            calls = sum(not layer.between for layer in layers)
            name = layers[0].name
            if calls:
                last = number + calls - 1
                place = str(number) if calls == 1 else f"{number} to {last}"
                name = f"{place} {name}"
            deciding = self._constraint(range(first, first + len(layers)))
            yield name, done, f"{why}; {deciding}" if deciding else why
            number, first = number + calls, first + len(layers)

    def _key(self, entry: tuple[LayerProfile, LayerPlan]) -> tuple[tuple[str, ...], str]:
        layer, chosen = entry
        return _what_is_done(layer, chosen), self._why(layer, chosen)

    def _constraint(self, run: range) -> str:
        """Say which position of the step has no room for what would cost less.

        Args:
            run: layers that are treated alike.

        Returns:
            Of the two other ways to treat them, the one that costs least and is over the budget;
            nothing if neither is both.
        """
        layer, chosen = self.profile.layers[run[0]], self.plan.layers[run[0]]
        sizes = _sizes(layer, chosen)
        own_bytes, recomputed = sizes.total(), chosen.mode is not LayerMode.AS_IS
        if not recomputed and sizes[Decision.KEEP] == own_bytes:
            return ""
        copy_s = self.hardware.offload_s(own_bytes) + self.hardware.reload_s(own_bytes)
        other = ("offloading", Decision.OFFLOAD) if recomputed else ("recomputing", Decision.KEEP)
        is_cheaper = (copy_s < layer.second_forward_s) is recomputed
        ways = [other] if is_cheaper and (recomputed or layer.may_recompute) else []
        for name, decision in [*ways, ("keeping", Decision.KEEP)]:
            mode = LayerMode.RECOMPUTE if name == "recomputing" else LayerMode.AS_IS
            excess_bytes, place = self._excess(run, mode, decision)
            if excess_bytes > 0:
                return f"{name} peaks {format_size(excess_bytes)} too high {place}"
        return ""

    def _excess(self, run: range, mode: LayerMode, decision: Decision) -> tuple[int, str]:
        """Return how far layers are over the budget if treated otherwise, and where."""
        layers = list(self.plan.layers)
        for index in run:
            decisions = tuple(
                decision if each.may_leave else Decision.KEEP
                for each in self.profile.layers[index].storages
            )
            layers[index] = dataclasses.replace(layers[index], mode=mode, decisions=decisions)
        timing = CautiousTiming(self.profile, self.hardware)
        limit_bytes = self.plan.limit_bytes or self.budget_bytes
        limit_bytes = max(limit_bytes, timing.predict(self.plan).peak_bytes)
        changed = dataclasses.replace(self.plan, layers=tuple(layers))
        peaks = timing.predict(changed).peak_by_position
        return max(peaks) - limit_bytes, self._place(peaks.index(max(peaks)))

    def _place(self, position: int) -> str:
        """Return where a position is, such as "in B3"."""
        layers, is_forward = self.profile.layers, position < len(self.profile.layers)
        if position == len(layers):
            return "in the loss"
        index = position if is_forward else 2 * len(layers) - position
        call = sum(not each.between for each in layers[:index])
        if layers[index].between:
            return f"after F{call - 1}" if is_forward else f"before B{call - 1}"
        return f"in F{call}" if is_forward else f"in B{call}"

    def _why(self, layer: LayerProfile, chosen: LayerPlan) -> str:
        """Say in a few words what the choice costs beside the other one."""
        sizes = _sizes(layer, chosen)
        if not sizes:
            return "saves nothing of its own"
        recomputed = chosen.mode is not LayerMode.AS_IS
        moved_bytes = sizes.total() if recomputed else sizes[Decision.OFFLOAD]
        copy_s = self.hardware.offload_s(moved_bytes) + self.hardware.reload_s(moved_bytes)
        copies, again = f"copies {_seconds(copy_s)}", f"again {_seconds(layer.second_forward_s)}"
        if recomputed:
            return f"{again}, {copies}"
        costs = [copies] if moved_bytes else []
        if sizes[Decision.REBUILD]:
            costs.append(f"rebuild {_seconds(_rebuild_s(layer, chosen))}")
        elif moved_bytes and layer.may_recompute:
            costs.append(again)
        return ", ".join(costs) or "there is room"


def _sizes(layer: LayerProfile, chosen: LayerPlan) -> Counter[Decision]:
    """Return the bytes that a layer is the first to save, by what becomes of them."""
    sizes: Counter[Decision] = Counter()
    for storage, decision in zip(layer.storages, chosen.decisions, strict=True):
        if storage.same_as is None:
            sizes[decision] += storage.size_bytes
    return sizes


def _rebuild_s(layer: LayerProfile, chosen: LayerPlan) -> float:
    """Return the seconds of rebuilding what a layer saves first."""
    pairs = zip(layer.storages, chosen.decisions, strict=True)
    return sum(each.rebuild_s or 0.0 for each, done in pairs if done is Decision.REBUILD)


def _what_is_done(layer: LayerProfile, chosen: LayerPlan) -> tuple[str, ...]:
    if chosen.mode is not LayerMode.AS_IS:
        return (chosen.mode.value,)
    sizes = _sizes(layer, chosen)
    return tuple(format_size(sizes[each]) if sizes[each] else "-" for each in Decision)


def _size(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else format_size(size_bytes)


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else format_seconds(seconds)
