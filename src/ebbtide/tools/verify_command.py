"""``ebbtide verify``: parse the options and print; `ebbtide.verifying` does the work."""

from __future__ import annotations

import contextlib
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import typer

from ebbtide.tools.exit_codes import ExitCode, ends_by_code

if TYPE_CHECKING:
    from ebbtide.tools.found_models import RunOptions
    from ebbtide.verifying import VerifyReport


def verify(
    target: str,
    arguments: list[str] | None = None,
    *,
    module: bool = False,
    budget: str | None = None,
    store: str = "auto",
    layers: list[str] | None = None,
    mode: str = "offload",
    min_bytes: str = "1B",
    weights: bool = False,
    steps: int = 3,
    orders: int = 7,
    seed: int = 0,
    device: str | None = None,
    offloader: str | None = None,
    json: bool = False,
) -> None:
    """Check that offloading leaves every bit of your training as it is.

    Runs a few training steps plainly and offloaded, in orders that bring races to light, and
    compares losses, gradients, parameters, buffers and random states to the bit. Options of
    ebbtide come before the script, its own after it.

    Args:
        target (TARGET): Your training script; or module:function, where function() returns (model,
            batch) or (model, batch, loss).
        arguments (ARGUMENTS): What the script itself is given.
        module (-m): The script is a module, as for python -m.
        budget (SIZE): Most memory that training may take: 20GiB, or 90% of all there is.
        store (STORE): Where activations go: auto, host, disk[:/some/dir] or tiered[:/dir].
        layers (PATTERN): Modules whose calls are the layers, such as blocks.*; repeatable.
        mode (MODE): Without a budget: offload, recompute or recompute+offload.
        min_bytes (SIZE): Tensors smaller than this stay on the device.
        weights: Keep weights off the device, too, while their layer does not compute.
        steps (N): Training steps in each run.
        orders (N): How many provocations are tried.
        seed (N): Seed of the first; the others have the next ones.
        device (DEVICE): module:function only: where it trains, such as cuda.
        offloader (NAME): module:function only: verify another library, which is save_on_cpu,
            torchtune, trl, deepspeed, transformer_engine, or module:function of the model.
        json: Print all figures as JSON instead of the report.
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
        seeds = range(seed, seed + orders)
        with contextlib.redirect_stdout(sys.stderr):  # a model may print what it likes
            if ":" in target and not Path(target).exists():
                if arguments:
                    raise PolicyError(f"options of ebbtide stand before {target}, which takes none")
                report = _verify_function(target, device, options, steps, seeds, offloader)
            elif device is not None or offloader is not None:
                raise PolicyError(
                    "--device and --offloader need module:function; a script runs as it is"
                )
            else:
                script = MainScript(target, arguments or (), is_module=module)
                report = verify_script(script, options, steps, seeds)
    typer.echo(dumps(report.document(), indent=2) if json else str(report))
    if not report.same:
        raise typer.Exit(ExitCode.FAILED)


def _verify_function(
    address: str,
    device: str | None,
    options: RunOptions,
    steps: int,
    seeds: range,
    offloader: str | None,
) -> VerifyReport:
    """Verify the training step that a user's function returns."""
    import torch

    from ebbtide.policy import WeightPolicy
    from ebbtide.runtime.torch_internals import tree_map_only
    from ebbtide.tools.models import find_function, read_task
    from ebbtide.verifying import verify

    model, batch, loss = read_task(address, find_function(address)())
    if device is not None:
        model = model.to(device)
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
    offload = options.arguments(model, frugal=False)
    if options.weights:
        offload["weights"] = WeightPolicy(min_bytes=1)
    given: Any = offloader
    if offloader is not None and ":" in offloader:
        given = find_function(offloader)
    return verify(
        model, batch, loss, steps=steps, offload=offload, offloader=given, orders=len(seeds),
        seed=seeds.start,
    )  # fmt: skip
