"""Build Markdown tables from the results of the GPU suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbtide.units import format_size

Results = Mapping[str, Any]

CASES = ("link", "transformer", "fno", "overhead")


def tables_of(case: str, results: Results) -> str:
    """Return the Markdown tables of one case.

    Args:
        case: ``link``, ``transformer``, ``fno`` or ``overhead``.
        results: results of the case's jobs by name, and that of the job ``link`` of the same run if
            it was measured.
    """
    link = (results.get("link") or {}).get("modes", {}).get("none", {})
    if case == "link":
        return _link_table(link)
    tables = []
    for name, entry in results.items():
        if name == "link" or entry is None:
            continue
        task, modes = entry["job"]["task"], entry["modes"]
        if task == "steps":
            tables.append(_steps_table(name, entry["job"]["shape"], modes, link))
        elif task == "overhead":
            tables.append(_overhead_table(entry["job"]["more"], modes))
    capacities = {
        name: entry
        for name, entry in results.items()
        if name != "link" and entry and entry["job"]["task"] == "capacity"
    }
    if capacities:
        tables.append(_capacity_table(capacities))
    return "\n\n".join(tables)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _why_not(answer: Results) -> str | None:
    """Return why an answer has no figures; None if it has them."""
    for key in ("skipped", "failed", "out_of_memory", "refused"):
        if key in answer:
            return f"{key.replace('_', ' ')}: {answer[key]}".replace("|", "/")[:160]
    return None


# ---- steps --------------------------------------------------------------------------------------


def _steps_table(name: str, shape: Results, modes: Results, link: Results) -> str:
    plain = modes.get("none", {})
    header = [
        "mode",
        "step",
        "x none",
        "peak",
        "x none",
        "down",
        "up",
        "exposed",
        "x limit",
        "losses",
    ]
    rows, excuses = [], []
    for mode, answer in modes.items():
        excuse = _why_not(answer)
        if excuse is None:
            rows.append([mode, *_steps_row(answer, plain, link)])
        else:
            excuses.append(f"- {mode}: {excuse}")
    text = ", ".join(f"{key} {value}" for key, value in shape.items() if key != "model")
    parts = [f"**{name}** ({text})", _table(header, rows), "\n".join(excuses)]
    return "\n\n".join(part for part in parts if part)


def _steps_row(answer: Results, plain: Results, link: Results) -> list[str]:
    step_s, plain_s = answer["step_s"], plain.get("step_s")
    limit_s = limit_of_step_s(answer, plain, link)
    exposed = "" if plain_s is None else f"{max(0.0, step_s - plain_s) * 1e3:.1f} ms"
    same = "" if "losses" not in plain else _same(answer["losses"], plain["losses"])
    return [
        f"{step_s * 1e3:.1f} ms",
        _ratio(step_s, plain_s),
        format_size(answer["peak_bytes"]),
        _ratio(answer["peak_bytes"], plain.get("peak_bytes")),
        *(_size_or_nothing(answer.get(f"{way}_bytes")) for way in ("down", "up")),
        exposed,
        _ratio(step_s, limit_s),
        same,
    ]


def limit_of_step_s(answer: Results, plain: Results, link: Results) -> float | None:
    """Return the step time that no schedule can beat.

    It is the time to compute, or the time to move the bytes one way, whichever is longer.

    Returns:
        Seconds; None if the plain step, the bytes or the link were not measured.
    """
    down, up = answer.get("down_bytes"), answer.get("up_bytes")
    if "step_s" not in plain or down is None or up is None or not link:
        return None
    return max(
        plain["step_s"],
        down / link["pinned_down_bytes_per_s"],
        up / link["pinned_up_bytes_per_s"],
    )


def _same(losses: list[str], others: list[str]) -> str:
    """Return whether the losses of all steps that both took are the same."""
    pairs = zip(losses, others, strict=False)
    return "same bits" if all(loss == other for loss, other in pairs) else "differ"


def _ratio(value: float, other: float | None) -> str:
    return "" if not other else f"{value / other:.3f}"


def _size_or_nothing(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)


# ---- the others ---------------------------------------------------------------------------------


def _link_table(link: Results) -> str:
    if not link or _why_not(link):
        return str(_why_not(link) or "not measured")
    rows = [
        [
            kind,
            *(f"{link[f'{kind}_{way}_bytes_per_s'] / 1e9:.1f}" for way in ("down", "up", "both")),
        ]
        for kind in ("pageable", "pinned")
    ]
    bandwidths = _table(["host memory", "down, GB/s", "up, GB/s", "both at once, GB/s"], rows)
    costs = [[name, f"{cost:.3f}"] for name, cost in link["pinning_s_per_gib"].items()]
    if not costs:
        return bandwidths
    return f"{bandwidths}\n\n{_table(['page-locked memory', 's per GiB'], costs)}"


def _overhead_table(more: Results, modes: Results) -> str:
    plain_s, rows, excuses = modes.get("none", {}).get("step_s"), [], []
    for mode, answer in modes.items():
        excuse = _why_not(answer)
        if excuse is not None:
            excuses.append(f"- {mode}: {excuse}")
        elif plain_s is not None:
            cost_us = (answer["step_s"] - plain_s) / more["tensors"] * 1e6
            rows.append([mode, f"{cost_us:.2f}"])
    table = _table(["mode", "us per saved tensor"], rows)
    return "\n\n".join(part for part in (table, "\n".join(excuses)) if part)


def _capacity_table(capacities: Results) -> str:
    modes = list(dict.fromkeys(mode for entry in capacities.values() for mode in entry["modes"]))
    rows = []
    for entry in capacities.values():
        job = entry["job"]
        shape, more = job["shape"], job["more"]
        what = f"points a side, batch {shape['batch']}"
        if more["field"] == "batch":
            what = f"batch, {shape['size']} points a side"
        cells = []
        for mode in modes:
            answer = entry["modes"].get(mode, {})
            cells.append(_why_not(answer) or str(answer.get("largest", "")))
        rows.append([shape["model"], what, format_size(more["limit_bytes"]), *cells])
    return "Largest value that trains within a memory limit\n\n" + _table(
        ["model", "what", "within", *modes], rows
    )
