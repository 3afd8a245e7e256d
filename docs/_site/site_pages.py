"""Turns the Markdown that GitHub shows into pages of the site.

The pages are read in both places, so three things are done while the site is built:

- A comment that begins with ``site`` becomes text: ``<!-- site :::{container} beside -->``. GitHub
  shows no comments, so directives of Sphinx can stand there.
- ``<!-- contents -->`` becomes the table of contents of a folder: the pages that the lists below it
  name, grouped by heading, and after them all other pages of the folder.
- A relative link to a file that is neither page nor picture, such as to an example, leads to the
  repository.

Beside that, each picture becomes a link to itself, and pages with code side by side are wide.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

REPOSITORY = "https://github.com/ebbtide/ebbtide/blob/main/"

_SITE_TEXT = re.compile(r"<!-- site\s(.*?)\s*-->", re.DOTALL)
_CONTENTS = "<!-- contents -->"
_HEADING = re.compile(r"^## (.+)$")
_ENTRY = re.compile(r"^[-*] \[([^\]]*)\]\(([^)#\s]+)\.md\)")
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")
_OTHERS = "More"
_IN_SITE = (".md", ".png")


class Group(NamedTuple):
    """Pages that stand together in the table of contents.

    Attributes:
        caption: the heading above them; empty for none.
        pages: for each page its path, relative to the page with the table and without the suffix,
            and the title that the table has for it; an empty title stands for the page's own.
    """

    caption: str
    pages: dict[str, str]


def for_site(text: str, page: Path, docs: Path) -> str:
    """Return the text of a page as the site needs it.

    Args:
        text: the page as it is in the repository.
        page: its file.
        docs: the folder of all pages.
    """
    text = _SITE_TEXT.sub(r"\1", text)
    text = _LINK.sub(lambda link: _address(link[1], page, docs), text)
    if _CONTENTS in text:
        trees = [_toctree(group) for group in read_groups(text, page) if group.pages]
        text = text.replace(_CONTENTS, "\n".join(trees))
    return text


def read_groups(text: str, page: Path) -> list[Group]:
    """Return the pages that the lists of a page name, by heading, and the rest of its folder.

    A page is named by a list entry that begins with a link to it. The folder's other pages come
    last; the first page of `docs` itself names all of its pages, so it has no others.
    """
    groups = [Group("", {})]
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            groups.append(Group(heading[1], {}))
        elif entry := _ENTRY.match(line):
            groups[-1].pages[entry[2]] = entry[1].replace("`", "")
    named = {os.path.normpath(page.parent / name) for group in groups for name in group.pages}
    others = {
        each.stem: ""
        for each in sorted(page.parent.glob("*.md"))
        if each != page and str(each.with_suffix("")) not in named
    }
    return [*groups, Group(_OTHERS if len(groups) > 1 else "", others)]


def _toctree(group: Group) -> str:
    caption = [f":caption: {group.caption}"] if group.caption else []
    pages = [f"{title} <{page}>" if title else page for page, title in group.pages.items()]
    return "\n".join(["```{toctree}", ":hidden:", *caption, "", *pages, "```", ""])


def _address(link: str, page: Path, docs: Path) -> str:
    """Return the repository's address of a file that the site lacks; other links as they are."""
    target = Path(os.path.normpath(page.parent / link))
    in_site = target.is_relative_to(docs) and target.suffix in _IN_SITE
    in_repository = target.is_relative_to(docs.parent) and target.exists()
    if in_site or not in_repository:
        return link
    return REPOSITORY + target.relative_to(docs.parent).as_posix()


def _read_source(app: Sphinx, name: str, source: list[str]) -> None:
    docs = Path(app.srcdir)
    source[0] = for_site(source[0], docs / f"{name}.md", docs)


def _make_room(app: Sphinx, doctree: nodes.document) -> None:
    """Let pictures lead to themselves at full size, and give code side by side the whole width.

    Sphinx makes a link of each picture that has a width.
    """
    for image in doctree.findall(lambda node: node.tagname == "image"):
        image.setdefault("width", "100%")
    if any("beside" in node["classes"] for node in doctree.findall(is_container)):
        metadata = app.env.metadata[app.env.docname]
        metadata["html_theme.sidebar_secondary.remove"] = "true"


def is_container(node: nodes.Node) -> bool:
    return node.tagname == "container"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _read_source)
    app.connect("doctree-read", _make_room)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
