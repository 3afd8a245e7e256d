"""``ebbtide``: the entry point of the command line, and its small commands."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Final

import typer

from ebbtide.tools.exit_codes import ExitCode, add_command, end, ends_by_code, status
from ebbtide.tools.plan_command import plan
from ebbtide.tools.run_command import CommandLine, run
from ebbtide.tools.schedule_command import schedule
from ebbtide.tools.verify_command import verify
from ebbtide.version import __version__

# Plain help texts of 80 columns, whether they go to a terminal, a file or a pager.
_HELP: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
_SCRIPT: Final = {"allow_interspersed_args": False}  # what follows the script is the script's own
_EPILOG: Final = "\n\n".join(
    [
        "Begin with `ebbtide demo --quick`, then `ebbtide run train.py` with a script of your own.",
        "Reports go to standard output and progress to standard error. NO_COLOR turns colours off. "
        "Every command takes --json. `ebbtide COMMAND --help` lists its options and exit codes.",
    ]
)

app = CommandLine(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_HELP,
    epilog=_EPILOG,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ebbtide {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train with less accelerator memory and bitwise the same results."""


def demo(
    *,
    quick: bool = False,
    resolution: int | None = None,
    batch_size: int = 8,
    steps: int | None = None,
    modes: str | None = None,
    device: str = "auto",
    store: str = "auto",
    out: Path = Path("runs/demo"),
    json: bool = False,
) -> None:
    """Train a neural operator with and without offload, and compare.

    Generates Darcy flow data, trains a Fourier neural operator on it without and with ebbtide, and
    shows memory, time, and whether all results are the same to the bit. Needs no accelerator, and
    takes some minutes on two cores, and one or two with --quick.

    Args:
        quick: A quick look: 128 x 128 nodes and 6 steps, a minute or two.
        resolution (N): Nodes along each side of the grid, 32 or more; 256, or 128 with --quick.
        batch_size (N): Samples in a training step.
        steps (N): Training steps of each mode, 3 or more; all but the first two are timed. 15, or 6
            with --quick.
        modes (NAMES): What to compare: none (no offload), save_on_cpu (PyTorch's own, on an
            accelerator), rebuild (ebbtide without moving anything), ebbtide. Without it all but
            rebuild.
        device (DEVICE): Where to train: auto, cpu, cuda, cuda:1, xpu ...
        store (STORE): Where activations go: auto, host, disk[:/some/dir] or tiered.
        out (DIR): Directory for the figures and the page.
        json: Print all figures as JSON instead of the table.
    """
    with ends_by_code("demo"):
        from rich.console import Console

        from ebbtide.tools.demo import QUICK, DeadModeError, DemoConfig, parse_modes, run_demo
        from ebbtide.tools.machine import parse_device

        torch_device = parse_device(device)
        sizes = dict(QUICK) if quick else {}
        asked = {"resolution": resolution, "steps": steps}
        sizes |= {name: number for name, number in asked.items() if number is not None}
        config = DemoConfig(
            batch_size=batch_size, modes=parse_modes(modes, torch_device), device=torch_device,
            store=store, out=out, **sizes,
        )  # fmt: skip
        try:
            same = run_demo(config, Console(stderr=True), as_json=json)
        except DeadModeError as error:
            end("demo", str(error), ExitCode.FAILED)
        if not same:
            raise typer.Exit(ExitCode.FAILED)


def doctor(
    *, quick: bool = False, json: bool = False, device: str = "auto", store: str = "auto"
) -> None:
    """Measure what this machine can do, and say what slows ebbtide.

    Measures compute, memory, the link between the accelerator and the host, and the disk. Says what
    to change, and how much can be offloaded here at what cost. Trains nothing, changes nothing.

    Args:
        quick: Measure for about 2 seconds instead of 12.
        json: Print the figures as JSON, for `ebbtide plan --hardware`.
        device (DEVICE): What to examine: auto, cpu, cuda, cuda:1, xpu ...
        store (STORE): Where files of activations would go: auto or disk:/some/dir.
    """
    with ends_by_code("doctor", "interrupted; nothing was left behind"):
        from ebbtide.planning.hardware import document
        from ebbtide.tools.doctor import advise, build_report
        from ebbtide.tools.examination import FULL, QUICK, examine
        from ebbtide.tools.machine import find_directory, parse_device

        torch_device = parse_device(device)
        if device == "auto" and torch_device.type == "mps":
            torch_device = parse_device("cpu")  # ebbtide refuses models on Apple's GPU
        with status() as say:
            found = examine(torch_device, find_directory(store), QUICK if quick else FULL, say)
        advice, hardware = advise(found), found.hardware()
        if json:
            figures = {**asdict(found), "advice": advice}
            typer.echo(dumps(document(hardware, figures), indent=2))
        else:
            typer.echo(build_report(found, advice))
        if hardware is None:
            what = "problems in the JSON" if json else '"Not measured" in the report'
            end("doctor", f"the figures are incomplete; see {what}", ExitCode.FAILED)


def report(files: list[Path], *, out: Path = Path("run.html"), json: bool = False) -> None:
    """Make a page from the files of runs.

    It shows memory by owner, what each lane did, and a table of the layers. It is one file that
    loads nothing from the network.

    Args:
        files (RUN.JSON...): Files of handle.save_run, handle.trace.save or ebbtide run --json; the
            first run is what others are compared with.
        out (-o, PAGE.HTML): The page to write.
        json: Say as JSON on standard output what was written.
    """
    from ebbtide.observe.page import write_page
    from ebbtide.observe.run_record import load_records

    with ends_by_code("report"):
        write_page(out, [record for file in files for record in load_records(file)])
    if json:
        typer.echo(dumps({"page": str(out), "runs": [str(file) for file in files]}, indent=2))
    else:
        typer.echo(f"Page: {out}")


add_command(app, demo, {ExitCode.FAILED: "the results differ, or a mode failed"})
add_command(app, doctor, {ExitCode.FAILED: "a figure that a plan needs could not be measured"})
add_command(app, report)
add_command(app, plan, {ExitCode.DOES_NOT_FIT: "no plan fits into the budget"})
add_command(
    app,
    run,
    {
        ExitCode.DONE: "the script ended well; whatever else it ends with comes through",
        ExitCode.DOES_NOT_FIT: "no plan fits into the budget",
    },
    context_settings=_SCRIPT,
)
add_command(app, schedule)
add_command(
    app,
    verify,
    {
        ExitCode.DONE: "every run gave the same results",
        ExitCode.FAILED: "a run gave others, or nothing was offloaded",
        ExitCode.DOES_NOT_FIT: "no plan fits into the budget",
    },
    context_settings=_SCRIPT,
)


if __name__ == "__main__":
    app()
