"""Run the clients of science and published scripts, and write the tables of two guides.

Run: make clients-science (the table of docs/guides/scientific.md), or with `scripts` that of
docs/guides/run.md, which needs the packages of `make clients`.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path

from benchmarks.record import environment

from catalog import SCIENCE, Client
from compare import HERE, ClientError, Outcome, problems, run
from ebbtide.units import format_size
from published import PUBLISHED, Published
from published import run as run_script

GUIDES = HERE.parents[1] / "docs" / "guides"
SCIENCE_PACKAGES = ("microsoft-aurora", "nvidia-physicsnemo", "anemoi-models")
SCRIPT_PACKAGES = ("transformers", "lightning", "neuraloperator")

SCIENCE_HEADER = """\
| recipe | neither | ebbtide | their checkpoints | both |
|---|---|---|---|---|"""

SCRIPTS_HEADER = """\
| script | peak by Python | by `ebbtide run` | with a budget | offloaded in a step | what to know |
|---|---|---|---|---|---|"""


def main() -> None:
    """Write the tables that the command line names; without arguments, that of science."""
    if sys.argv[1:] == ["scripts"]:
        rows = [_script_row(each) for each in PUBLISHED]
        table = [SCRIPTS_HEADER, *rows, "", _facts(SCRIPT_PACKAGES)]
        write_between(GUIDES / "run.md", "\n".join(table))
    else:
        rows = [_science_row(client) for client in SCIENCE]
        table = [SCIENCE_HEADER, *rows, "", _facts(SCIENCE_PACKAGES)]
        write_between(GUIDES / "scientific.md", "\n".join(table))


def write_between(page: Path, text: str) -> None:
    """Replace what stands between a page's two `figures` comments."""
    begin, end = "<!-- figures -->", "<!-- end of figures -->"
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def _science_row(client: Client) -> str:
    print(client.title, flush=True)
    found = [
        _outcome(client, mode, own)
        for own in ([False, True] if client.own_checkpoints else [False])
        for mode in ("plain", "offloaded")
    ]
    for plain, offloaded in zip(found[::2], found[1::2], strict=True):
        # Their checkpoints beside ebbtide need not need less; the numbers must be the same.
        wrong = [each for each in problems([plain], [offloaded]) if "differ" in each]
        if wrong or plain.losses != found[0].losses or plain.weights != found[0].weights:
            raise ClientError(f"{client.title}: {wrong or 'their checkpoints change the numbers'}")
    sizes = [format_size(each.above_idle_bytes) for each in found] + ["–"] * (4 - len(found))
    name = f"[{client.title}](../../tests/clients/programs/{client.program})"
    return f"| {name} | {' | '.join(sizes)} |"


def _outcome(client: Client, mode: str, own_checkpoints: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        (outcome,) = run(client.program, mode, 1, Path(directory), own_checkpoints=own_checkpoints)
    return outcome


def _script_row(published: Published) -> str:
    print(published.title, flush=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        plain = run_script(published, directory / "plain", watched=False)
        watched = run_script(published, directory / "watched")
        budget_mib = (plain.peak_bytes + watched.peak_bytes) // 2**21
        planned = run_script(published, directory / "planned", "--budget", f"{budget_mib}MiB")
    for each in (watched, planned):
        if (each.printed, each.left) != (plain.printed, plain.left):
            raise ClientError(f"{published.title} does not print or leave the same")
    (model,) = watched.report["models"]
    cells = [
        f"[{published.title}](../../tests/clients/scripts/{published.script})",
        format_size(plain.peak_bytes),
        format_size(watched.peak_bytes),
        f"{format_size(planned.peak_bytes)} of {format_size(budget_mib * 2**20)}",
        format_size(int(model["last_step"]["offloaded_bytes"])),
        published.note,
    ]
    return f"| {' | '.join(cells)} |"


def _facts(packages: tuple[str, ...]) -> str:
    facts = environment()
    known = [f"{key} {facts[key]}" for key in ("date", "device", "cores", "python", "torch")]
    known += [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return f"Measured with one thread: {', '.join(known)}."


if __name__ == "__main__":
    main()
