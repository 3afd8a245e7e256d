"""``ebbtide doctor``: parse the options, examine and print."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ebbtide.tools.exit_codes import ExitCode, describe_codes, end, ends_by_code, show_status

EPILOG = describe_codes({ExitCode.FAILED: "a figure that a plan needs could not be measured"})


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure for about 2 seconds instead of 12.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the figures as JSON, for `ebbtide plan --hardware`."),
    ] = False,
    device: Annotated[
        str,
        typer.Option(metavar="DEVICE", help="What to examine: auto, cpu, cuda, cuda:1, xpu ..."),
    ] = "auto",
    store: Annotated[
        str,
        typer.Option(
            metavar="STORE", help="Where files of activations would go: auto or disk:/some/dir."
        ),
    ] = "auto",
) -> None:
    """Measure what this machine can do, and say what slows ebbtide.

    Measures compute, memory, the link between the accelerator and the host, and the disk. Says what
    to change, and how much can be offloaded here at what cost. Trains nothing, changes nothing.
    """
    with ends_by_code("doctor", "interrupted; nothing was left behind"):
        from ebbtide.planning.hardware import document
        from ebbtide.stores.build import parse_store
        from ebbtide.tools.demo_config import parse_device
        from ebbtide.tools.doctor import advise, build_report
        from ebbtide.tools.examination import FULL, QUICK, examine

        torch_device = parse_device(device)
        if device == "auto" and torch_device.type == "mps":
            torch_device = parse_device("cpu")  # ebbtide refuses models on Apple's GPU
        _, directory = parse_store(store)
        try:
            found = examine(
                torch_device,
                directory,
                QUICK if quick else FULL,
                lambda what: show_status(f"measuring: {what}"),
            )
        finally:
            show_status("")
        advice, hardware = advise(found), found.hardware()
        if as_json:
            figures = {**found.figures(), "advice": advice}
            typer.echo(json.dumps(document(hardware, figures), indent=2))
        else:
            typer.echo(build_report(found, advice))
        if hardware is None:
            what = "problems in the JSON" if as_json else '"Not measured" in the report'
            end("doctor", f"the figures are incomplete; see {what}", ExitCode.FAILED)
