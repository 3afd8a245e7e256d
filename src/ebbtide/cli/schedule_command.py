"""``ebbtide schedule``: check a schedule and show it, its peak and the timeline of its step."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.errors import EbbtideError, PolicyError
from ebbtide.rehearsal import rehearse
from ebbtide.schedule import Schedule, default, from_pipeline
from ebbtide.units import format_size, parse_size_bytes

_MOST_LINES = 24  # number of lines of the schedule that are shown


def schedule(
    file: Annotated[
        Path | None, typer.Argument(help="Text file with a schedule; - reads standard input.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Default schedule for k of N layers, such as 4/20.")
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option(help='Order of a pipeline rank, such as "0F0 0F1 0B0 0B1".')
    ] = None,
    resident: Annotated[
        int, typer.Option(help="Maximum microbatches of a stage on the device, with --pipeline.")
    ] = 1,
    layer_size: Annotated[str, typer.Option(help="Bytes that a layer saves.")] = "64MiB",
    forward_ms: Annotated[
        float, typer.Option(help="Milliseconds of a layer's forward; backward takes twice that.")
    ] = 10.0,
    bandwidth: Annotated[float, typer.Option(help="Link bandwidth each way, in GB/s.")] = 25.0,
    out: Annotated[
        Path | None, typer.Option(help="File for a picture: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Check a schedule and show the timeline of the step that it gives, without a model."""
    try:
        show_schedule(
            file, layers, pipeline, resident, layer_size, forward_ms / 1e3, bandwidth * 1e9, out
        )
    except (EbbtideError, OSError, ImportError) as error:
        typer.echo(f"ebbtide schedule: {error}", err=True)
        raise typer.Exit(2) from None


# There are many parameters because the command has an option for each.
def show_schedule(
    file: Path | None,
    layers: str | None,
    pipeline: str | None,
    resident: int,
    layer_size: str,
    forward_s: float,
    bandwidth_bytes_per_s: float,
    out: Path | None,
) -> None:
    """Print the schedule, its peak and its timeline.

    Raises:
        PolicyError: not exactly one schedule was given, or a size or a time is not valid.
        ScheduleError: the schedule cannot be read or run.
    """
    if sum(given is not None for given in (file, layers, pipeline)) != 1:
        raise PolicyError("give one schedule: a file, --layers 4/20, or --pipeline with --resident")
    plan = _read(file, layers, pipeline, resident)
    layer_bytes = parse_size_bytes(layer_size, name="--layer-size")
    trace = rehearse(
        plan,
        layer_bytes=layer_bytes,
        forward_s=forward_s,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
    )
    lines = str(plan).splitlines()
    rest = len(lines) - _MOST_LINES
    shown = lines if rest <= 1 else [*lines[:_MOST_LINES], f"... and {rest} more lines"]
    typer.echo("\n".join(shown))
    without = Schedule(plan.order).peak_resident
    typer.echo(
        f"\nPeak on the device: {plan.peak_resident} x {layer_size} = "
        f"{format_size(plan.peak_resident * layer_bytes)}.\n"
        f"Without offload: {without} x {layer_size} = {format_size(without * layer_bytes)}.\n"
        f"A copy takes {layer_bytes / bandwidth_bytes_per_s * 1e3:.3g} ms.\n"
    )
    typer.echo(trace.timeline())
    if out is not None:
        trace.plot(out)
        typer.echo(f"\nPicture: {out}")


def _read(file: Path | None, layers: str | None, pipeline: str | None, resident: int) -> Schedule:
    if pipeline is not None:
        return from_pipeline(pipeline, resident=resident)
    if layers is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", layers.strip())
        if match is None:
            raise PolicyError(f"--layers {layers!r} is not of the form k/N, such as 4/20")
        return default(int(match[1]), int(match[2]))
    assert file is not None
    text = sys.stdin.read() if str(file) == "-" else file.read_text()
    return Schedule.parse(text).check()
