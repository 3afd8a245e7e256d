"""``ebbtide run``: parse the options; `ebbtide.running` runs the script, outside of typer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, final

import typer

if TYPE_CHECKING:
    from ebbtide.running.run_session import RunRequest

SETTINGS = {"allow_interspersed_args": False}  # what follows the script is the script's own


@final
class ScriptRequest(SystemExit):
    """Leaves typer with a script to run.

    Typer turns Ctrl-C and some errors into messages and exit codes of its own, so the script must
    not run inside of it.

    Attributes:
        request: what to run.
    """

    def __init__(self, request: RunRequest) -> None:
        super().__init__(0)
        self.request = request


@final
class CommandLine(typer.Typer):
    """The commands of ebbtide. A script that one of them asks for runs when typer is done."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook = sys.excepthook  # typer puts its own in the place of it
        try:
            return super().__call__(*args, **kwargs)
        except ScriptRequest as asked:
            request = asked.request
        sys.excepthook = hook
        from ebbtide.running.run_session import run_script

        return run_script(request)


# There are many parameters because typer makes an option of each.
def run(
    script: Annotated[str, typer.Argument(help="The script, or with -m the name of a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="Passed to the script.")
    ] = None,
    as_module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")
    ] = False,
    budget: Annotated[
        str | None, typer.Option(help="Most memory to take: 20GiB, or 90% of all there is.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Follow this plan, saved by `ebbtide plan --save`.")
    ] = None,
    store: Annotated[
        str, typer.Option(help="Where bytes go: auto, host, disk[:/some/dir] or tiered[:/dir].")
    ] = "auto",
    host_budget: Annotated[
        str | None, typer.Option(help="Most host memory to take, such as 64GiB.")
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(help="Modules that are the layers, such as blocks.*; repeatable."),
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(help="Offload this many layers; without a budget.")
    ] = None,
    keep_last: Annotated[
        int, typer.Option(help="Keep the last layers on the device; without a budget.")
    ] = 0,
    mode: Annotated[
        str, typer.Option(help="offload, recompute or recompute+offload; without a budget.")
    ] = "offload",
    min_bytes: Annotated[
        str, typer.Option(help="Smaller saved tensors stay on the device.")
    ] = "1MiB",
    weights: Annotated[
        bool, typer.Option("--weights", help="Keep the weights off the device, too.")
    ] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="Offload nothing; say what would be done.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    json: Annotated[Path | None, typer.Option(help="File for the figures, as JSON.")] = None,
) -> None:
    """Run a training script as it is, with the models that it trains offloaded."""
    from ebbtide.errors import EbbtideError, PolicyError
    from ebbtide.policy import ActivationPolicy
    from ebbtide.running.main_script import MainScript
    from ebbtide.running.run_options import RunOptions
    from ebbtide.running.run_session import RunRequest

    try:
        activations = ActivationPolicy(
            num_layers=num_layers,
            keep_last=keep_last,
            min_bytes=min_bytes,
            mode=cast(Literal["offload"], mode),
        )
        options = RunOptions(
            activations=activations, budget=budget, plan=plan, store=store,
            host_budget=host_budget, layers=tuple(layers or ()), weights=weights,
        )  # fmt: skip
        if json is not None and not json.absolute().parent.is_dir():
            raise PolicyError(f"--json {json}: there is no such directory")
        to_run = MainScript(script, arguments or (), is_module=as_module)
    except (EbbtideError, OSError) as error:
        typer.echo(f"ebbtide run: {error}", err=True)
        raise typer.Exit(2) from None
    where = None if json is None else json.absolute()
    raise ScriptRequest(
        RunRequest(script=to_run, options=options, dry=dry, quiet=quiet, json=where)
    )
