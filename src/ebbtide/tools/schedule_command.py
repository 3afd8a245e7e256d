"""``ebbtide schedule``: check a schedule and show it, its peak and the timeline of its step."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Final

import typer

from ebbtide.errors import PolicyError
from ebbtide.observe.trace import Trace
from ebbtide.rehearsal import rehearse
from ebbtide.schedule import Schedule, default, from_pipeline
from ebbtide.units import format_size, parse_size_bytes

FORMAT: Final = "ebbtide-schedule"
VERSION: Final = 1

_MOST_LINES = 24  # number of lines of the schedule that are shown


def schedule(
    file: Path | None = None,
    *,
    layers: str | None = None,
    pipeline: str | None = None,
    resident: int = 1,
    layer_size: str = "64MiB",
    forward_ms: float = 10.0,
    bandwidth: float = 25.0,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Check a schedule, and rehearse it without a model.

    A schedule says which layer's activations move at which moment of a training step. The rehearsal
    shows when each copy runs, where compute waits, and how much memory is in use at the peak.

    Args:
        file (FILE): Text file with a schedule; - reads standard input.
        layers (K/N): Instead of a file: offload the first k of N layers, such as 4/20.
        pipeline (PASSES): Instead of a file: the passes of a pipeline rank in order, such as "0F0
            0F1 0B0 0B1" (stage, forward or backward, microbatch).
        resident (N): With --pipeline: microbatches of a stage that stay on the device.
        layer_size (SIZE): Bytes that each layer saves.
        forward_ms (MS): Milliseconds of a layer's forward; backward takes twice that.
        bandwidth (GB/S): GB/s of the link, in each direction.
        out (FILE): File for a picture: .png, .svg or .pdf.
        json: Print all figures as JSON instead of the timeline.
    """
    for option, value in (("--forward-ms", forward_ms), ("--bandwidth", bandwidth)):
        if not value > 0:
            raise PolicyError(f"{option} must be more than 0, got {value:g}")
    plan = _read(file, layers, pipeline, resident)
    layer_bytes = parse_size_bytes(layer_size, name="--layer-size")
    bytes_per_s = bandwidth * 1e9
    trace = rehearse(
        plan,
        layer_bytes=layer_bytes,
        forward_s=forward_ms / 1e3,
        bandwidth_bytes_per_s=bytes_per_s,
    )
    if out is not None:
        trace.plot(out)
    figures = {
        "layer_bytes": layer_bytes,
        "peak_layers": plan.peak_resident,
        "peak_bytes": plan.peak_resident * layer_bytes,
        "peak_bytes_without": Schedule(plan.order).peak_resident * layer_bytes,
        "copy_s": layer_bytes / bytes_per_s,
    }
    if json:
        document = _as_document(plan, trace, figures)
        typer.echo(dumps(document, indent=1, allow_nan=False))
        return
    typer.echo("\n".join(_lines(plan, trace, figures)))
    if out is not None:
        typer.echo(f"\nPicture: {out}")


def _lines(plan: Schedule, trace: Trace, figures: Mapping[str, float]) -> list[str]:
    lines = str(plan).splitlines()
    rest = len(lines) - _MOST_LINES
    shown = lines if rest <= 1 else [*lines[:_MOST_LINES], f"... and {rest} more lines"]
    layer_bytes, size = int(figures["layer_bytes"]), format_size(int(figures["layer_bytes"]))
    peak, without = (
        f"{size_bytes // layer_bytes} x {size} = {format_size(size_bytes)}"
        for size_bytes in (int(figures["peak_bytes"]), int(figures["peak_bytes_without"]))
    )
    return [
        *shown,
        "",
        f"Peak on the device: {peak}.",
        f"Without offload: {without}.",
        f"A copy takes {figures['copy_s'] * 1e3:.3g} ms.",
        "",
        trace.timeline(),
    ]


def _as_document(plan: Schedule, trace: Trace, figures: Mapping[str, float]) -> dict[str, object]:
    waits_s = (event.duration_s for event in trace.events if event.what == "wait")
    return {
        "format": FORMAT,
        "version": VERSION,
        "schedule": str(plan),
        "anchors": {str(anchor): [str(action) for action in acts] for anchor, acts in plan.lines},
        **figures,
        "step_s": trace.duration_s,
        "waited_s": sum(waits_s),
        "events": [dataclasses.asdict(event) for event in trace.events],
    }


def _read(file: Path | None, layers: str | None, pipeline: str | None, resident: int) -> Schedule:
    """Return the schedule that was asked for.

    Raises:
        PolicyError: not exactly one schedule was given, or it cannot be read.
    """
    if sum(given is not None for given in (file, layers, pipeline)) != 1:
        raise PolicyError("give one schedule: a file, --layers 4/20, or --pipeline with --resident")
    if pipeline is not None:
        return from_pipeline(pipeline, resident=resident)
    if layers is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", layers.strip())
        if match is None:
            raise PolicyError(f"--layers {layers!r} is not of the form k/N, such as 4/20")
        chosen, number = int(match[1]), int(match[2])
        if chosen >= number:
            raise PolicyError(
                f"--layers {layers}: of {number} layers, fewer than {number} can be offloaded; the "
                f"backward of the last one follows its forward at once"
            )
        return default(chosen, number)
    assert file is not None
    text = sys.stdin.read() if str(file) == "-" else file.read_text()
    return Schedule.parse(text).check()
