"""Measure the search for plans: seconds, gap to the bound, and the plans that people make by hand.

The chains are random, or of equal layers. Each is planned for links from 2 to 900 GB/s and for
budgets that are shares of the peak without offload. Steps are predicted by `StepTiming`, so nothing
but the seconds of the search is measured. Two more tables compare the search with dynamic
programmes over the layers: one finds the optimum for recomputation alone, on a link that is too
slow to offload; the other one recomputes and offloads.

Run: ``python -m benchmarks.plan_search``
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scipy

from benchmarks import record
from ebbtide.errors import BudgetError
from ebbtide.planning import (
    Hardware,
    PlanBudget,
    StepProfile,
    StepTiming,
    StorageId,
    keep_all,
    offload_first,
    rule_plans,
    search,
)
from ebbtide.planning.contest import inflight_choices

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from plan_cases import (
    MB,
    chain_step_s,
    least_recomputation_s,
    make_layer,
    make_link,
    make_profile,
    uneven_chain,
)

_LINKS_GB_PER_S = (2, 8, 25, 64, 256, 900)
_SHARES = (0.2, 0.4, 0.8)


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="searches of each case")
    parser.add_argument("--most-layers", type=int, default=1000)
    parser.add_argument("--parts", nargs="+", default=list(_PARTS), choices=list(_PARTS))
    arguments = parser.parse_args()
    configuration = {**vars(arguments), "scipy": scipy.__version__}
    del configuration["parts"]
    for part in arguments.parts:
        measure, lay_out = _PARTS[part]
        found = measure(arguments)
        table = lay_out(found)
        print(table)
        print(record.save(f"plan-{part}", configuration, {"cases": found}, table).name)


def _measure_search(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    cases = {
        f"{kind}, {count} layers": build(count)
        for kind, build in (("random", random_chain), ("equal", equal_chain))
        for count in (12, 48, 1000)
        if count <= arguments.most_layers
    }
    return [
        _measure(name, profile, gb_per_s, share, arguments.rounds)
        for name, profile in cases.items()
        for gb_per_s in _LINKS_GB_PER_S
        for share in _SHARES
    ]


def _measure_recomputation(_: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        _compare_recomputation(count, seed, share)
        for count in (12, 24, 48, 96)
        for seed in range(3)
        for share in (0.5, 0.8)
    ]


def _measure_combined(_: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        _compare_combined(count, seed, mb_per_s, share)
        for count in (8, 12, 16, 32)
        for seed in range(3)
        for mb_per_s in (1, 4, 16)
        for share in (0.3, 0.5, 0.7)
    ]


def random_chain(count: int) -> StepProfile:
    choose = random.Random(count)
    layers = []
    for index in range(count):
        sizes = [choose.randint(1, 100) for _ in range(3)]
        layers.append(
            make_layer(
                *sizes,
                forward_s=choose.uniform(1e-3, 1e-2),
                backward_s=choose.uniform(2e-3, 2e-2),
                forward_working_bytes=choose.randint(0, 20) * MB,
                backward_working_bytes=choose.randint(0, 20) * MB,
                input_bytes=sizes[0] * MB,
                input_same_as=StorageId(index, 0),
            )
        )
    return make_profile(*layers, fixed_bytes=100 * MB)


def equal_chain(count: int) -> StepProfile:
    layer = make_layer(20, 30, 50, 60, forward_s=5e-3, backward_s=1e-2, input_bytes=20 * MB)
    return make_profile(*[layer] * count, fixed_bytes=100 * MB)


def link(gb_per_s: int) -> Hardware:
    """A link whose two directions together have 1.5 times the bandwidth of one."""
    return make_link(gb_per_s * 1000, both_mb_per_s=gb_per_s * 1500, latency_s=1e-5)


def _measure(
    name: str, profile: StepProfile, gb_per_s: int, share: float, rounds: int
) -> dict[str, Any]:
    hardware = link(gb_per_s)
    timing = StepTiming(profile, hardware)
    kept = timing.predict(keep_all(profile))
    budget = PlanBudget(device_bytes=int(share * kept.peak_bytes))
    entry: dict[str, Any] = {"case": name, "gb_per_s": gb_per_s, "share_of_peak": share}
    samples_s = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        try:
            plan = search(profile, hardware, budget, timing)
        except BudgetError as error:
            return {**entry, "smallest_bytes": error.smallest_bytes}
        samples_s.append(time.perf_counter() - begin_s)
    by_hand_s = _best_by_hand(profile, timing, budget)
    assert plan.step_s is not None
    if by_hand_s is not None and plan.step_s > by_hand_s * (1 + 1e-12):
        print(f"{name}, {gb_per_s} GB/s, {share}: a plan made by hand is better", file=sys.stderr)
    return {
        **entry,
        "search_s": samples_s,
        "step_x_keep_all": plan.step_s / kept.step_s,
        "gap": plan.gap,
        "peak_x_budget": (plan.peak_bytes or 0) / budget.device_bytes,
        "by_hand_x_keep_all": None if by_hand_s is None else by_hand_s / kept.step_s,
    }


def _best_by_hand(profile: StepProfile, timing: StepTiming, budget: PlanBudget) -> float | None:
    """Return the fastest step within the budget of the plans that people make by hand.

    For long chains, 20 different k stand for all "the first k layers".
    """
    count = len(profile.layers)
    plans = [plan for _, plan in rule_plans(profile)]
    plans += [offload_first(profile, k) for k in range(1, count, max(1, count // 20))]
    fitting = []
    for plan in dict.fromkeys(plans):
        for inflight_bytes in inflight_choices(profile):
            got = timing.predict(dataclasses.replace(plan, max_inflight_bytes=inflight_bytes))
            if not budget.excess_bytes(got):
                fitting.append(got.step_s)
    return min(fitting, default=None)


def _table(results: Sequence[dict[str, Any]]) -> str:
    """One line a chain and link: the three budgets side by side."""
    lines = ["| chain | link | budget: step x keep all (by hand), gap | longest search |"]
    lines.append("|---|---|---|---|")
    for first in range(0, len(results), len(_SHARES)):
        group = results[first : first + len(_SHARES)]
        cells = []
        for each in group:
            if "gap" not in each:
                cells.append(f"{each['share_of_peak']:.0%}: does not fit")
                continue
            by_hand = each["by_hand_x_keep_all"]
            hand = "none fits" if by_hand is None else f"{by_hand:.3f}"
            cells.append(
                f"{each['share_of_peak']:.0%}: {each['step_x_keep_all']:.3f} ({hand}), "
                f"{each['gap']:.2%}"
            )
        longest_s = max((statistics.median(e["search_s"]) for e in group if "gap" in e), default=0)
        head = group[0]
        lines.append(
            f"| {head['case']} | {head['gb_per_s']} GB/s | {'; '.join(cells)} | {longest_s:.2f} s |"
        )
    return "\n".join(lines)


# ---- recomputation alone ------------------------------------------------------------------------


def _compare_recomputation(count: int, seed: int, share: float) -> dict[str, Any]:
    profile = uneven_chain(1000 * count + seed, count)
    hardware = make_link(1e-6)  # a byte in a second
    timing = StepTiming(profile, hardware)
    budget_bytes = int(share * timing.predict(keep_all(profile)).peak_bytes)
    least_s = least_recomputation_s(profile, budget_bytes)
    entry: dict[str, Any] = {"layers": count, "seed": seed, "share_of_peak": share}
    if least_s is None:
        return {**entry, "fits": False}
    plan = search(profile, hardware, PlanBudget(device_bytes=budget_bytes), timing)
    assert plan.step_s is not None and plan.bound_s is not None
    return {
        **entry,
        "fits": True,
        "x_optimum": plan.step_s / least_s,
        "bound_x_optimum": plan.bound_s / least_s,
    }


def _recomputation_table(results: Sequence[dict[str, Any]]) -> str:
    lines = ["| layers | worst step x optimum | worst bound x optimum |", "|---|---|---|"]
    for count in dict.fromkeys(each["layers"] for each in results):
        group = [each for each in results if each["layers"] == count and each["fits"]]
        worst = max((each["x_optimum"] for each in group), default=0)
        bound = min((each["bound_x_optimum"] for each in group), default=0)
        lines.append(f"| {count} | {worst:.5f} | {bound:.5f} |")
    return "\n".join(lines)


# ---- recomputation and offloading together -------------------------------------------------------


def _compare_combined(count: int, seed: int, mb_per_s: int, share: float) -> dict[str, Any]:
    profile, hardware = uneven_chain(1000 * count + seed, count), make_link(mb_per_s)
    timing = StepTiming(profile, hardware)
    budget_bytes = int(share * timing.predict(keep_all(profile)).peak_bytes)
    entry = {"layers": count, "seed": seed, "mb_per_s": mb_per_s, "share_of_peak": share}
    try:
        plan = search(profile, hardware, PlanBudget(device_bytes=budget_bytes), timing)
    except BudgetError:
        return {**entry, "fits": False}
    least_s = chain_step_s(profile, hardware, budget_bytes)
    assert plan.step_s is not None
    ratio = None if least_s is None else plan.step_s / least_s
    return {**entry, "fits": True, "gap": plan.gap, "x_programme": ratio}


def _combined_table(results: Sequence[dict[str, Any]]) -> str:
    lines = ["| layers | step x programme's: least, median, most | programme finds none | gap |"]
    lines.append("|---|---|---|---|")
    for count in dict.fromkeys(each["layers"] for each in results):
        group = [each for each in results if each["layers"] == count and each["fits"]]
        ratios = [each["x_programme"] for each in group if each["x_programme"] is not None]
        gap = statistics.median(each["gap"] for each in group)
        lines.append(
            f"| {count} | {min(ratios):.3f}, {statistics.median(ratios):.3f}, {max(ratios):.3f} "
            f"| {len(group) - len(ratios)} of {len(group)} | {gap:.1%} |"
        )
    return "\n".join(lines)


_PARTS = {
    "search": (_measure_search, _table),
    "recomputation": (_measure_recomputation, _recomputation_table),
    "combined": (_measure_combined, _combined_table),
}

if __name__ == "__main__":
    main()
