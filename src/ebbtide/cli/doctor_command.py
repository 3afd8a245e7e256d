"""``ebbtide doctor``: parse the options and print; `ebbtide.doctor` does the work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

_INTERRUPTED = 130  # as shells say it of a program that Ctrl-C ended


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure for about 2 seconds instead of 12.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures for a plan to read.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, xpu ...")] = "auto",
    store: Annotated[
        str, typer.Option(help="Where files would go: auto or disk:/some/dir.")
    ] = "auto",
) -> None:
    """Measure this machine's links, memory, disk and compute; say what slows ebbtide."""
    try:
        is_complete = _run(quick, as_json, device, store)
    except KeyboardInterrupt:
        typer.echo("\nebbtide doctor: interrupted; nothing was left behind", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if as_json and not is_complete:
        typer.echo("ebbtide doctor: the figures are incomplete; see problems in them", err=True)
        raise typer.Exit(1)


def _run(quick: bool, as_json: bool, device: str, store: str) -> bool:
    from ebbtide.demo.config import UsageError, parse_device
    from ebbtide.errors import EbbtideError
    from ebbtide.stores.build import parse_store

    try:
        torch_device = parse_device(device)
        if device == "auto" and torch_device.type == "mps":
            torch_device = parse_device("cpu")  # ebbtide refuses models on Apple's GPU
        _, directory = parse_store(store)
        return examine_and_print(torch_device, directory, quick, as_json)
    except (UsageError, EbbtideError) as error:
        typer.echo(f"ebbtide doctor: {error}", err=True)
        raise typer.Exit(2) from None


def examine_and_print(
    device: torch.device, directory: Path | None, quick: bool, as_json: bool
) -> bool:
    """Measure, and print the report or the JSON.

    Args:
        device: what models would compute on.
        directory: where files of offloaded bytes would go; None: the system's choice.
        quick: measure for a few seconds only.
        as_json: print JSON instead of the report.

    Returns:
        Whether all figures that a plan needs were measured.
    """
    from ebbtide.doctor.doctor_report import build_report
    from ebbtide.doctor.examination import FULL, QUICK, examine
    from ebbtide.doctor.recommendations import advise
    from ebbtide.planning.hardware import document

    progress = sys.stderr.isatty()

    def say(what: str) -> None:
        if progress:  # one line, written over by the next
            print(f"\rmeasuring: {what:<40}", end="", file=sys.stderr, flush=True)

    found = examine(device, directory, QUICK if quick else FULL, say)
    if progress:
        print(f"\r{'':<60}\r", end="", file=sys.stderr, flush=True)
    advice, hardware = advise(found), found.hardware()
    if as_json:
        figures = {**found.figures(), "advice": advice}
        typer.echo(json.dumps(document(hardware, figures), indent=2))
    else:
        typer.echo(build_report(found, advice))
    return hardware is not None
