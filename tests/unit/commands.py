"""Calls of `ebbtide` in this process."""

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from ebbtide.tools.main import commands


def call(*arguments: object, **options: Any) -> Result:
    """Call ``ebbtide`` with these arguments, as from a command line."""
    return CliRunner().invoke(commands, [str(each) for each in arguments], **options)
