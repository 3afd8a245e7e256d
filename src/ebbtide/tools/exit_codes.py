"""What all commands share: how their options look, and which error leads to which exit code."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import typer


def option(name: str, metavar: str, text: str) -> Any:
    """Return an option of a command that takes a value.

    Args:
        name: its name, such as ``"--steps"``.
        metavar: what stands for the value in the help.
        text: what the help says.
    """
    return typer.Option(name, metavar=metavar, help=text)


def flag(name: str, text: str) -> Any:
    """Return an option of a command that takes no value; the help says ``text`` of it."""
    return typer.Option(name, help=text)


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
def ends_by_code(command: str, interrupted: str = "interrupted") -> Iterator[None]:
    """End a command by the exit code that belongs to an error, with one line on standard error.

    Other errors are defects, whose traceback is shown.

    Args:
        command: its name.
        interrupted: what is said after Ctrl-C.
    """
    from ebbtide.errors import BudgetError, EbbtideError

    try:
        yield
    except KeyboardInterrupt:
        end(command, interrupted, ExitCode.INTERRUPTED)
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


# ---- Messages are about arguments in Python; on the command line these are options ----

_OPTIONS: Final = {
    "weights=ebbtide.WeightPolicy()": "--weights",
    "name its layers, such as layers=[model.encoder, model.decoder]": "name some by --layers",
    'store="disk:/some/dir"': "--store disk:/some/dir",
    "num_layers=": "--num-layers ",
    "keep_last=": "--keep-last ",
    "layers=": "--layers ",
    "layers: ": "--layers: ",
}


def in_options(error: Exception) -> str:
    """Say what is wrong and what to change in the words of the command line."""
    text = str(error)
    for argument, option in _OPTIONS.items():
        text = text.replace(argument, option)
    text = re.sub(r"^(mode|store)\b", r"--\1", text)
    text = re.sub(r"\b(num_layers|keep_last|min_bytes|host_budget)\b", _as_option, text)
    return re.sub(r"--layers \[([^\]]*)\]", _repeat_layers, text)


def _as_option(argument: re.Match[str]) -> str:
    return f"--{argument[0].replace('_', '-')}"


def _repeat_layers(names: re.Match[str]) -> str:
    return " ".join(f"--layers {name}" for name in names[1].split(", "))


# ---- One line on standard error that says what is under way, and is written over by the next ----

_WIDTH: Final = 79


def show_status(what: str) -> None:
    """Show on a terminal what is under way; "" clears the line. Elsewhere nothing is printed."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return
    text = f"{what[: _WIDTH - 4]} ..." if what else ""
    print(f"\r{'':<{_WIDTH}}\r{text}", end="", file=sys.stderr, flush=True)
