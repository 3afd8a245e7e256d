"""``ebbtide demo``: parse the options and set the exit code; `ebbtide.demo` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


# There are many parameters because typer makes an option of each.
def demo(
    resolution: Annotated[
        int, typer.Option(help="Nodes along each side of the grid, 32 or more.")
    ] = 256,
    batch_size: Annotated[int, typer.Option(help="Samples in a training step.")] = 8,
    steps: Annotated[int, typer.Option(help="Steps per mode; three of every five are timed.")] = 15,
    modes: Annotated[str, typer.Option(help="Modes to compare.")] = "none,save_on_cpu,ebbtide",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, xpu ...")] = "auto",
    store: Annotated[str, typer.Option(help="auto, host, disk[:/some/dir] or tiered.")] = "auto",
    data: Annotated[
        Path | None, typer.Option(help="Directory of published .pt files or for generated data.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for the results.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Random seed of data and weights.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Torch threads per process.")] = None,
    warm_steps: Annotated[int, typer.Option(help="Warm-start steps on a coarse grid.")] = 100,
) -> None:
    """Train an FNO on Darcy flow with and without offload; compare memory, time and bits."""
    from ebbtide.demo.config import DemoConfig, UsageError, parse_device, parse_modes
    from ebbtide.demo.run import run_demo
    from ebbtide.demo.team import WorkerError

    console = Console()
    try:
        torch_device = parse_device(device)
        chosen = parse_modes(modes, torch_device)
        config = DemoConfig(
            resolution, batch_size, steps, chosen, torch_device, store, data, out, seed, threads,
            warm_steps,
        )  # fmt: skip
        if torch_device.type == "cpu" and "save_on_cpu" in modes:
            console.print("save_on_cpu is left out: on a CPU, activations are on the host anyway")
        same = run_demo(config, console)
    except UsageError as error:
        typer.echo(f"ebbtide demo: {error}", err=True)
        raise typer.Exit(2) from None
    except WorkerError as error:
        typer.echo(f"{error.trace}ebbtide demo: {error}", err=True)
        raise typer.Exit(1) from None
    if not same:
        raise typer.Exit(1)
