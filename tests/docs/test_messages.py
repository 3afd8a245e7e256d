"""The page of messages lists every warning and every error of the source, and nothing else."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ebbtide.errors
from test_docs import ROOT

SOURCE = ROOT / "src" / "ebbtide"
PAGE = (ROOT / "docs" / "guides" / "messages.md").read_text()
_WARNING_FILE = SOURCE / "errors.py"
_FEW_WORDS = 24  # characters that tell one message from another


class Message(NamedTuple):
    """A warning or an error in the source.

    Attributes:
        place: its file and line.
        name: the name of the warning, or of the class of the error.
        parts: the parts of its text that do not vary.
    """

    place: str
    name: str
    parts: list[str]


def find_calls(tree: ast.AST, names: set[str]) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in names:
                yield name, node


def fixed_parts(text: ast.expr) -> list[str]:
    """The parts of a text that do not vary, without the blanks around them."""
    pieces = text.values if isinstance(text, ast.JoinedStr) else [text]
    constants = [piece.value for piece in pieces if isinstance(piece, ast.Constant)]
    return [part.strip() for part in constants if isinstance(part, str)]


@functools.cache
def find_warnings(folder: Path = SOURCE) -> list[Message]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        for name, call in find_calls(ast.parse(path.read_text()), {"warn_user", "warnings.warn"}):
            place = f"{path.relative_to(folder)}:{call.lineno}"
            if name == "warnings.warn":
                assert path == _WARNING_FILE, f"{place}: warn with warn_user, which names the cause"
                continue
            cause, text = call.args[0], call.args[1]
            assert isinstance(cause, ast.Constant), f"{place}: write the name of the warning here"
            found.append(Message(place, cause.value, fixed_parts(text)))
    return found


def find_errors(names: set[str]) -> list[Message]:
    """The errors of some classes; the text is the last of the arguments without a name."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for name, call in find_calls(ast.parse(path.read_text()), names):
            place = f"{path.relative_to(SOURCE)}:{call.lineno}"
            found.append(Message(place, name, fixed_parts(call.args[-1])))
    return found


def section(page: str, heading: str) -> str:
    """The text below a heading, as one line."""
    match = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#|\Z)", page, re.M | re.S)
    assert match, f"docs/guides/messages.md has no heading {heading!r}"
    return " ".join(match[2].replace("> ", "").replace("\n>", "\n").split())


def headings(page: str, part: str) -> list[str]:
    match = re.search(rf"^## {part}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert match
    return re.findall(r"^### (.+)$", match[1], re.M)


def lacking(messages: list[Message], page: str) -> list[str]:
    """The messages whose first words the page does not quote, in the section of their name."""
    found = []
    for message in messages:
        text = section(page, message.name)
        telling = [part[:_FEW_WORDS] for part in message.parts if len(part) >= _FEW_WORDS // 2]
        if telling and telling[0] not in text:
            found.append(f"{message.place}: {message.name}: {telling[0]}")
    return found


def test_the_page_has_a_section_for_each_warning_and_no_other() -> None:
    causes = {message.name for message in find_warnings()}
    assert len(causes) > 10, "the source was not read"
    assert sorted(causes) == sorted(headings(PAGE, "Warnings"))


def test_the_page_quotes_each_warning() -> None:
    assert lacking(find_warnings(), PAGE) == []


def test_the_page_has_a_section_for_each_error() -> None:
    errors = [
        name
        for name, kind in vars(ebbtide.errors).items()
        if isinstance(kind, type) and kind.__module__ == ebbtide.errors.__name__
    ]
    assert sorted(headings(PAGE, "Errors")) == sorted(set(errors) - {"EbbtideError"})
    assert "ebbtide.EbbtideError" in PAGE


def test_the_page_quotes_each_error_that_a_step_can_raise() -> None:
    names = {
        "BudgetError",
        "ForkedProcessError",
        "SavedTensorModifiedError",
        "StoreFullError",
    }
    errors = find_errors(names)
    assert {error.name for error in errors} == names
    assert lacking(errors, PAGE) == []


def test_a_warning_that_is_not_on_the_page_is_found() -> None:
    page = PAGE.replace("saved-tensor hooks of other code", "something else")
    assert [line.split(": ")[1] for line in lacking(find_warnings(), page)] == ["other-hooks"]


def test_a_warning_names_what_it_is_about() -> None:
    for message in find_warnings():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+", message.name), message.place
