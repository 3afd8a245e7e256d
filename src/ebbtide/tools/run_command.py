"""``ebbtide run``: parse the options; `ebbtide.tools.run` runs the script, outside of typer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, final

import typer

from ebbtide.tools.exit_codes import ends_by_code

if TYPE_CHECKING:
    from ebbtide.tools.run import RunSession


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
    dry: bool = False,
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
        module (-m): The script is a module, as for python -m.
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
        dry: Say what is done, from the first steps, and train on without.
        quiet: Print no report; errors only.
        json (FILE): Write all figures as JSON to this file; - is standard output, after what the
            script prints.
        report (PAGE.HTML): Write a page on the last step of each model: memory by owner, lanes,
            layers.
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
            MainScript(script, arguments or (), is_module=module), options, dry=dry,
            quiet=quiet, page=None if report is None else report.absolute(),
            json=json if json is None or str(json) == "-" else json.absolute(),
        )  # fmt: skip
    raise ScriptRequest(session)
