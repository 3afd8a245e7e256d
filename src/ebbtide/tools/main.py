"""``ebbtide``: all commands with their options. Most work is done elsewhere in this folder."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast, final

import typer

from ebbtide.errors import PolicyError
from ebbtide.policy import ActivationPolicy
from ebbtide.schedule import Schedule, default, from_pipeline
from ebbtide.tools.exit_codes import ExitCode, add_command, end, status
from ebbtide.tools.rehearsal import rehearse
from ebbtide.units import format_size, parse_size_bytes
from ebbtide.version import __version__

if TYPE_CHECKING:
    from ebbtide.tools.run import RunSession

# Plain help texts of 80 columns, whether they go to a terminal, a file or a pager.
_HELP: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
_SCRIPT: Final = {"allow_interspersed_args": False}  # what follows the script is the script's own
_EPILOG: Final = "\n\n".join(
    [
        "Begin with `ebbtide demo --quick`, then `ebbtide run train.py` with a script of your own.",
        "Reports go to standard output and progress to standard error. NO_COLOR turns colours off. "
        "`ebbtide COMMAND --help` lists its options and exit codes.",
    ]
)


@final
class ScriptRequest(SystemExit):
    """Leaves typer with a script to run.

    Typer turns Ctrl-C and some errors into messages and exit codes of its own, so the script must
    not run inside of it.

    Attributes:
        session: runs the script.
    """

    def __init__(self, session: RunSession) -> None:
        super().__init__(0)
        self.session = session


commands = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_HELP,
    epilog=_EPILOG,
)


def app() -> Any:
    """Run the command line. A script that a command asks for runs when typer is done."""
    hook = sys.excepthook  # typer puts its own in the place of it
    try:
        return commands()
    except ScriptRequest as asked:
        session = asked.session
    sys.excepthook = hook
    return session.run()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ebbtide {__version__}")
        raise typer.Exit


@commands.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train with less accelerator memory and bitwise the same results."""


def demo(
    *,
    quick: bool = False,
    resolution: int | None = None,
    batch_size: int = 8,
    steps: int | None = None,
    device: str = "auto",
    store: str = "auto",
    out: Path = Path("runs/demo"),
) -> None:
    """Train a neural operator with and without offload, and compare.

    Generates Darcy flow data, trains a Fourier neural operator on it without and with ebbtide, and
    shows memory, time, and whether all results are the same to the bit. Needs no accelerator, and
    takes some minutes on two cores, and one or two with --quick.

    Args:
        quick: A quick look: 128 x 128 nodes and 6 steps, a minute or two.
        resolution (N): Nodes along each side of the grid, 32 or more; 256, or 128 with --quick.
        batch_size (N): Samples in a training step.
        steps (N): Training steps of each mode, 3 or more; all but the first two are timed. 15, or 6
            with --quick.
        device (DEVICE): Where to train: auto, cpu, cuda, cuda:1, xpu ...
        store (STORE): Where activations go: auto, host, disk[:/some/dir] or tiered.
        out (DIR): Directory for the page, and for all figures as JSON.
    """
    from concurrent.futures.process import BrokenProcessPool

    from rich.console import Console

    from ebbtide.tools.demo import QUICK, DemoConfig, run_demo
    from ebbtide.tools.machine import parse_device

    sizes = dict(QUICK) if quick else {}
    asked = {"resolution": resolution, "steps": steps}
    sizes |= {name: number for name, number in asked.items() if number is not None}
    config = DemoConfig(
        batch_size=batch_size, device=parse_device(device), store=store, out=out, **sizes
    )
    try:
        same = run_demo(config, Console(stderr=True))
    except BrokenProcessPool:
        advice = "if memory ran out, try a smaller --batch-size or --resolution"
        end("demo", f"the process of a mode has died; {advice}", ExitCode.FAILED)
    if not same:
        raise typer.Exit(ExitCode.FAILED)


