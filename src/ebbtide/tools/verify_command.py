"""``ebbtide verify``: parse the options and print; `ebbtide.verifying` does the work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, final

import typer
from typer.core import TyperCommand

from ebbtide.tools.exit_codes import ExitCode, describe_codes, ends_by_code

if TYPE_CHECKING:
    from ebbtide.tools.found_models import RunOptions
    from ebbtide.verifying import VerifyReport

EPILOG = describe_codes(
    {
        ExitCode.DONE: "every run gave the same results",
        ExitCode.FAILED: "a run gave others, or nothing was offloaded",
        ExitCode.DOES_NOT_FIT: "no plan fits into the budget",
    }
)


@final
class VerifyCommand(TyperCommand):
    """Leaves to a script what follows it; options may also follow ``module:function``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_script = any(each in ("-m", "--module") or each.endswith(".py") for each in args)
        ctx.allow_interspersed_args = not is_script
        return super().parse_args(ctx, args)


# There are many parameters because typer makes an option of each.
def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Your training script; or module:function, where function() returns (model, "
            "batch) or (model, batch, loss).",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", help="What the script itself is given."),
    ] = None,
    as_module: Annotated[
        bool, typer.Option("-m", "--module", help="TARGET is a module, as for python -m.")
    ] = False,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Verify what follows this budget: 24GiB.")
    ] = None,
    store: Annotated[
        str, typer.Option(metavar="STORE", help="auto, host, disk[:/some/dir] or tiered[:/dir].")
    ] = "auto",
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Modules whose calls are the layers; repeatable."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            metavar="MODE", help="Without a budget: offload, recompute, or recompute+offload."
        ),
    ] = "offload",
    min_bytes: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Tensors smaller than this stay; 1: everything leaves."),
    ] = "1",
    weights: Annotated[
        bool, typer.Option("--weights", help="Offload weights, too, whatever their size.")
    ] = False,
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps in each run.")] = 3,
    orders: Annotated[int, typer.Option(metavar="N", help="How many provocations are tried.")] = 7,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the first; the others have the next ones.")
    ] = 0,
    microbatches: Annotated[
        int,
        typer.Option(
            metavar="N", help="module:function only: forwards in a step before their backwards."
        ),
    ] = 1,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="module:function only: where it trains, such as cuda."),
    ] = None,
    offloader: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="module:function only: save_on_cpu, torchtune, trl, or module:function of the "
            "model that returns a context manager.",
        ),
    ] = "ebbtide",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as JSON instead of the report.")
    ] = False,
) -> None:
    """Check that offloading leaves every bit of your training as it is.

    Runs a few training steps plainly and offloaded, in orders that bring races to light, and
    compares losses, gradients, parameters, buffers and random states to the bit. Options of
    ebbtide come before a script, those of the script after it.
    """
    with ends_by_code("verify"):
        from ebbtide.errors import PolicyError
        from ebbtide.policy import ActivationPolicy
        from ebbtide.tools.found_models import RunOptions
        from ebbtide.tools.plan_command import other_output_on_stderr

        activations = ActivationPolicy(min_bytes=min_bytes, mode=cast(Literal["offload"], mode))
        options = RunOptions(
            activations=activations, budget=budget, store=store, layers=tuple(layers or ()),
            weights=weights,
        )  # fmt: skip
        if steps < 1 or orders < 0 or microbatches < 1:
            raise PolicyError("--steps and --microbatches are at least 1, and --orders at least 0")
        with other_output_on_stderr():
            if ":" in target and not Path(target).exists():
                task = _find_task(target, device)
                given = {"offloader": _find_offloader(offloader), "microbatches": microbatches}
                report = _verify_task(task, options, steps, range(seed, seed + orders), given)
            else:
                if offloader != "ebbtide" or device is not None or microbatches > 1:
                    raise PolicyError(
                        "--offloader, --device and --microbatches need module:function; a script "
                        "runs as it is"
                    )
                report = _verify_script(
                    target, arguments or [], as_module, options, steps, range(seed, seed + orders)
                )
    typer.echo(json.dumps(report.document(), indent=2) if as_json else str(report))
    if not report.same:
        raise typer.Exit(ExitCode.FAILED)


def _verify_script(
    script: str,
    arguments: list[str],
    is_module: bool,
    options: RunOptions,
    steps: int,
    seeds: range,
) -> VerifyReport:
    from ebbtide.tools.run import MainScript
    from ebbtide.tools.verify_script import ScriptRun, VerifiedScript
    from ebbtide.verifying import verify_subject

    MainScript(script, arguments, is_module=is_module)  # says whether there is such a script
    run = ScriptRun(script=script, arguments=tuple(arguments), is_module=is_module, steps=steps)
    return verify_subject(VerifiedScript(run, options), seeds)


def _verify_task(
    task: Any, options: RunOptions, steps: int, seeds: range, given: dict[str, Any]
) -> VerifyReport:
    from ebbtide.policy import WeightPolicy
    from ebbtide.verifying import verify

    offload = options.arguments(task.model, frugal=False)
    if options.weights:
        offload["weights"] = WeightPolicy(min_bytes=1)
    return verify(*task, steps=steps, offload=offload, orders=len(seeds), seed=seeds.start, **given)


def _find_task(address: str, device: str | None) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    from ebbtide.tools.models import Task, find_function, read_task

    task = read_task(address, find_function(address)())
    if device is None:
        return task
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), task.batch)
    return Task(task.model.to(device), batch, task.loss)


def _find_offloader(name: str) -> Any:
    from ebbtide.tools.models import find_function

    return find_function(name) if ":" in name else name
