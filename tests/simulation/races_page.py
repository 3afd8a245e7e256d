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

Copies run on streams of their own while the host goes on and the model computes. This page lists
every guard of the engine: every place where it waits for something, holds on to something, or
compares before it shares something, and what would happen without. `make races` writes it from
comments in the source.

Tests take the guards away, one at a time, and show that random programs notice, on the simulated
device (`tests/simulation`) and on the [software accelerator](softdevice.md): the
[table](#which-device-notices) says where. A failure names its seed, and the seed replays it.
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

Of {all} ways to take a guard away, random programs notice {both} on both devices. The table has
the others. The simulated device also checks the order of copies and kernels itself, and so
notices what no number shows; {soft_only} need kernels that are late or two of autograd's threads,
which only the software accelerator has.

| guard | random programs of | simulated device | software accelerator |
|---|---|---|---|
"""


def soft_results() -> dict[str, dict[str, Any]]:
    """What `make soft-mutants` found, by the names of mutations."""
    return json.loads(SOFT_RESULTS.read_text())


def _table() -> str:
    results = soft_results()
    soft_only = sum(mutation.check in SOFT_ONLY for mutation in MUTATIONS)
    unnoticed = sum(not result["noticed"] for result in results.values())
    both = len(results) - unnoticed - soft_only
    text = _TABLE.format(both=both, all=len(results), soft_only=soft_only)
    head, table = text.split("\n\n| ")
    title, words = head.split("\n\n")
    lines = [title, "", textwrap.fill(words, _WIDTH), "", f"| {table.rstrip()}"]
    for mutation in sorted(MUTATIONS, key=lambda mutation: mutation.name):
        result = results[mutation.name]
        noticed = "yes" if result["noticed"] else f"no, in {result['seeds']} programs"
        programs = _PROGRAMS[mutation.check]
        if result["noticed"] and mutation.check not in SOFT_ONLY:
            continue
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
    lines = [
        f"### `{guard.name}`\n",
        *textwrap.wrap(f"{guard.does[0].upper()}{guard.does[1:]}.", _WIDTH),
        "",
        *textwrap.wrap(f"Without it: {guard.hazard[0].lower()}{guard.hazard[1:]}", _WIDTH),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
