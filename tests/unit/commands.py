"""Calls of `ebbtide` in this process."""

from typing import Any

from typer.testing import CliRunner, Result

from ebbtide.tools.main import commands


def call(*arguments: object, **options: Any) -> Result:
    """Call ``ebbtide`` with these arguments, as from a command line."""
    return CliRunner().invoke(commands, [str(each) for each in arguments], **options)
