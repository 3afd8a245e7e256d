"""``ebbtide plan``: parse the options and print; `ebbtide.studies` does the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


# There are many parameters because typer makes an option of each.
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="fno1d, fno2d, fno3d, tfno, uno, gpt, llama, or module:function, which returns "
            "(model, batch) or (model, batch, loss)."
        ),
    ],
    resolution: Annotated[
        int | None, typer.Option(help="Points along each side of the grid.")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples in a step.")] = None,
    hardware: Annotated[
        str, typer.Option(help="A preset such as h100, or a file of `ebbtide doctor --json`.")
    ] = "h100",
    budget: Annotated[
        str, typer.Option(help="Device memory: 24GiB, or 90% of what the device has.")
    ] = "90%",
    size: Annotated[str | None, typer.Option(help="Size of gpt or llama, such as 7b.")] = None,
    precision: Annotated[str | None, typer.Option(help="Of gpt and llama: bf16 or fp32.")] = None,
    width: Annotated[int | None, typer.Option(help="Hidden channels of a neural operator.")] = None,
    modes: Annotated[int | None, typer.Option(help="Fourier modes in each direction.")] = None,
    depth: Annotated[
        int | None, typer.Option("--layers", help="Layers of a neural operator.")
    ] = None,
    channels: Annotated[int | None, typer.Option(help="Channels of a field.")] = None,
    planned: Annotated[
        list[str] | None,
        typer.Option("--plan-layers", help="Modules to plan for, such as blocks.*; repeatable."),
    ] = None,
    optimizer_states: Annotated[
        int, typer.Option(help="Tensors that the optimizer keeps for each weight; Adam has 2.")
    ] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the largest sizes that fit.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="File for a picture of the step: .png, .svg or .pdf.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="File for the plan, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Predict a training step: what fits, what should move, how long it takes. No accelerator."""
    from ebbtide.errors import EbbtideError
    from ebbtide.studies.built_in_models import ModelOptions
    from ebbtide.studies.plan_study import Outputs, Request, run_plan

    options = ModelOptions(
        resolution=resolution, seq=seq, batch=batch, width=width, modes=modes, layers=depth,
        channels=channels, size=size, precision=precision,
    )  # fmt: skip
    request = Request(
        model, options, hardware, budget, tuple(planned or ()), optimizer_states, not quick
    )
    try:
        fits = run_plan(request, Outputs(typer.echo, picture, save, as_json), _say)
    except (EbbtideError, ImportError, OSError) as error:
        _clear()
        typer.echo(f"ebbtide plan: {error}", err=True)
        raise typer.Exit(2) from None
    if not fits:
        raise typer.Exit(1)


def _say(what: str) -> None:
    """Show on a terminal what is being looked for, in one line that is written over; "": none."""
    if not sys.stderr.isatty():
        return
    _clear()
    if what:
        print(f"\r{what[:70]} ...", end="", file=sys.stderr, flush=True)


def _clear() -> None:
    if sys.stderr.isatty():
        print(f"\r{'':<79}\r", end="", file=sys.stderr, flush=True)
