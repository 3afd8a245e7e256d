"""What the site does with the Markdown, and what its check finds. Needs no Sphinx."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from site_check import find_dead_links, find_imports, read_names
from site_names import name_in_code, name_of_target
from site_pages import Group, for_site, read_groups
from snippet_summary import ROOT

DOCS = ROOT / "docs"


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs" / "guides"
    folder.mkdir(parents=True)
    for name in ("index", "offload", "weights", "new"):
        (folder / f"{name}.md").write_text(f"# {name}\n")
    return tmp_path / "docs"


INDEX = """# Guides

<!-- contents -->

## Offload

- [Offloading](offload.md): what leaves
- [Elsewhere](../start/planning.md): a page of another folder
- not a [link](weights.md) at the begin of an entry

## Weights

- [Weights](weights.md#a-place): at rest
"""


def test_contents_are_the_lists_by_heading_and_then_the_rest(docs: Path) -> None:
    index = docs / "guides" / "index.md"
    groups = read_groups(INDEX, index)
    assert groups == [
        Group("", {}),
        Group("Offload", {"offload": "Offloading", "../start/planning": "Elsewhere"}),
        Group("Weights", {}),  # a link to a place on a page does not name the page
        Group("More", {"new": "", "weights": ""}),
    ]
    text = for_site(INDEX, index, docs)
    assert ":caption: Offload\n\nOffloading <offload>\nElsewhere <../start/planning>\n```" in text
    assert ":caption: More\n\nnew\nweights\n```" in text
    assert ":caption: Weights" not in text


def test_text_for_the_site_stands_in_comments(docs: Path) -> None:
    page = docs / "guides" / "new.md"
    text = "before\n<!-- site :::{container} beside -->\ncode\n<!-- site\nlines\nmore\n-->\n"
    assert for_site(text, page, docs) == "before\n:::{container} beside\ncode\nlines\nmore\n"
    assert for_site("<!-- other -->", page, docs) == "<!-- other -->"


def test_links_to_files_that_are_no_pages_lead_to_the_repository(docs: Path) -> None:
    page = docs / "guides" / "new.md"
    for name in ("example.py", "docs/tool.py"):
        (docs.parent / name).touch()
    address = "https://github.com/ebbtide/ebbtide/blob/main"
    for link, expected in {
        "../../example.py": f"{address}/example.py",
        "../tool.py": f"{address}/docs/tool.py",
        "../../gone.py": "../../gone.py",  # Sphinx warns of it
        "../faq.md#x": "../faq.md#x",
        "offload.md": "offload.md",
        "https://example.org": "https://example.org",
    }.items():
        assert for_site(f"[a]({link})", page, docs) == f"[a]({expected})"
    assert for_site("outputs[0](x)", page, docs) == "outputs[0](x)"


def test_every_page_is_in_the_contents_of_its_folder() -> None:
    """Also pages that nobody has put into a list."""
    for index in DOCS.rglob("index.md"):
        assert "<!-- contents -->" in index.read_text(), index
        named = {name for group in read_groups(index.read_text(), index) for name in group.pages}
        assert {page.stem for page in index.parent.glob("*.md")} - {"index"} <= named
    folders = {page.parent for page in DOCS.rglob("*.md")} - {DOCS / "start"}
    assert folders == {index.parent for index in DOCS.rglob("index.md")}


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ('<a href="other.html#there">', None),
        ('<a href="#here">', None),
        ('<a href="https://example.org/nowhere">', None),
        ('<a href="https://github.com/ebbtide/ebbtide/blob/main/README.md">', None),
        ('<img src="picture.png">', None),
        ('<a href="missing.html">', "missing.html: no such file"),
        ('<a href="other.html#gone">', "other.html#gone: no such place on the page"),
        ('<a href="#gone">', "#gone: no such place on the page"),
        ('<img src="missing.png">', "missing.png: no such file"),
        (
            '<a href="https://github.com/ebbtide/ebbtide/blob/main/gone.md">',
            "https://github.com/ebbtide/ebbtide/blob/main/gone.md: not in the repository",
        ),
    ],
)
def test_dead_links_are_found(tmp_path: Path, link: str, fault: str | None) -> None:
    site, root = tmp_path / "site", tmp_path / "root"
    site.mkdir()
    root.mkdir()
    (root / "README.md").touch()
    (site / "picture.png").touch()
    (site / "other.html").write_text('<h2 id="there">There</h2>')
    (site / "index.html").write_text(f'<h2 id="here">Here</h2>{link}')
    expected = [f"index.html: {fault}"] if fault else []
    assert list(find_dead_links(site, root)) == expected


def test_names_of_the_reference_are_read(tmp_path: Path) -> None:
    lines = b"ebbtide.offload py:function 1 reference.html#$ -\nindex std:doc -1 index.html Home\n"
    head = b"# Sphinx inventory version 2\n# Project: x\n# Version: 1\n# zlib\n"
    (tmp_path / "objects.inv").write_bytes(head + zlib.compress(lines))
    assert read_names(tmp_path / "objects.inv") == {"ebbtide.offload"}


def test_imports_of_examples_are_found() -> None:
    text = "```python\nimport torch\nfrom ebbtide.a.b import (\n    C,\n    d,\n)\n```\n"
    assert list(find_imports(text)) == ["ebbtide.a.b.C", "ebbtide.a.b.d"]
    assert list(find_imports("```py\nfrom ebbtide.a import b\n```\n")) == []


NAMES = {
    "ebbtide",
    "ebbtide.offload",
    "ebbtide.StepStats",
    "ebbtide.OffloadHandle",
    "ebbtide.OffloadHandle.stats",
    "ebbtide.OffloadHandle.detach",
    "ebbtide.OffloadSession",
    "ebbtide.schedule.default",
}


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("ebbtide.offload", "ebbtide.offload"),
        ('ebbtide.offload(model, budget="20GiB")', "ebbtide.offload"),
        ("ebbtide.schedule.default(4, 20)", "ebbtide.schedule.default"),
        ("StepStats", "ebbtide.StepStats"),
        ("StepStats.stall_s", "ebbtide.StepStats"),
        ("handle.stats.stall_s", "ebbtide.OffloadHandle.stats"),
        ("handle.detach()", "ebbtide.OffloadHandle.detach"),
        ("handle.unknown", None),  # not to the class: it has no such attribute
        ("offload", None),  # a word
        ("nn.Linear", None),
        ("Linear", None),
        ("ebbtide run train.py", None),
        ("ebbtide", None),
    ],
)
def test_code_leads_to_the_reference(code: str, name: str | None) -> None:
    assert name_in_code(code, NAMES) == name


def test_names_in_docstrings_lead_to_the_one_that_is_meant() -> None:
    assert name_of_target("ebbtide.handle.OffloadHandle", NAMES, "") == "ebbtide.OffloadHandle"
    assert name_of_target("detach", NAMES, "") == "ebbtide.OffloadHandle.detach"
    both = {*NAMES, "ebbtide.OffloadSession.stats"}
    assert name_of_target("stats", both, "ebbtide") is None
    assert name_of_target("stats", both, "ebbtide.OffloadSession") == "ebbtide.OffloadSession.stats"
    assert name_of_target("ebbtide.gone.Gone", NAMES, "") is None
