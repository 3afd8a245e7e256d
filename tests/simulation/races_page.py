"""Writes docs/internals/races.md from the guards' tags in the source: ``make races``."""

import json
import sys
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

from guards import Guard, find_guards
from mutations import (
    ACTIVATIONS,
    LATE_READS,
    MUTATIONS,
    OVERLAP,
    SCHEDULES,
    SOFT_ONLY,
    STATEMENTS,
    TWO_GRADIENTS,
    WEIGHTS,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "races.md"
SOFT_RESULTS = ROOT / "tests" / "softdevice" / "soft_mutants.json"
_WIDTH = 100

_INTRODUCTION = """\
# Races, and what prevents each

Offload is asynchronous: copies run on streams of their own while the host goes on and the model
computes. This page lists every guard of the engine: every place where it waits for something, holds
on to something, or compares before it shares something. It says what would happen without the
guard. Each guard is tagged by a comment in the source, and the page is written from these comments
by `make races`.

`tests/simulation/test_mutations.py` takes the guards away, one at a time, and shows that random
programs on the simulated device notice. `make soft-mutants` does the same on the [software
accelerator](softdevice.md). The last line of each entry says which programs notice, and the
[table](#which-device-notices) says on which device.

The simulation (`tests/simulation`) compares random programs with plain autograd. They run on a
device without hardware, `ebbtide.devices.simulated`. A seed chooses the order of its copies, and
of the work of the workers beside them. The same seed makes copies slow, lets the system refuse to
page-lock memory, cuts reads and writes short, fills the disk and fails writes to it. A failure
names its seed, and the seed replays it. `python -m pytest tests/simulation` runs some hundred
seeds, `make soak` many more.

The same device keeps a virtual time: kernels take as long as a test says, copies take their bytes
over a bandwidth. `tests/simulation/test_timing.py` holds the engine to arithmetic there: the peak
of k of N offloaded layers, no late reload while copies are faster than compute, the same numbers
later when they are slower, and never more in flight than the bound.
"""

_END = """\
## What needs no guard

Host memory may be handed out again while a copy down still writes it: the next copy that writes
there is queued on the same stream, behind the first. Two reads of the same memory need no order. A
source that the model itself modifies in place after it was saved is not protected but noticed: the
version check raises before the bytes are used.
"""

_PROGRAMS = {
    ACTIVATIONS: "activations",
    SCHEDULES: "activations under a schedule",
    WEIGHTS: "weights at rest",
    STATEMENTS: "weights at rest, with anything between two statements",
    OVERLAP: "an optimizer that steps inside backward",
    LATE_READS: "weights at rest that other streams read",
    TWO_GRADIENTS: "gradients that two of autograd's threads add",
}


_TABLE = """\
## Which device notices

The simulated device notices all but {soft_only}, which need kernels that are late or two of
autograd's threads; it also checks the order of copies and kernels itself, and so notices what no
number shows. The software accelerator has only what a GPU has: it
notices where numbers are wrong, memory is left over or taken away, the process crashes, or the
engine finds its own state impossible. The last column says in how many programs nothing was
noticed, each in the orders {orders}. That does not show that the guard is unnecessary, and it
may need rarer programs or streams: {unnoticed} of {all} are noticed by the simulated device
only.

| guard | random programs of | simulated device | software accelerator |
|---|---|---|---|
"""


def soft_results() -> dict[str, dict[str, Any]]:
    """What `make soft-mutants` found, by the names of mutations."""
    return json.loads(SOFT_RESULTS.read_text())


def _table() -> str:
    results = soft_results()
    orders = ", ".join(f"`{order}`" for order in next(iter(results.values()))["orders"])
    text = _TABLE.format(
        orders=orders,
        unnoticed=sum(not result["noticed"] for result in results.values()),
        all=len(results),
        soft_only=sum(mutation.check in SOFT_ONLY for mutation in MUTATIONS),
    )
    head, table = text.split("\n\n| ")
    title, words = head.split("\n\n")
    lines = [title, "", textwrap.fill(words, _WIDTH), "", f"| {table.rstrip()}"]
    for mutation in sorted(MUTATIONS, key=lambda mutation: mutation.name):
        result = results[mutation.name]
        noticed = "yes" if result["noticed"] else f"no, in {result['seeds']} programs"
        programs = _PROGRAMS[mutation.check]
        simulated = "no" if mutation.check in SOFT_ONLY else "yes"
        guard = f"[`{mutation.guard}`](#{mutation.guard})"
        lines.append(f"| {guard} | {programs} | {simulated} | {noticed} |")
    return "\n".join([*lines, ""])


def page() -> str:
    """The text of the page."""
    parts = [_INTRODUCTION]
    guards = find_guards(ROOT / "src" / "ebbtide").values()
    for file, group in groupby(guards, key=lambda guard: guard.file):
        parts.append(f"## `{file}`\n")
        parts += [_entry(guard) for guard in group]
    return "\n".join([*parts, _table(), _END])


def _entry(guard: Guard) -> str:
    checks = [mutation.check for mutation in MUTATIONS if mutation.guard == guard.name]
    noticed = " and ".join(_PROGRAMS[check] for check in checks)
    lines = [
        f"### `{guard.name}`\n",
        *textwrap.wrap(f"{guard.does[0].upper()}{guard.does[1:]}.", _WIDTH),
        "",
        *textwrap.wrap(f"Without it: {guard.hazard[0].lower()}{guard.hazard[1:]}", _WIDTH),
        "",
        *textwrap.wrap(f"Noticed by programs of {noticed}.", _WIDTH),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
