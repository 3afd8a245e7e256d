"""The directive ``ebbtide-commands``: each command of the command line, with all its options.

The text is that of ``--help``, read from the program itself when the site is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def describe(name: str, command: Any) -> str:
    """Return one command as Markdown: what it does, how it is called, its options.

    Args:
        name: the command as it is typed, such as ``ebbtide plan``.
        command: the command as `click` knows it.
    """
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    help_text = inspect.cleandoc(command.help or "")
    lines = [help_text, "", "```text", usage, "```", "", f":::{{program}} {name}\n:::", ""]
    for parameter in command.params:
        lines += _option(parameter, context)
    return "\n".join(lines)


def _option(parameter: Any, context: Any) -> Iterator[str]:
    record = parameter.get_help_record(context)
    if record is None:  # an argument, whose help typer keeps beside it
        text = getattr(parameter, "help", None)
        if not text:
            return
        record = (parameter.make_metavar(context), text)
    yield from (f":::{{option}} {record[0].replace(', ', ' , ')}", record[1], ":::", "")


class CommandList(SphinxDirective):
    """Writes a section for each command."""

    def run(self) -> list[nodes.Node]:
        from typer.main import get_command

        from ebbtide.tools.main import commands

        group = get_command(commands)
        sections: list[nodes.Node] = []
        for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
            title = f"ebbtide {name}"
            section = nodes.section(ids=[nodes.make_id(title)], names=[title])
            section += nodes.title("", "", nodes.literal(text=title))
            section += self.parse_text_to_nodes(describe(title, command))
            sections.append(section)
        return sections


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("ebbtide-commands", CommandList)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
