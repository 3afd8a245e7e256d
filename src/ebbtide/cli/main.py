"""``ebbtide``: the entry point of the command line. Each command has a file of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from ebbtide.cli.demo_command import demo
from ebbtide.cli.doctor_command import doctor
from ebbtide.cli.plan_command import plan
from ebbtide.cli.run_command import SETTINGS, CommandLine, run
from ebbtide.cli.schedule_command import schedule
from ebbtide.version import __version__

app = CommandLine(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)
app.command()(doctor)
app.command()(plan)
app.command(context_settings=SETTINGS)(run)
app.command()(schedule)


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
