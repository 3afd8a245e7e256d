"""``ebbtide report``: make a page from the files of runs."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.tools.exit_codes import describe_codes, ends_by_code

EPILOG = describe_codes()


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
        bool, typer.Option("--json", help="Say as JSON on standard output what was written.")
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
