"""``ebbtide run``: parse the options; `ebbtide.tools.run` runs the script, outside of typer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, final

import typer

from ebbtide.tools.exit_codes import ExitCode, describe_codes, ends_by_code, flag, option

if TYPE_CHECKING:
    from ebbtide.tools.run import RunSession


EPILOG = describe_codes(
    {
        ExitCode.DONE: "the script ended well; whatever else it ends with comes through",
        ExitCode.DOES_NOT_FIT: "no plan fits into the budget",
    }
)
SETTINGS = {"allow_interspersed_args": False}  # what follows the script is the script's own


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


@final
class CommandLine(typer.Typer):
    """The commands of ebbtide. A script that one of them asks for runs when typer is done."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook = sys.excepthook  # typer puts its own in the place of it
        try:
            return super().__call__(*args, **kwargs)
        except ScriptRequest as asked:
            session = asked.session
        sys.excepthook = hook
        return session.run()


# Options that `ebbtide verify` has, too.
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGUMENTS", help="What the script itself is given.")
]
AsModule = Annotated[
    bool, typer.Option("-m", "--module", help="The script is a module, as for python -m.")
]
Budget = Annotated[
    str | None,
    option(
        "--budget", "SIZE", "Most memory that training may take: 20GiB, or 90% of all there is."
    ),
]
Store = Annotated[
    str,
    option(
        "--store", "STORE", "Where activations go: auto, host, disk[:/some/dir] or tiered[:/dir]."
    ),
]
Layers = Annotated[
    list[str] | None,
    option(
        "--layers", "PATTERN", "Modules whose calls are the layers, such as blocks.*; repeatable."
    ),
]
Mode = Annotated[
    str, option("--mode", "MODE", "Without a budget: offload, recompute or recompute+offload.")
]
MinBytes = Annotated[
    str, option("--min-bytes", "SIZE", "Tensors smaller than this stay on the device.")
]
Weights = Annotated[
    bool, flag("--weights", "Keep weights off the device, too, while their layer does not compute.")
]


# There are many parameters because typer makes an option of each.
def run(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="Your training script; with -m the name of a module."
        ),
    ],
    arguments: Arguments = None,
    as_module: AsModule = False,
    budget: Budget = None,
    plan: Annotated[
        Path | None,
        option("--plan", "FILE", "Instead of a budget: a plan that `ebbtide plan --save` wrote."),
    ] = None,
    store: Store = "auto",
    host_budget: Annotated[
        str | None,
        option(
            "--host-budget",
            "SIZE",
            "Most host memory to take, such as 24GiB, or 96GiB/node for all ranks of a host.",
        ),
    ] = None,
    layers: Layers = None,
    num_layers: Annotated[
        int | None, option("--num-layers", "N", "Without a budget: offload this many layers.")
    ] = None,
    keep_last: Annotated[
        int,
        option("--keep-last", "N", "Without a budget: keep this many last layers on the device."),
    ] = 0,
    mode: Mode = "offload",
    min_bytes: MinBytes = "1MiB",
    weights: Weights = False,
    dry: Annotated[
        bool, flag("--dry", "Say what is done, from the first steps, and train on without.")
    ] = False,
    quiet: Annotated[bool, flag("--quiet", "Print no report; errors only.")] = False,
    json: Annotated[
        Path | None,
        option(
            "--json",
            "FILE",
            "Write all figures as JSON to this file; - is standard output, after what the "
            "script prints.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        option(
            "--report",
            "PAGE.HTML",
            "Write a page on the last step of each model: memory by owner, lanes, layers.",
        ),
    ] = None,
) -> None:
    """Run a training script as it is, with its models offloaded.

    No line of the script changes, and neither do its results. Every model that it trains is found
    at its first training step and offloaded. A report on standard error says at the end what was
    done. Options of ebbtide come before SCRIPT, those of the script after it.
    """
    from ebbtide.errors import PolicyError
    from ebbtide.policy import ActivationPolicy
    from ebbtide.tools.found_models import RunOptions
    from ebbtide.tools.run import MainScript, RunSession

    with ends_by_code("run"):
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
        if dry and report is not None:
            raise PolicyError(
                "--dry trains on without ebbtide, so there is no step to --report; leave one out"
            )
        session = RunSession(
            MainScript(script, arguments or (), is_module=as_module), options, dry=dry,
            quiet=quiet, page=None if report is None else report.absolute(),
            json=json if json is None or str(json) == "-" else json.absolute(),
        )  # fmt: skip
    raise ScriptRequest(session)
