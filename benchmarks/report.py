"""Write docs/benchmarks.md from the result files, so that no figure in it is typed by hand.

Run: ``python -m benchmarks.report``
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, warning_of
from benchmarks.settling import by_share
from benchmarks.tables import CASES, tables_of
from ebbtide.units import format_size

_MOST_ROWS = 4  # longer tables are linked, so that the page can be read, but for those of
_WHOLE = ("first-run", "overlap", "settling-cpu", "settling-softdevice")
PAGE = RESULTS.parents[1] / "docs" / "benchmarks.md"

_INTRODUCTION = """\
# Benchmarks

`python -m benchmarks.report` writes this page from the files in `benchmarks/results`, which hold
every sample. Each table names its machine, date and commit. `make gpu` measures on an accelerator;
`make bench` and `ebbtide demo` run on any machine.

- `x none` is the ratio to the same model without offload.
- `exposed` is the time by which a step is longer than without offload.
- `x limit` is the ratio of the step to a time that no schedule can beat: the time to compute or to
  move the bytes over the link one way, whichever is longer.
- `down` and `up` are the bytes that copies from and to the device moved in a step, as the profiler
  recorded them, whoever started the copies.
- `peak` is the accelerator's allocated memory; on a CPU it is RSS.
"""

_TITLES = {
    "first-run": "From the README to a first model of your own",
    "demo": "An FNO on Darcy flow, with and without offload",
    "rebuild": "Bytes to keep or move, without and with rebuilding",
    "rebuild-step": "Time cost of rebuilding: FNO 256 x 256, batch 8, nothing offloaded",
    "rss": "Returning freed memory to the system, for models on a CPU",
    "recompute": "Peak memory with recomputed layers, for models on a CPU",
    "budget": "Training under byte budgets, and the rules that people make by hand, on a CPU",
    "settling-softdevice": "How budgets settle: ten models, on an accelerator in software",
    "settling-cpu": "How budgets settle: the same models on a CPU, by resident memory",
    "plan-search": "Plans within a share of the peak of chains, predicted, and how long they take",
    "plan-recomputation": "Plans that only recompute, against a dynamic programme's optimum",
    "plan-combined": "Plans that recompute and offload, against a dynamic programme's, predicted",
    "plan-largest-fno-h100": "On paper for an H100: the largest FNO, predicted and not measured",
    "plan-beside-save-on-cpu": "On paper for an H100: a planned step beside save_on_cpu, predicted",
    "plan-links": "On paper: plans beside rules over links from 2 to 900 GB/s, predicted",
    "plan-ablation": "What each stage of the search is worth: steps of plans without it, predicted",
    "overlap": "The optimizer's step inside backward, on a CPU",
    "overlap-in-turns-40": "The same for 40 steps, the two loops in turns",
    "pinned": "Page-locked memory that the host store takes",
    "overhead": "Host time per saved tensor",
    "link": "The link between host and accelerator",
    "transformer": "A transformer of about a billion parameters",
    "fno": "Fourier neural operators",
    "settling-cuda": "How budgets settle: models of several GiB, on a GPU",
}


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(RESULTS))
    print(PAGE.name)


def page(directory: Path) -> str:
    """Return the page for the newest result file of each machine and case in a directory."""
    newest: dict[tuple[str, str], Path] = {}
    for file in sorted(directory.glob("*.json")):
        _, device, case = file.stem.split("_", 2)
        newest[device, case] = file  # names begin with the date, so the newest file comes last
    files = sorted(newest.values(), key=_rank)
    sections = [_section(file) for file in files]
    has_accelerator = any(_measured_on_accelerator(file) for file in files)
    note = "" if has_accelerator else _NOT_ON_AN_ACCELERATOR
    return "\n".join([_INTRODUCTION + note, *sections])


_NOT_ON_AN_ACCELERATOR = """
**Nothing here has been measured on an accelerator yet.** Until `make gpu` has run on one, no claim
about its speed or memory is made.
"""


def _rank(file: Path) -> tuple[bool, int, str]:
    case = file.stem.split("_", 2)[2]
    order = list(_TITLES)
    return (
        not _measured_on_accelerator(file),
        order.index(case) if case in order else len(order),
        file.name,
    )


def _measured_on_accelerator(file: Path) -> bool:
    document = json.loads(file.read_text())
    environment = document["environment"]
    if environment.get("in_software"):
        return False
    return bool(environment.get("accelerator") or environment.get("driver", "none") != "none")


def _section(file: Path) -> str:
    document = json.loads(file.read_text())
    case = file.stem.split("_", 2)[2]
    table = _TABLES.get(case, _table_beside)(document, file)
    # What was measured on an accelerator is what the page is for; a sequence of steps is one thing.
    if not _measured_on_accelerator(file) and case not in _WHOLE:
        table = _shortened(table, file)
    facts = document["environment"]
    keys = ("cpu", "device", "driver", "cores", "python", "torch", "cuda", "commit")
    known = [f"{key} {facts[key]}" for key in keys if facts.get(key) not in (None, "none")]
    where = ", ".join([f"date {file.stem.split('_')[0]}", *known])
    tests = document.get("configuration", {}).get("tests")
    if tests:
        where += f"; tests on this device: {tests}"
    if "note" in document.get("configuration", {}):
        where += f"; {document['configuration']['note']}"
    title = _TITLES.get(case, case)
    warning = warning_of(facts)
    return f"## {title}\n\n{warning}{table}\n\n{where} (`benchmarks/results/{file.name}`)\n"


def _shortened(table: str, file: Path) -> str:
    """Return a table, or the head of a long one and where all of its rows are."""
    lines = table.splitlines()
    beside = file.with_suffix(".md")
    if len(lines) - 2 <= _MOST_ROWS or not beside.exists():
        return table
    head = "\n".join(lines[: _MOST_ROWS + 2])
    return f"The first of {len(lines) - 2} rows of `benchmarks/results/{beside.name}`.\n\n{head}"


def _table_beside(_: dict[str, Any], file: Path) -> str:
    """Return the table from the Markdown file beside a result file."""
    lines = file.with_suffix(".md").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def _table_of_case(document: dict[str, Any], _: Path) -> str:
    results = document["results"]
    if set(results) <= {"activation", "parameter"}:
        return _table_beside(document, _)
    return tables_of(document["case"], results)


def _table_of_demo(document: dict[str, Any], _: Path) -> str:
    modes, shape = document["modes"], document["configuration"]
    plain = modes["none"]
    above = {name: mode["peak_bytes"] - mode["idle_bytes"] for name, mode in modes.items()}
    header = "| mode | peak above idle | x none | step | x none | bits |\n|---|---|---|---|---|---|"
    rows = []
    for name, mode in modes.items():
        same = mode["parameters_sha256"] == plain["parameters_sha256"]
        rows.append(
            f"| {name} | {format_size(above[name])} | {above[name] / above['none']:.2f} | "
            f"{mode['median_s']:.2f} s | {mode['median_s'] / plain['median_s']:.2f} | "
            f"{'same' if same else 'differ'} |"
        )
    what = f"{shape['resolution']} x {shape['resolution']}, batch {shape['batch_size']}"
    return f"{what}, {shape['steps']} steps\n\n" + "\n".join([header, *rows])


def _table_of_settling(document: dict[str, Any], file: Path) -> str:
    rows = f"Every case is a row of `benchmarks/results/{file.with_suffix('.md').name}`."
    return f"{by_share(document['results'])}\n\n{rows}"


_TABLES: dict[str, Callable[[dict[str, Any], Path], str]] = {
    "demo": _table_of_demo,
    "settling-cpu": _table_of_settling,
    "settling-cuda": _table_of_settling,
    "settling-softdevice": _table_of_settling,
    **dict.fromkeys(CASES, _table_of_case),
}


if __name__ == "__main__":
    main()
