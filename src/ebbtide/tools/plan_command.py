"""``ebbtide plan``: parse the options and print; `ebbtide.tools.plan_tables` does the work."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import typer

from ebbtide.tools.exit_codes import ExitCode, ends_by_code, status


def plan(
    model: str,
    *,
    resolution: int | None = None,
    seq: int | None = None,
    batch: int | None = None,
    hardware: str = "h100",
    budget: str = "90%",
    size: str | None = None,
    width: int | None = None,
    modes: int | None = None,
    layers: int | None = None,
    plan_layers: list[str] | None = None,
    optimizer_states: int = 2,
    weights: bool = False,
    quick: bool = False,
    save: Path | None = None,
    json: bool = False,
) -> None:
    """Predict a training step without running it.

    Says whether the step fits into the memory budget, which layers should be kept, offloaded,
    rebuilt or recomputed, and how long the step takes. Needs no accelerator: nothing is computed.

    Args:
        model (MODEL): fno1d, fno2d, fno3d, tfno, uno, gpt, llama; or your own as module:function,
            where function() returns (model, batch) or (model, batch, loss).
        resolution (N): Points along each side of a neural operator's grid.
        seq (N): Tokens in a sequence of gpt or llama.
        batch (N): Samples in a step.
        hardware (MACHINE): The machine: a name such as h100 or rtx4090, or a file that `ebbtide
            doctor --json` printed on yours.
        budget (SIZE): Memory that training may take: 24GiB, or 90% of what the device has.
        size (NAME): Size of gpt or llama, such as 7b.
        width (N): Hidden channels of a neural operator.
        modes (N): Fourier modes in each direction.
        layers (N): Layers of a neural operator.
        plan_layers (PATTERN): Modules whose calls are the layers of the plan, such as blocks.*;
            repeatable.
        optimizer_states (N): Tensors that the optimizer keeps for each weight; Adam has 2.
        weights: Weights, gradients and the optimizer's state may rest on the host, if that is
            faster or nothing else fits.
        quick: Leave out the search for the largest batch and resolution.
        save (FILE): File for the plan; `ebbtide run --plan` follows it.
        json: Print all figures as JSON instead of the report.
    """
    with ends_by_code("plan"):
        from ebbtide.tools.plan_tables import as_document, build_report, run_plan

        options = {
            "resolution": resolution, "seq": seq, "batch": batch, "width": width, "modes": modes,
            "layers": layers, "size": size,
        }  # fmt: skip
        # A user's model may print what it likes, and other programs read the report or JSON.
        with status() as say, contextlib.redirect_stdout(sys.stderr):
            found = run_plan(
                model, options, hardware, budget, layers=plan_layers or (),
                optimizer_states=optimizer_states, weights=weights, limits=not quick,
                save=save, say=say,
            )  # fmt: skip
            text = as_document(found) if json else build_report(found)
        typer.echo(text)
        if found.chosen is None:
            raise typer.Exit(ExitCode.DOES_NOT_FIT)
        if save is not None and not json:
            typer.echo(f"\nPlan: {save}")
