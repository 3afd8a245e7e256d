"""What all commands share: options from docstrings, and which error leads to which exit code."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, NoReturn, get_type_hints

import typer


class ExitCode(enum.IntEnum):
    """How a command ended. `docs/guides/command-line.md` has the same table."""

    DONE = 0
    FAILED = 1
    """It ran, and what it found is not good: results differ, a measurement failed."""
    WRONG_USE = 2
    """It cannot be done as asked: a wrong option, a missing file or package, no space to write."""
    DOES_NOT_FIT = 78
    """No plan fits into the memory budget; EX_CONFIG of sysexits.h."""
    INTERRUPTED = 130
    """Ctrl-C; as shells say it of a program that SIGINT ended."""


_GENERAL: Final = {
    ExitCode.DONE: "it is done",
    ExitCode.WRONG_USE: "an option is wrong, or a file or a package is missing",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}


def describe_codes(special: dict[ExitCode, str] | None = None) -> str:
    """Return the paragraph on exit codes that ends a help text.

    Args:
        special: what further codes mean for this command.
    """
    meanings = sorted((_GENERAL | (special or {})).items())
    lines = [f"  {code:<3d}  {meaning}" for code, meaning in meanings]
    # The sign has click keep the lines as they are.
    return "\n".join(["\b", "Exit codes:", *lines])


@contextlib.contextmanager
def ends_by_code(command: str) -> Iterator[None]:
    """End a command by the exit code that belongs to an error, with one line on standard error.

    Other errors are defects, whose traceback is shown.

    Args:
        command: its name.
    """
    from ebbtide.errors import BudgetError, EbbtideError

    try:
        yield
    except KeyboardInterrupt:
        end(command, "interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        raise  # the reader of the output has gone; click ends quietly
    except BudgetError as error:
        end(command, str(error), ExitCode.DOES_NOT_FIT)
    except FileNotFoundError as error:
        what = error if error.filename is None else f"there is no file {error.filename}"
        end(command, str(what), ExitCode.WRONG_USE)
    except EbbtideError as error:
        end(command, in_options(error), ExitCode.WRONG_USE)
    except (ImportError, OSError) as error:
        end(command, str(error), ExitCode.WRONG_USE)


def end(command: str, message: str, code: ExitCode) -> NoReturn:
    """End a command with a message on standard error.

    Raises:
        typer.Exit: always.
    """
    typer.echo(f"ebbtide {command}: {message}", err=True)
    raise typer.Exit(code) from None


# ---- A command is a function, and its docstring is the help ----

_ENTRY: Final = re.compile(r"^    (\w+)(?: \((.*?)\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)


def add_command(
    app: typer.Typer,
    command: Callable[..., None],
    codes: dict[ExitCode, str] | None = None,
    short: Mapping[str, str] | None = None,
    **settings: Any,
) -> None:
    """Make a command of a function, which ends by the code that belongs to an error.

    Parameters that can be given by position are arguments, the others options. The docstring's
    entries on them are the help, such as ``out (FILE): Where to write.``, in which FILE stands for
    the value. Under ``python -OO`` there are no docstrings, and no help.

    Args:
        app: gets the command.
        command: the function.
        codes: what further exit codes mean for it.
        short: short names of options, by parameter.
        settings: of typer, for the command.
    """
    summary, _, entries = inspect.cleandoc(command.__doc__ or "").partition("\n\nArgs:\n")
    described = {name: rest for name, *rest in _ENTRY.findall(entries)}
    hints = get_type_hints(command)
    for name, parameter in inspect.signature(command).parameters.items():
        metavar, text = described.get(name, ("", ""))
        about: Any = {"metavar": metavar or None, "help": " ".join(text.split())}
        info = typer.Argument(**about)
        if parameter.kind is parameter.KEYWORD_ONLY:
            names = f"--{name.replace('_', '-')}", (short or {}).get(name)
            info = typer.Option(*filter(None, names), **about)
        command.__annotations__[name] = Annotated[hints[name], info]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        with ends_by_code(command.__name__):
            command(**given)

    app.command(help=summary, epilog=describe_codes(codes), **settings)(run)


# ---- Messages are about arguments in Python; on the command line these are options ----

_ARGUMENTS: Final = re.compile(
    r"\b(num_layers|keep_last|min_bytes|host_budget)\b|\b(weights|layers|store)(?==)|^(mode|store)\b"
)


def in_options(error: Exception) -> str:
    """Say what is wrong and what to change in the words of the command line."""
    text = str(error).replace("weights=ebbtide.WeightPolicy()", "--weights")
    return _ARGUMENTS.sub(lambda name: f"--{name[0].replace('_', '-')}", text)


# ---- One line on standard error that says what is under way ----


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Within the block, show on a terminal what is under way. Elsewhere nothing is printed.

    Yields:
        Shows a text in the place of the one before.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # Without a thread that refreshes the line, which would disturb measurements.
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda what: live.update(Text(f"{what} ..."), refresh=True)
