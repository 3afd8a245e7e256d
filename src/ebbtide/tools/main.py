"""``ebbtide``: the entry point of the command line, and its small commands."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Final

import typer

from ebbtide.tools import plan_command, run_command, schedule_command, verify_command
from ebbtide.tools.exit_codes import (
    ExitCode,
    describe_codes,
    end,
    ends_by_code,
    flag,
    option,
    show_status,
)
from ebbtide.tools.run_command import SETTINGS, CommandLine
from ebbtide.version import __version__

# Plain help texts of 80 columns, whether they go to a terminal, a file or a pager.
_HELP: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
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


# There are many parameters because typer makes an option of each.
@app.command(epilog=describe_codes({ExitCode.FAILED: "the results differ, or a mode failed"}))
def demo(
    quick: Annotated[
        bool, flag("--quick", "A quick look: 128 x 128 nodes and 6 steps, a minute or two.")
    ] = False,
    resolution: Annotated[
        int | None,
        option(
            "--resolution",
            "N",
            "Nodes along each side of the grid, 32 or more; 256, or 128 with --quick.",
        ),
    ] = None,
    batch_size: Annotated[int, option("--batch-size", "N", "Samples in a training step.")] = 8,
    steps: Annotated[
        int | None,
        option(
            "--steps",
            "N",
            "Training steps of each mode, 3 or more; all but the first two are timed. 15, "
            "or 6 with --quick.",
        ),
    ] = None,
    modes: Annotated[
        str | None,
        option(
            "--modes",
            "NAMES",
            "What to compare: none (no offload), save_on_cpu (PyTorch's own, on an "
            "accelerator), rebuild (ebbtide without moving anything), ebbtide. Without it all but "
            "rebuild.",
        ),
    ] = None,
    device: Annotated[
        str, option("--device", "DEVICE", "Where to train: auto, cpu, cuda, cuda:1, xpu ...")
    ] = "auto",
    store: Annotated[
        str,
        option("--store", "STORE", "Where activations go: auto, host, disk[:/some/dir] or tiered."),
    ] = "auto",
    out: Annotated[Path, option("--out", "DIR", "Directory for the figures and the page.")] = Path(
        "runs/demo"
    ),
    as_json: Annotated[
        bool, flag("--json", "Print all figures as JSON instead of the table.")
    ] = False,
) -> None:
    """Train a neural operator with and without offload, and compare.

    Generates Darcy flow data, trains a Fourier neural operator on it without and with ebbtide, and
    shows memory, time, and whether all results are the same to the bit. Needs no accelerator, and
    takes some minutes on two cores, and one or two with --quick.
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
            same = run_demo(config, Console(stderr=True), as_json=as_json)
        except DeadModeError as error:
            end("demo", str(error), ExitCode.FAILED)
        if not same:
            raise typer.Exit(ExitCode.FAILED)


@app.command(
    epilog=describe_codes({ExitCode.FAILED: "a figure that a plan needs could not be measured"})
)
def doctor(
    quick: Annotated[bool, flag("--quick", "Measure for about 2 seconds instead of 12.")] = False,
    as_json: Annotated[
        bool, flag("--json", "Print the figures as JSON, for `ebbtide plan --hardware`.")
    ] = False,
    device: Annotated[
        str, option("--device", "DEVICE", "What to examine: auto, cpu, cuda, cuda:1, xpu ...")
    ] = "auto",
    store: Annotated[
        str,
        option("--store", "STORE", "Where files of activations would go: auto or disk:/some/dir."),
    ] = "auto",
) -> None:
    """Measure what this machine can do, and say what slows ebbtide.

    Measures compute, memory, the link between the accelerator and the host, and the disk. Says what
    to change, and how much can be offloaded here at what cost. Trains nothing, changes nothing.
    """
    with ends_by_code("doctor", "interrupted; nothing was left behind"):
        from ebbtide.planning.hardware import document
        from ebbtide.tools.doctor import advise, build_report
        from ebbtide.tools.examination import FULL, QUICK, examine
        from ebbtide.tools.machine import find_directory, parse_device

        torch_device = parse_device(device)
        if device == "auto" and torch_device.type == "mps":
            torch_device = parse_device("cpu")  # ebbtide refuses models on Apple's GPU
        try:
            found = examine(
                torch_device,
                find_directory(store),
                QUICK if quick else FULL,
                lambda what: show_status(f"measuring: {what}"),
            )
        finally:
            show_status("")
        advice, hardware = advise(found), found.hardware()
        if as_json:
            figures = {**asdict(found), "advice": advice}
            typer.echo(dumps(document(hardware, figures), indent=2))
        else:
            typer.echo(build_report(found, advice))
        if hardware is None:
            what = "problems in the JSON" if as_json else '"Not measured" in the report'
            end("doctor", f"the figures are incomplete; see {what}", ExitCode.FAILED)


@app.command(epilog=describe_codes())
def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN.JSON...",
            help="Files of handle.save_run, handle.trace.save or ebbtide run --json; the first "
            "run is what others are compared with.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="PAGE.HTML", help="The page to write.")
    ] = Path("run.html"),
    json: Annotated[
        bool, flag("--json", "Say as JSON on standard output what was written.")
    ] = False,
) -> None:
    """Make a page from the files of runs.

    It shows memory by owner, what each lane did, and a table of the layers. It is one file that
    loads nothing from the network.
    """
    from ebbtide.observe.page import write_page
    from ebbtide.observe.run_record import load_records

    with ends_by_code("report"):
        write_page(out, [record for file in files for record in load_records(file)])
    if json:
        typer.echo(dumps({"page": str(out), "runs": [str(file) for file in files]}, indent=2))
    else:
        typer.echo(f"Page: {out}")


app.command(epilog=plan_command.EPILOG)(plan_command.plan)
app.command(context_settings=SETTINGS, epilog=run_command.EPILOG)(run_command.run)
app.command(epilog=schedule_command.EPILOG)(schedule_command.schedule)
app.command(context_settings=SETTINGS, epilog=verify_command.EPILOG)(verify_command.verify)


if __name__ == "__main__":
    app()
