"""The links of the docs work where the pages are read as files: on GitHub, or in an editor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from snippet_summary import ROOT, pages

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def links(page: Path) -> list[str]:
    return [link for link in LINK.findall(CODE.sub("", page.read_text())) if ":" not in link]


@pytest.mark.parametrize("page", pages()[1:], ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        address, _, anchor = link.partition("#")
        target = (page.parent / address).resolve() if address else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), (
                f"{link}: no such heading; there are {anchors(target)}"
            )


def test_every_page_begins_with_its_title_and_says_what_it_is_for() -> None:
    for page in pages()[1:]:
        lines = page.read_text().splitlines()
        assert lines[0].startswith("# "), page
        assert len(lines[2]) > 40, f"{page} does not begin with a sentence"


def test_links_are_found() -> None:
    """Were none found, nothing above could fail."""
    assert sum(len(links(page)) for page in pages()) > 200
    assert "the-memory-of-one-operation" in anchors(ROOT / "docs/concepts/what-bounds-you.md")
