"""Measure what each stage of the search for plans is worth: its plans without one stage in turn.

The chains are random, uneven or of equal layers, and steps of real models on fake tensors. Each is
planned for several links and for budgets that are shares of the peak without offload. Steps are
predicted by `StepTiming`, so the same code gives the same plans on every machine. A stage that is
not shown to matter here has no place in the search.

Run: ``python -m benchmarks.plan_ablation``
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from unittest import mock

from benchmarks import record
from benchmarks.plan_search import equal_chain, link, random_chain, uneven_chain
from ebbtide.errors import BudgetError
from ebbtide.planning import Hardware, PlanBudget, StepProfile, StepTiming, keep_all, search
from ebbtide.planning.contest import BY_PASS, Contest
from ebbtide.tools.models import read_model
from ebbtide.tools.plan_tables import Study

_STAGES: Final[Mapping[str, tuple[str, Callable[..., Any]]]] = {
    "windows": ("Contest", lambda *given, **more: _without_windows(Contest(*given, **more))),
    "the programme's guide": ("_enter_guided", lambda *_: None),
    "rules by hand": ("_enter_simple", lambda *_: None),
    "annealing": ("anneal", lambda *_: None),
}
"""For each stage, the function of the search that is replaced, and by what."""


def _without_windows(contest: Contest) -> Contest:
    contest.bounds = tuple(each for each in contest.bounds if each != BY_PASS)
    return contest


_LINKS_GB_PER_S: Final = (8, 50)
_SHARES: Final = (0.25, 0.5)
_MODELS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "FNO 2D": ("fno2d", {"resolution": 512, "batch": 8}),
    "FNO 3D": ("fno3d", {"resolution": 64, "batch": 2}),
    "TFNO": ("tfno", {"resolution": 256, "batch": 8}),
    "UNO": ("uno", {"resolution": 256, "batch": 8}),
    "GPT": ("gpt", {"size": "124m", "seq": 1024, "batch": 8}),
    "Llama": ("llama", {"size": "1b", "seq": 4096, "batch": 2}),
}


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", nargs="+", default=_known_stages(), choices=_known_stages())
    arguments = parser.parse_args()
    cases = [
        entry
        for name, (profile, hardware) in _cases().items()
        for entry in _measure(name, profile, hardware, arguments.stages)
    ]
    table = _table(cases, arguments.stages)
    print(table)
    print(record.save("plan-ablation", vars(arguments), {"cases": cases}, table).name)


def _known_stages() -> list[str]:
    module = sys.modules[search.__module__]
    return [stage for stage, (function, _) in _STAGES.items() if hasattr(module, function)]


def _cases() -> dict[str, tuple[StepProfile, Hardware]]:
    chains = {f"random, {count} layers": random_chain(count) for count in (6, 12, 48)}
    chains |= {f"equal, {count} layers": equal_chain(count) for count in (12, 48)}
    chains |= {f"uneven {seed}, 16 layers": uneven_chain(seed, 16) for seed in (0,)}
    found = {
        f"{name}, {gb_per_s} GB/s": (profile, link(gb_per_s))
        for name, profile in chains.items()
        for gb_per_s in _LINKS_GB_PER_S
    }
    h100 = Hardware.named("h100")
    for name, (family, options) in _MODELS.items():
        profile = Study(read_model(family, **options), h100).profile
        for gb_per_s in _LINKS_GB_PER_S:
            speed = gb_per_s * 1e9
            hardware = dataclasses.replace(
                h100,
                d2h_bytes_per_s=speed,
                h2d_bytes_per_s=speed,
                duplex_bytes_per_s=1.8 * speed,
            )
            found[f"{name}, {gb_per_s} GB/s"] = profile, hardware
    return found


def _measure(
    name: str, profile: StepProfile, hardware: Hardware, stages: list[str]
) -> list[dict[str, Any]]:
    timing = StepTiming(profile, hardware)
    peak_bytes = timing.predict(keep_all(profile)).peak_bytes
    entries = []
    for share in _SHARES:
        room_bytes = peak_bytes - profile.fixed_bytes
        budget = PlanBudget(device_bytes=profile.fixed_bytes + int(share * room_bytes))
        whole_s, search_s = _plan(profile, hardware, budget, timing)
        if whole_s is None:
            continue
        entry: dict[str, Any] = {"case": name, "share": share, "step_s": whole_s}
        entry["search_s"] = {"all": search_s}
        entry["without"] = {}
        for stage in stages:
            function, instead = _STAGES[stage]
            with mock.patch.object(sys.modules[search.__module__], function, instead):
                step_s, search_s = _plan(profile, hardware, budget, timing)
            entry["without"][stage] = None if step_s is None else step_s / whole_s
            entry["search_s"][stage] = search_s
        entries.append(entry)
        print(entry, file=sys.stderr, flush=True)
    return entries


def _plan(
    profile: StepProfile, hardware: Hardware, budget: PlanBudget, timing: StepTiming
) -> tuple[float | None, float]:
    """Return the seconds of the planned step, None if no plan fits, and of the search."""
    begin_s = time.perf_counter()
    try:
        step_s = search(profile, hardware, budget, timing).step_s
    except BudgetError:
        step_s = None
    return step_s, time.perf_counter() - begin_s


def _table(cases: list[dict[str, Any]], stages: list[str]) -> str:
    lines = [f"| without, in {len(cases)} cases | mean | worst | best | nothing fits | search |"]
    lines.append("|---|---|---|---|---|---|")
    for stage in stages:
        ratios = [each["without"][stage] for each in cases]
        found = [ratio - 1 for ratio in ratios if ratio is not None]
        search_x = statistics.median(
            each["search_s"][stage] / each["search_s"]["all"] for each in cases
        )
        lines.append(
            f"| {stage} | {statistics.mean(found):+.2%} | {max(found):+.1%} | {min(found):+.1%} "
            f"| {len(ratios) - len(found)} | {search_x:.2f} x |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
