"""``ebbtide demo``: parse the options and set the exit code; `ebbtide.demo` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.tools.exit_codes import ExitCode, describe_codes, end, ends_by_code

EPILOG = describe_codes({ExitCode.FAILED: "the results differ, or a mode failed"})


# There are many parameters because typer makes an option of each.
def demo(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A quick look: 128 x 128 nodes and 6 steps, a minute or two."),
    ] = False,
    resolution: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Nodes along each side of the grid, 32 or more; 256, or 128 with --quick.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Samples in a training step.")] = 8,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Training steps of each mode, 3 or more, of which three in five are timed; 15, "
            "or 6 with --quick.",
        ),
    ] = None,
    modes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="What to compare: none (no offload), save_on_cpu (PyTorch's own, on an "
            "accelerator), rebuild (ebbtide without moving anything), ebbtide.",
        ),
    ] = "none,save_on_cpu,ebbtide",
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where to train: auto, cpu, cuda, cuda:1, xpu ...")
    ] = "auto",
    store: Annotated[
        str,
        typer.Option(
            metavar="STORE", help="Where activations go: auto, host, disk[:/some/dir] or tiered."
        ),
    ] = "auto",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the published .pt files, or for generated samples; without it the "
            "user's cache.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for the figures and the picture.")
    ] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed of samples and weights.")] = 0,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Threads of each process; without it torch's choice."),
    ] = None,
    warm_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Training steps on a coarse grid that come first, for all modes; 100, or 40 with "
            "--quick.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as JSON instead of the table.")
    ] = False,
) -> None:
    """Train a neural operator with and without offload, and compare.

    Generates Darcy flow data, trains a Fourier neural operator on it without and with ebbtide, and
    shows memory, time, and whether all results are the same to the bit. Needs no accelerator, and
    takes some minutes on two cores, and one or two with --quick.
    """
    with ends_by_code("demo"):
        from rich.console import Console

        from ebbtide.tools.demo import Outputs, WorkerError, run_demo
        from ebbtide.tools.demo_config import QUICK, DemoConfig, parse_device, parse_modes

        torch_device = parse_device(device)
        chosen = parse_modes(modes, torch_device)
        sizes = dict(QUICK) if quick else {}
        asked = {"resolution": resolution, "steps": steps, "warm_steps": warm_steps}
        sizes |= {name: number for name, number in asked.items() if number is not None}
        config = DemoConfig(
            batch_size=batch_size, modes=chosen, device=torch_device, store=store, data=data,
            out=out, seed=seed, threads=threads, **sizes,
        )  # fmt: skip
        outputs = Outputs(Console(stderr=True), Console(), as_json)
        if torch_device.type == "cpu" and "save_on_cpu" in modes:
            outputs.progress.print(
                "save_on_cpu is left out: on a CPU, activations are on the host anyway.",
                highlight=False,
            )
        try:
            same = run_demo(config, outputs)
        except WorkerError as error:
            typer.echo(error.trace, err=True, nl=False)
            end("demo", str(error), ExitCode.FAILED)
        if not same:
            raise typer.Exit(ExitCode.FAILED)