def doctor(
    *, quick: bool = False, json: bool = False, device: str = "auto", store: str = "auto"
) -> None:
    """Measure what this machine can do, and say what slows ebbtide.

    Measures compute, memory, the link between the accelerator and the host, and the disk. Says what
    to change, and how much can be offloaded here at what cost. Trains nothing, changes nothing.

    Args:
        quick: Measure for about 3 seconds instead of 12.
        json: Print the figures as JSON, for `ebbtide plan --hardware`.
        device (DEVICE): What to examine: auto, cpu, cuda, cuda:1, xpu ...
        store (STORE): Where files of activations would go: auto or disk:/some/dir.
    """
    from ebbtide.devices.hardware import document
    from ebbtide.tools.doctor import FULL_S, QUICK_S, advise, build_report, examine
    from ebbtide.tools.machine import find_directory, parse_device

    torch_device = parse_device(device)
    if device == "auto" and torch_device.type == "mps":
        torch_device = parse_device("cpu")  # ebbtide refuses models on Apple's GPU
    with status() as say:
        each_s = QUICK_S if quick else FULL_S
        found = examine(torch_device, find_directory(store), each_s, say)
    advice, hardware = list(advise(found)), found.hardware()
    if json:
        figures = {**asdict(found), "advice": advice}
        typer.echo(dumps(document(hardware, figures), indent=2))
    else:
        typer.echo(build_report(found, advice))
    if hardware is None:
        what = "problems in the JSON" if json else '"Not measured" in the report'
        end("doctor", f"the figures are incomplete; see {what}", ExitCode.FAILED)


