"""``ebbtide plan``: parse the options and print; `ebbtide.tools.plan_tables` does the work."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.tools.exit_codes import (
    ExitCode,
    describe_codes,
    ends_by_code,
    flag,
    option,
    show_status,
)

EPILOG = describe_codes({ExitCode.DOES_NOT_FIT: "no plan fits into the budget"})


# There are many parameters because typer makes an option of each.
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="fno1d, fno2d, fno3d, tfno, uno, gpt, llama; or your own as module:function, "
            "where function() returns (model, batch) or (model, batch, loss).",
        ),
    ],
    resolution: Annotated[
        int | None,
        option("--resolution", "N", "Points along each side of a neural operator's grid."),
    ] = None,
    seq: Annotated[
        int | None, option("--seq", "N", "Tokens in a sequence of gpt or llama.")
    ] = None,
    batch: Annotated[int | None, option("--batch", "N", "Samples in a step.")] = None,
    hardware: Annotated[
        str,
        option(
            "--hardware",
            "MACHINE",
            "The machine: a name such as h100 or rtx4090, or a file that "
            "`ebbtide doctor --json` printed on yours.",
        ),
    ] = "h100",
    budget: Annotated[
        str,
        option(
            "--budget",
            "SIZE",
            "Memory that training may take: 24GiB, or 90% of what the device has.",
        ),
    ] = "90%",
    size: Annotated[
        str | None, option("--size", "NAME", "Size of gpt or llama, such as 7b.")
    ] = None,
    width: Annotated[
        int | None, option("--width", "N", "Hidden channels of a neural operator.")
    ] = None,
    modes: Annotated[int | None, option("--modes", "N", "Fourier modes in each direction.")] = None,
    depth: Annotated[int | None, option("--layers", "N", "Layers of a neural operator.")] = None,
    planned: Annotated[
        list[str] | None,
        option(
            "--plan-layers",
            "PATTERN",
            "Modules whose calls are the layers of the plan, such as blocks.*; repeatable.",
        ),
    ] = None,
    optimizer_states: Annotated[
        int,
        option(
            "--optimizer-states",
            "N",
            "Tensors that the optimizer keeps for each weight; Adam has 2.",
        ),
    ] = 2,
    weights: Annotated[
        bool,
        flag(
            "--weights",
            "Weights, gradients and the optimizer's state may rest on the host, if that is "
            "faster or nothing else fits.",
        ),
    ] = False,
    quick: Annotated[
        bool, flag("--quick", "Leave out the search for the largest batch and resolution.")
    ] = False,
    save: Annotated[
        Path | None, option("--save", "FILE", "File for the plan; `ebbtide run --plan` follows it.")
    ] = None,
    as_json: Annotated[
        bool, flag("--json", "Print all figures as JSON instead of the report.")
    ] = False,
) -> None:
    """Predict a training step without running it.

    Says whether the step fits into the memory budget, which layers should be kept, offloaded,
    rebuilt or recomputed, and how long the step takes. Needs no accelerator: nothing is computed.
    """
    with ends_by_code("plan"):
        from ebbtide.tools.models import ModelOptions
        from ebbtide.tools.plan_tables import as_document, build_report, run_plan

        options = ModelOptions(
            resolution=resolution, seq=seq, batch=batch, width=width, modes=modes, layers=depth,
            size=size,
        )  # fmt: skip
        try:
            # A user's model may print what it likes, and other programs read the report or JSON.
            with contextlib.redirect_stdout(sys.stderr):
                found = run_plan(
                    model, options, hardware, budget, layers=planned or (),
                    optimizer_states=optimizer_states, weights=weights, limits=not quick,
                    save=save, say=show_status,
                )  # fmt: skip
                text = as_document(found) if as_json else build_report(found)
        finally:
            show_status("")
        typer.echo(text)
        if found.chosen is None:
            raise typer.Exit(ExitCode.DOES_NOT_FIT)
        if save is not None and not as_json:
            typer.echo(f"\nPlan: {save}")
