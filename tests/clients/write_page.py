"""Run all clients and write docs/guides/clients.md, so that no figure in it is typed by hand.

Run: make clients-page
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from pathlib import Path

from benchmarks.record import environment

from catalog import CLIENTS, Client
from compare import ENVIRONMENT, HERE, PROGRAMS, ClientError, Outcome, compare, unexpected
from ebbtide.units import format_size
from run_program import prepare

PAGE = HERE.parents[1] / "docs" / "guides" / "clients.md"

INTRODUCTION = """\
# With the framework you train with

Each row is a short program of a framework, which you can copy. Offloading adds two lines to it:
`import ebbtide`, and `handle = ebbtide.offload(model)` after the model has been built.

Each program ran with the two lines and without. Losses and weights are the same to the bit, except
where a row says otherwise. The peak is the process's resident memory (RSS); *above idle* leaves
out what was there when the model was ready. `make clients` compares them on your machine, and
`make clients-page` writes this page.
"""

HEADER = """\
| client | lines added | peak without | peak with | above idle, without → with | what to know |
|---|---|---|---|---|---|"""


def main() -> None:
    """Run all clients and write the page."""
    rows = [_row(client) for client in CLIENTS]
    PAGE.write_text("\n".join([INTRODUCTION, HEADER, *rows, "", _facts(), ""]))
    print(PAGE.name)


def _row(client: Client) -> str:
    print(client.title, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        comparison = compare(client, Path(directory))
    unknown = unexpected(client, comparison.problems)
    if unknown:
        raise ClientError("\n".join(unknown))
    plain, offloaded = comparison.plain, comparison.offloaded
    note = client.note
    if client.ranks > 1:
        note = f"{client.ranks} processes; the larger peak. {note}"
    reasons = sorted({reason for outcome in offloaded for reason in outcome.printed})
    note += "".join(f" ebbtide printed: {reason}." for reason in reasons)
    if client.known is not None:
        note += f" **Not yet:** {client.known.reason}."
    name = f"[{client.title}](../../tests/clients/programs/{client.program})"
    sizes = f"{_peak(plain)} | {_peak(offloaded)} | {_above(plain)} → {_above(offloaded)}"
    return f"| {name} | {_count_added_lines(client)} | {sizes} | {note} |"


def _count_added_lines(client: Client) -> int:
    source = (PROGRAMS / client.program).read_text()
    with_and_without = [prepare(source, offloaded=offloaded).body for offloaded in (True, False)]
    return len(with_and_without[0]) - len(with_and_without[1])


def _peak(outcomes: list[Outcome]) -> str:
    return format_size(max(each.peak_bytes for each in outcomes)) if outcomes else "–"


def _above(outcomes: list[Outcome]) -> str:
    return format_size(max(each.above_idle_bytes for each in outcomes)) if outcomes else "–"


def _facts() -> str:
    """Return the sentence that names the machine and the versions."""
    facts = environment()
    keys = ("date", "device", "cores", "python", "torch", "commit")
    known = [f"{key} {facts[key]}" for key in keys]
    packages = (HERE / "requirements.txt").read_text().split("\n")
    names = [line for line in packages if line and not line.startswith(("#", "pytest"))]
    names = [name.split("[")[0] for name in names]
    known += [f"{name} {importlib.metadata.version(name)}" for name in names]
    known += [f"{name}={value}" for name, value in ENVIRONMENT.items() if name.startswith("MALLOC")]
    return f"Measured with one thread: {', '.join(known)}."


if __name__ == "__main__":
    main()
