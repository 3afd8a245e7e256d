"""``ebbtide verify``: parse the options and print; `verify_script` runs the script."""

from __future__ import annotations

import json
from typing import Annotated, Literal, cast

import typer

from ebbtide.tools.exit_codes import ExitCode, describe_codes, ends_by_code
from ebbtide.tools.run_command import (
    Arguments,
    AsModule,
    Budget,
    Layers,
    MinBytes,
    Mode,
    Store,
    Weights,
)

EPILOG = describe_codes(
    {
        ExitCode.DONE: "every run gave the same results",
        ExitCode.FAILED: "a run gave others, or nothing was offloaded",
        ExitCode.DOES_NOT_FIT: "no plan fits into the budget",
    }
)


# There are many parameters because typer makes an option of each.
def verify(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="Your training script; with -m the name of a module."
        ),
    ],
    arguments: Arguments = None,
    as_module: AsModule = False,
    budget: Budget = None,
    store: Store = "auto",
    layers: Layers = None,
    mode: Mode = "offload",
    min_bytes: MinBytes = "1B",
    weights: Weights = False,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Training steps in each run.")
    ] = 3,
    orders: Annotated[
        int, typer.Option("--orders", metavar="N", help="How many provocations are tried.")
    ] = 7,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", metavar="N", help="Seed of the first; the others have the next ones."
        ),
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as JSON instead of the report.")
    ] = False,
) -> None:
    """Check that offloading leaves every bit of your training as it is.

    Runs a few training steps plainly and offloaded, in orders that bring races to light, and
    compares losses, gradients, parameters, buffers and random states to the bit. Options of
    ebbtide come before the script, its own after it.
    """
    with ends_by_code("verify"):
        from ebbtide.errors import PolicyError
        from ebbtide.policy import ActivationPolicy
        from ebbtide.tools.found_models import RunOptions
        from ebbtide.tools.run import MainScript
        from ebbtide.tools.verify_script import verify_script

        activations = ActivationPolicy(min_bytes=min_bytes, mode=cast(Literal["offload"], mode))
        options = RunOptions(
            activations=activations, budget=budget, store=store, layers=tuple(layers or ()),
            weights=weights,
        )  # fmt: skip
        if steps < 1 or orders < 0:
            raise PolicyError("--steps is at least 1, and --orders at least 0")
        to_run = MainScript(script, arguments or (), is_module=as_module)
        report = verify_script(to_run, options, steps, range(seed, seed + orders))
    typer.echo(json.dumps(report.document(), indent=2) if as_json else str(report))
    if not report.same:
        raise typer.Exit(ExitCode.FAILED)