def report(files: list[Path], *, out: Path = Path("run.html")) -> None:
    """Make a page from the files of runs.

    It shows memory by owner, what each lane did, and a table of the layers. It is one file that
    loads nothing from the network.

    Args:
        files (RUN.JSON...): Files of handle.save_run, handle.trace.save or ebbtide run --json; the
            first run is what others are compared with.
        out (PAGE.HTML): The page to write.
    """
    from ebbtide.observe.page import write_page
    from ebbtide.observe.run_record import load_records

    write_page(out, [record for file in files for record in load_records(file)])
    typer.echo(f"Page: {out}")


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
        save (FILE): File for the plan; `ebbtide run --plan` follows it.
        json: Print all figures as JSON instead of the report.
    """
    from ebbtide.tools.plan_tables import as_document, build_report, run_plan

    options = {
        "resolution": resolution, "seq": seq, "batch": batch, "width": width, "modes": modes,
        "layers": layers, "size": size,
    }  # fmt: skip
    # A user's model may print what it likes, and other programs read the report or JSON.
    with status() as say, contextlib.redirect_stdout(sys.stderr):
        study = run_plan(
            model, options, hardware, budget, layers=plan_layers or (),
            optimizer_states=optimizer_states, weights=weights, save=save, say=say,
        )  # fmt: skip
        text = as_document(study) if json else build_report(study)
    typer.echo(text)
    if study.chosen is None:
        raise typer.Exit(ExitCode.DOES_NOT_FIT)
    if save is not None and not json:
        typer.echo(f"\nPlan: {save}")


def run(
    script: str,
    arguments: list[str] | None = None,
    *,
    module: bool = False,
    budget: str | None = None,
    plan: Path | None = None,
    store: str = "auto",
    host_budget: str | None = None,
    layers: list[str] | None = None,
    num_layers: int | None = None,
    keep_last: int = 0,
    mode: str = "offload",
    min_bytes: str = "1MiB",
    weights: bool = False,
    quiet: bool = False,
    json: Path | None = None,
    report: Path | None = None,
) -> None:
    """Run a training script as it is, with its models offloaded.

    No line of the script changes, and neither do its results. Every model that it trains is found
    at its first training step and offloaded. A report on standard error says at the end what was
    done. Options of ebbtide come before SCRIPT, those of the script after it.

    Args:
        script (SCRIPT): Your training script; with -m the name of a module.
        arguments (ARGUMENTS): What the script itself is given.
        module: The script is a module, as for python -m.
        budget (SIZE): Most memory that training may take: 20GiB, or 90% of all there is.
        plan (FILE): Instead of a budget: a plan that `ebbtide plan --save` wrote.
        store (STORE): Where activations go: auto, host, disk[:/some/dir] or tiered[:/dir].
        host_budget (SIZE): Most host memory to take, such as 24GiB, or 96GiB/node for all ranks of
            a host.
        layers (PATTERN): Modules whose calls are the layers, such as blocks.*; repeatable.
        num_layers (N): Without a budget: offload this many layers.
        keep_last (N): Without a budget: keep this many last layers on the device.
        mode (MODE): Without a budget: offload, recompute or recompute+offload.
        min_bytes (SIZE): Tensors smaller than this stay on the device.
        weights: Keep weights off the device, too, while their layer does not compute.
        quiet: Print no report; errors only.
        json (FILE): Write all figures as JSON to this file; - is standard output, after what the
            script prints.
        report (PAGE.HTML): Write a page on the last step of each model: memory by owner, lanes,
            layers.
    """
    from ebbtide.tools.found_models import RunOptions
    from ebbtide.tools.run import MainScript, RunSession

    activations = ActivationPolicy(
        num_layers=num_layers,
        keep_last=keep_last,
        min_bytes=min_bytes,
        mode=cast(Literal["offload"], mode),
    )
    options = RunOptions(
        activations=activations, budget=budget, plan=plan, store=store,
        host_budget=host_budget, layers=tuple(layers or ()), weights=weights,
        trace=report is not None,
    )  # fmt: skip
    for option, file in (("--json", json), ("--report", report)):
        is_file = file is not None and str(file) != "-"
        if file is not None and is_file and not file.absolute().parent.is_dir():
            raise PolicyError(f"{option} {file}: there is no such directory")
    session = RunSession(
        MainScript(script, arguments or (), is_module=module), options, quiet=quiet,
        page=None if report is None else report.absolute(),
        json=json if json is None or str(json) == "-" else json.absolute(),
    )  # fmt: skip
    raise ScriptRequest(session)


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
    json: bool = False,
) -> None:
    """Check that offloading leaves every bit of your training as it is.

    Runs a few training steps plainly and offloaded, in orders that bring races to light, and
    compares losses, gradients, parameters, buffers and random states to the bit. Options of
    ebbtide come before the script, its own after it.

    Args:
        target (TARGET): Your training script, which runs until it trains a model; or
            module:function, where function() returns (model, batch) or (model, batch, loss).
        arguments (ARGUMENTS): What the script itself is given.
        module: The script is a module, as for python -m.
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
        json: Print all figures as JSON instead of the report.
    """
    from ebbtide.tools.found_models import RunOptions
    from ebbtide.tools.run import MainScript
    from ebbtide.tools.verify import verify_function, verify_script

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
            report = verify_function(target, device, options, steps, seeds)
        elif device is not None:
            raise PolicyError("--device needs module:function; a script runs as it is")
        else:
            script = MainScript(target, arguments or (), is_module=module)
            report = verify_script(script, options, steps, seeds)
    typer.echo(dumps(report.document(), indent=2) if json else str(report))
    if not report.same:
        raise typer.Exit(ExitCode.FAILED)


# ---- ``ebbtide schedule``: checks a schedule and shows its peak and the timeline of its step ----


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

    def size_of(number: int) -> str:
        return f"{number} x {format_size(layer_bytes)} = {format_size(number * layer_bytes)}"

    typer.echo(f"{plan}\n")
    typer.echo(f"Peak on the device: {size_of(plan.peak_resident)}.")
    typer.echo(f"Without offload: {size_of(Schedule(plan.order).peak_resident)}.")
    typer.echo(f"A copy takes {layer_bytes / bytes_per_s * 1e3:.3g} ms.\n")
    typer.echo(trace.timeline())
    if out is not None:
        typer.echo(f"\nPicture: {out}")


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
    text = sys.stdin.read() if str(file) == "-" else file.read_text(errors="surrogateescape")
    return Schedule.parse(text).check()


add_command(commands, demo, {ExitCode.FAILED: "the results differ, or a mode failed"})
add_command(commands, doctor, {ExitCode.FAILED: "a figure that a plan needs could not be measured"})
add_command(commands, report, short={"out": "-o"})
add_command(commands, plan, {ExitCode.DOES_NOT_FIT: "no plan fits into the budget"})
add_command(
    commands,
    run,
    {
        ExitCode.DONE: "the script ended well; whatever else it ends with comes through",
        ExitCode.DOES_NOT_FIT: "no plan fits into the budget",
    },
    short={"module": "-m"},
    context_settings=_SCRIPT,
)
add_command(commands, schedule)
add_command(
    commands,
    verify,
    {
        ExitCode.DONE: "every run gave the same results",
        ExitCode.FAILED: "a run gave others, or nothing was offloaded",
        ExitCode.DOES_NOT_FIT: "no plan fits into the budget",
    },
    short={"module": "-m"},
    context_settings=_SCRIPT,
)


if __name__ == "__main__":
    app()
