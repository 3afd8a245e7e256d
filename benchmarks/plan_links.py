"""On paper: plans beside the rules that people make by hand, over links from 2 to 900 GB/s.

Nothing is measured. Bytes come from fake tensors, seconds from a roofline with the figures of the
preset ``h100``, and only the link differs: the same bandwidth each way, and 1.5 times as much both
ways together. The models go from an FNO, which does little arithmetic for each byte that it saves,
to a transformer with a long sequence, which does much. Each step is predicted by the arithmetic
that takes exactly what the engine takes in virtual time (`tests/simulation/test_step_timing.py`).

Budgets lie between the least that any rule needs and what keeping everything needs. A rule is the
best one that fits: keep, offload, recompute, rebuild, two of these, or offload the first k layers,
for all k, with each bound on bytes in flight that the search knows.

Run: ``python -m benchmarks.plan_links``
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import record
from ebbtide.errors import BudgetError
from ebbtide.planning import (
    Hardware,
    Plan,
    PlanBudget,
    StepProfile,
    StepTiming,
    offload_first,
    rule_plans,
    search,
)
from ebbtide.planning.contest import inflight_choices
from ebbtide.tools.models import read_model
from ebbtide.tools.plan_tables import Study

_LINKS_GB_PER_S = (2, 8, 25, 55, 200, 450, 900)
_SHARES = (0.15, 0.4, 0.7)
_MODELS = {
    "FNO 2D, 512 x 512": ("fno2d", {"resolution": 512, "batch": 8}),
    "FNO 3D, 128^3": ("fno3d", {"resolution": 128, "batch": 1}),
    "GPT, 1k tokens": ("gpt", {"seq": 1024, "batch": 8}),
    "Llama, 32k tokens": ("llama", {"size": "1b", "seq": 32768, "batch": 1}),
}


def main() -> None:
    """Predict and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.parse_args()
    entries = [entry for name in _MODELS for entry in _compare(name)]
    table = _table(entries)
    print(table)
    configuration = {"links_gb_per_s": _LINKS_GB_PER_S, "shares": _SHARES}
    print(record.save("plan-links", configuration, entries, table).name)


def _compare(name: str) -> Iterator[dict[str, Any]]:
    family, options = _MODELS[name]
    base = Hardware.named("h100")
    study = Study(read_model(family, **options), base)
    profile = study.profile
    for gb_per_s in _LINKS_GB_PER_S:
        hardware = _with_link(base, gb_per_s * 1e9)
        timing = StepTiming(profile, hardware)
        rules = [(what, plan, timing.predict(plan)) for what, plan in _rules(profile)]
        least = min(prediction.peak_bytes for _, _, prediction in rules)
        most = timing.predict(offload_first(profile, 0)).peak_bytes
        for share in _SHARES:
            budget_bytes = least + int(share * (most - least))
            fitting = [each for each in rules if each[2].peak_bytes <= budget_bytes]
            what, _, best = min(fitting, key=lambda each: each[2].step_s)
            begin_s = time.perf_counter()
            try:
                budget = PlanBudget(device_bytes=budget_bytes)
                plan: Plan | None = search(profile, hardware, budget, timing)
            except BudgetError:
                plan = None
            assert plan is not None and plan.step_s is not None
            print(name, gb_per_s, share, f"{time.perf_counter() - begin_s:.1f} s", file=sys.stderr)
            yield {
                "model": name,
                "link_gb_per_s": gb_per_s,
                "budget_bytes": budget_bytes,
                "keep_all_s": timing.predict(offload_first(profile, 0)).step_s,
                "rule": what,
                "rule_s": best.step_s,
                "plan_s": plan.step_s,
                "gap": plan.gap,
                "search_s": time.perf_counter() - begin_s,
            }


def _rules(profile: StepProfile) -> Iterator[tuple[str, Plan]]:
    plans = list(rule_plans(profile))
    for count in range(1, len(profile.layers)):
        plans.append((f"offload the first {count}", offload_first(profile, count)))
    for what, plan in plans:
        for inflight_bytes in inflight_choices(profile):
            yield what, dataclasses.replace(plan, max_inflight_bytes=inflight_bytes)


def _with_link(hardware: Hardware, bytes_per_s: float) -> Hardware:
    figures = {
        "h2d_bytes_per_s": bytes_per_s,
        "d2h_bytes_per_s": bytes_per_s,
        "duplex_bytes_per_s": 1.5 * bytes_per_s,
    }
    made_up = dict.fromkeys(figures, "assumed: made up")
    sources = {**hardware.sources, **made_up}
    return dataclasses.replace(hardware, sources=sources, **figures)


def _table(entries: list[dict[str, Any]]) -> str:
    lines = [
        "| model | link | budget | keep all | best rule that fits | its step | plan | x rule "
        "| gap |",
        "|" + "---|" * 9,
    ]
    for each in entries:
        cells = [
            each["model"],
            f"{each['link_gb_per_s']} GB/s",
            f"{each['budget_bytes'] / 1e9:.1f} GB",
            f"{each['keep_all_s'] * 1e3:.1f} ms",
            each["rule"],
            f"{each['rule_s'] * 1e3:.1f} ms",
            f"{each['plan_s'] * 1e3:.1f} ms",
            f"{each['plan_s'] / each['rule_s']:.2f}",
            f"{each['gap']:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
