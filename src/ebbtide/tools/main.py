"""``ebbtide``: the entry point of the command line. Each command has a file of its own."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from ebbtide.tools import (
    demo_command,
    doctor_command,
    plan_command,
    report_command,
    run_command,
    schedule_command,
    verify_command,
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
app.command(epilog=demo_command.EPILOG)(demo_command.demo)
app.command(epilog=doctor_command.EPILOG)(doctor_command.doctor)
app.command(epilog=plan_command.EPILOG)(plan_command.plan)
app.command(epilog=report_command.EPILOG)(report_command.report)
app.command(context_settings=SETTINGS, epilog=run_command.EPILOG)(run_command.run)
app.command(epilog=schedule_command.EPILOG)(schedule_command.schedule)
app.command(context_settings=SETTINGS, epilog=verify_command.EPILOG)(verify_command.verify)


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


if __name__ == "__main__":
    app()
