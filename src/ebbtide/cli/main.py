"""``ebbtide``: the commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ebbtide.version import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ebbtide {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Train with less accelerator memory and the same numbers, to the bit."""


# Every parameter is an option of the command line: that is how typer has them.
@app.command()
def demo(
    resolution: Annotated[int, typer.Option(help="Nodes a side of the grid, 32 or more.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Samples in a step.")] = 8,
    steps: Annotated[int, typer.Option(help="Steps per mode; of five, three are timed.")] = 15,
    modes: Annotated[str, typer.Option(help="What to compare.")] = "none,save_on_cpu,ebbtide",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, xpu ...")] = "auto",
    store: Annotated[str, typer.Option(help="auto, host, disk[:/some/dir] or tiered.")] = "auto",
    data: Annotated[
        Path | None, typer.Option(help="Published .pt files, or where to keep generated data.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where demo.json and demo.png go.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of data and weights.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Torch threads in a process.")] = None,
    warm_steps: Annotated[int, typer.Option(help="Steps on a coarse grid before.")] = 100,
) -> None:
    """Train an FNO on Darcy flow with and without offload; compare memory, time and bits."""
    from ebbtide.cli.config import DemoConfig, UsageError, parse_device, parse_modes
    from ebbtide.cli.demo import run_demo
    from ebbtide.cli.team import WorkerError

    console = Console()
    try:
        torch_device = parse_device(device)
        chosen = parse_modes(modes, torch_device)
        config = DemoConfig(
            resolution, batch_size, steps, chosen, torch_device, store, data, out, seed, threads,
            warm_steps,
        )  # fmt: skip
        if torch_device.type == "cpu" and "save_on_cpu" in modes:
            console.print("save_on_cpu is left out: on a CPU, that is where activations are anyway")
        same = run_demo(config, console)
    except UsageError as error:
        typer.echo(f"ebbtide demo: {error}", err=True)
        raise typer.Exit(2) from None
    except WorkerError as error:
        typer.echo(f"{error.trace}ebbtide demo: {error}", err=True)
        raise typer.Exit(1) from None
    if not same:
        raise typer.Exit(1)


@app.command()
def schedule(
    file: Annotated[
        Path | None, typer.Argument(help="A schedule as text; - for the input.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="The default for k of N: 4/20.")] = None,
    pipeline: Annotated[str | None, typer.Option(help='A rank: "0F0 0F1 0B0 0B1".')] = None,
    resident: Annotated[int, typer.Option(help="Of a pipeline, units on the device.")] = 1,
    layer_size: Annotated[str, typer.Option(help="That a layer saves.")] = "64MiB",
    forward_ms: Annotated[float, typer.Option(help="Of a layer; backward: twice.")] = 10.0,
    bandwidth: Annotated[float, typer.Option(help="GB/s of the link, each way.")] = 25.0,
    out: Annotated[Path | None, typer.Option(help="Picture: .png, .svg or .pdf.")] = None,
) -> None:
    """Check a schedule and show the step that it makes, without a model."""
    from ebbtide.cli.config import UsageError
    from ebbtide.cli.show import show_schedule
    from ebbtide.errors import EbbtideError

    try:
        show_schedule(
            file, layers, pipeline, resident, layer_size, forward_ms / 1e3, bandwidth * 1e9, out
        )
    except (UsageError, EbbtideError, OSError, ImportError) as error:
        typer.echo(f"ebbtide schedule: {error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
