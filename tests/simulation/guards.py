"""The guards of the engine, as their tags in the source say, and the source without one of them.

A guard is a statement that prevents a hazard: it waits, holds, or compares. A comment before it
tags it::

    # Guard compute-waits-for-reload: compute waits for the copy up. Backward kernels would read a
    # buffer that the copy has not filled.

The first sentence says what the guard does, the rest what would happen without it. Several guards
can stand before one statement.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_TAG = re.compile(r"\s*# Guard ([a-z0-9-]+): (.*)")
_REST = re.compile(r"\s*# (.*)")

Edit = Callable[[ast.stmt], str]
"""Gives the source of a statement without its guard."""


@dataclass(frozen=True)
class Guard:
    """A tagged statement.

    Attributes:
        name: of the tag.
        file: below the package.
        line: of the statement, from 1.
        does: what the guard does.
        hazard: what would happen without it.
    """

    name: str
    file: str
    line: int
    does: str
    hazard: str


def find_guards(package: Path) -> dict[str, Guard]:
    """All guards of a package, by name, in the order of files and lines."""
    guards: dict[str, Guard] = {}
    for path in sorted(package.rglob("*.py")):
        for guard in _guards_in(path.read_text(), path.relative_to(package).as_posix()):
            assert guard.name not in guards, f"two guards are called {guard.name}"
            guards[guard.name] = guard
    return guards


def _guards_in(text: str, file: str) -> list[Guard]:
    guards = []
    lines = text.splitlines()
    open_tags: list[list[str]] = []  # a name and its words
    for number, line in enumerate(lines, start=1):
        if tag := _TAG.match(line):
            open_tags.append([tag[1], tag[2]])
        elif open_tags and (rest := _REST.match(line)):
            open_tags[-1].append(rest[1])
        elif open_tags:
            for name, *words in open_tags:
                does, _, hazard = " ".join(words).partition(". ")
                assert hazard.endswith("."), f"{file}: guard {name} does not say what it prevents"
                guards.append(Guard(name, file, number, does, hazard))
            open_tags = []
    return guards


def without(source: str, guard: Guard, edit: Edit) -> str:
    """The source of a file without one of its guards."""
    statement = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno == guard.line
    )
    lines = source.splitlines()
    indent = " " * statement.col_offset
    replaced = [f"{indent}{line}" for line in edit(statement).splitlines()]
    assert statement.end_lineno is not None
    return "\n".join([*lines[: guard.line - 1], *replaced, *lines[statement.end_lineno :], ""])


# ---- edits --------------------------------------------------------------------------------------


def remove(statement: ast.stmt) -> str:  # noqa: ARG001
    """Leave the statement out."""
    return "pass"


def never(statement: ast.stmt) -> str:
    """An `if` that is never taken."""
    assert isinstance(statement, ast.If)
    statement.test = ast.Constant(False)
    return ast.unparse(statement)


def always(statement: ast.stmt) -> str:
    """An `if` that is always taken."""
    assert isinstance(statement, ast.If)
    statement.test = ast.Constant(True)
    return ast.unparse(statement)


def then(code: str) -> Edit:
    """Let the statement be followed by this code."""
    return lambda statement: f"{ast.unparse(statement)}\n{code}"


def instead(code: str) -> Edit:
    """This code in its place."""
    return lambda statement: code  # noqa: ARG005


def drop(argument: str) -> Edit:
    """The call in the statement without one of its arguments."""

    def edit(statement: ast.stmt) -> str:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                kept = [each for each in node.args if ast.unparse(each) != argument]
                if len(kept) == len(node.args) - 1:
                    node.args = kept
                    return ast.unparse(statement)
        raise AssertionError(f"no call in {ast.unparse(statement)!r} has an argument {argument}")

    return edit


def put(old: str, new: str) -> Edit:
    """The statement with another expression in the place of one of its own."""

    def edit(statement: ast.stmt) -> str:
        wanted = ast.dump(ast.parse(old, mode="eval").body)
        found = [node for node in ast.walk(statement) if isinstance(node, ast.expr)]
        assert sum(ast.dump(node) == wanted for node in found) == 1, f"{old} is not there once"
        return ast.unparse(_Put(wanted, ast.parse(new, mode="eval").body).visit(statement))

    return edit


class _Put(ast.NodeTransformer):
    def __init__(self, wanted: str, new: ast.expr) -> None:
        self.wanted = wanted
        self.new = new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if ast.dump(node) == self.wanted else self.generic_visit(node)
