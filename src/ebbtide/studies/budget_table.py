"""What a step costs at several budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, NamedTuple, final

from ebbtide.errors import BudgetError
from ebbtide.planning.plan import Decision, LayerMode, Plan
from ebbtide.studies.study import Outcome, Study

_ROWS: Final = 5
_ROWS_IF_LONG: Final = 4  # for steps of many layers, whose search takes seconds
_LONG: Final = 24
_MIB: Final = 2**20


class BudgetRow(NamedTuple):
    """What was found at one budget.

    Attributes:
        budget_bytes: the budget of device memory.
        outcome: the plan that was found; None: nothing fits.
    """

    budget_bytes: int
    outcome: Outcome | None


@final
class PlanCounts(NamedTuple):
    """What a plan does, counted.

    Attributes:
        recomputed: layers that run their forward again.
        layers: layers in all.
        offloaded_bytes: what is offloaded, inputs of recomputed layers included.
        rebuilt_bytes: what is computed again from other saved tensors.
    """

    recomputed: int
    layers: int
    offloaded_bytes: int
    rebuilt_bytes: int


def find_rows(
    study: Study,
    budget_bytes: int,
    say: Callable[[str], None] = lambda _: None,
    most_bytes: int | None = None,
) -> list[BudgetRow]:
    """Return plans for several budgets, the largest first, with the one that was asked for.

    The largest budget lets everything be kept, the smallest is the smallest that fits. Those in
    between are evenly spaced. Budgets that the device does not have are left out.

    Args:
        study: the training step.
        budget_bytes: the budget that was asked for.
        say: is told what is being looked for.
        most_bytes: the largest budget of interest; None: that which lets everything be kept.
    """
    device_bytes = study.hardware.device_memory_bytes
    most = most_bytes or study.rule("keep all", device_bytes).prediction.peak_bytes
    least = study.smallest_bytes()
    top = max(min(most, device_bytes), least)
    count = _ROWS if len(study.profile.layers) < _LONG else _ROWS_IF_LONG
    spaced = [top - (top - least) * n // (count - 1) for n in range(count)]
    budgets = {_rounded_up(each): None for each in spaced if each <= device_bytes or each == least}
    budgets[budget_bytes] = None
    rows = []
    for each in sorted(budgets, reverse=True):
        say(f"the fastest step within {each / 2**30:.2f} GiB")
        try:
            rows.append(BudgetRow(each, study.find(each)))
        except BudgetError:
            rows.append(BudgetRow(each, None))
    return _without_misses(rows)


def _without_misses(rows: list[BudgetRow]) -> list[BudgetRow]:
    """Replace plans that are slower than one for a smaller budget, which the search has missed.

    Args:
        rows: the largest budget first.
    """
    best: Outcome | None = None
    found = []
    for row in reversed(rows):
        outcome = row.outcome
        if outcome is not None:
            if best is not None and best.prediction.step_s < outcome.prediction.step_s:
                plan = dataclasses.replace(best.plan, bound_s=outcome.plan.bound_s)
                outcome = Outcome(plan, best.prediction)
            best = outcome
        found.append(row._replace(outcome=outcome))
    return found[::-1]


def _rounded_up(size_bytes: int) -> int:
    """Round up to a hundredth of a GiB or to a MiB, so that what is printed is what was used."""
    grain = 2**30 // 100 + 1 if size_bytes >= 2**30 else _MIB
    return -(-size_bytes // grain) * grain


def count_choices(study: Study, plan: Plan) -> PlanCounts:
    """Count what a plan for the size that was asked for does."""
    profile = study.profile
    offloaded_bytes = rebuilt_bytes = recomputed = 0
    for layer, chosen in zip(profile.layers, plan.layers, strict=True):
        if chosen.mode is not LayerMode.AS_IS:
            recomputed += 1
            offloads = chosen.mode is LayerMode.RECOMPUTE_OFFLOAD
            offloaded_bytes += layer.input_bytes if offloads else 0
            continue
        for storage, decision in zip(layer.storages, chosen.decisions, strict=True):
            if decision is Decision.OFFLOAD and storage.same_as is None and storage.may_leave:
                offloaded_bytes += storage.size_bytes
            if decision is Decision.REBUILD and storage.same_as is None:
                rebuilt_bytes += storage.size_bytes
    return PlanCounts(recomputed, len(profile.layers), offloaded_bytes, rebuilt_bytes)
