"""Checks a built site without a network, and counts what is in it.

    python docs/_site/site_check.py build/site

Every link within the site must lead to a page and, where it names one, to a place on that page.
Every picture must be there. A link to a file of the repository must lead to a file of this tree.
The reference must have every public name, and every name that an example imports from ebbtide.
"""

from __future__ import annotations

import ast
import re
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urlsplit

ROOT = Path(__file__).parents[2]
PLACES = (
    "https://github.com/ebbtide/ebbtide/blob/main/",
    "https://github.com/ebbtide/ebbtide/tree/main/",
    "https://raw.githubusercontent.com/ebbtide/ebbtide/main/",
)
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Page(NamedTuple):
    """What a page has that others can refer to, and what it refers to."""

    ids: set[str]
    links: list[str]
    pictures: list[str]


class _PageParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page(set(), [], [])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.page.ids.update(filter(None, (found.get("id"), found.get("name"))))
        if tag in ("a", "link") and found.get("href"):
            self.page.links.append(found["href"] or "")
        if tag in ("img", "script") and found.get("src"):
            self.page.pictures.append(found["src"] or "")


def read_page(path: Path) -> Page:
    parser = _PageParser()
    parser.feed(path.read_text())
    return parser.page


def read_pages(site: Path) -> dict[Path, Page]:
    """Read all pages but the theme's templates."""
    return {path: read_page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def find_dead_links(site: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield a line for each link or picture that leads nowhere.

    Args:
        site: the folder of the built site.
        root: the folder of the repository.
    """
    site = site.resolve()
    pages = read_pages(site)
    for path, page in sorted(pages.items()):
        for link in (*page.links, *page.pictures):
            why = _why_dead(link, path, pages, root)
            if why:
                yield f"{path.relative_to(site)}: {link}: {why}"


def _why_dead(link: str, path: Path, pages: dict[Path, Page], root: Path) -> str | None:
    for place in PLACES:
        if link.startswith(place):
            there = root / unquote(urldefrag(link.removeprefix(place)).url)
            return None if there.exists() else "not in the repository"
    if urlsplit(link).scheme:
        return None  # the rest of the world is not asked
    address, anchor = urldefrag(unquote(link))
    target = (path.parent / address.partition("?")[0]).resolve() if address else path
    if not target.is_file():
        return "no such file"
    if anchor and target in pages and anchor not in pages[target].ids:
        return "no such place on the page"
    return None


def read_names(inventory: Path) -> set[str]:
    """Return the names of the reference, from the inventory that Sphinx writes."""
    packed = inventory.read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(packed).decode().splitlines()
    return {line.split(" ", 1)[0] for line in lines if " py:" in line}


def find_imports(text: str) -> Iterator[str]:
    """Yield the full names that the Python examples of a page import from ebbtide."""
    for example in EXAMPLE.findall(text):
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ebbtide"):
                yield from (f"{node.module}.{each.name}" for each in node.names)


def find_missing_names(site: Path, docs: Path) -> Iterator[str]:
    import ebbtide

    names = read_names(site / "objects.inv")
    wanted = {f"ebbtide.{name}": "ebbtide.__all__" for name in ebbtide.__all__}
    for page in sorted(docs.rglob("*.md")):
        wanted |= dict.fromkeys(find_imports(page.read_text()), str(page.relative_to(docs)))
    for name, where in sorted(wanted.items()):
        if name not in names:
            yield f"{name}, of {where}, is not in the reference"


def main(site: Path) -> int:
    docs = ROOT / "docs"
    faults = [*find_dead_links(site), *find_missing_names(site, docs)]
    for fault in faults:
        print(fault, file=sys.stderr)
    pages = read_pages(site).values()
    links = sum(len(page.links) for page in pages)
    pictures = {picture for page in pages for picture in page.pictures if "_images" in picture}
    examples = sum(len(EXAMPLE.findall(page.read_text())) for page in docs.rglob("*.md"))
    print(
        f"site: {len(pages)} pages, {links} links, {len(pictures)} pictures, "
        f"{len(read_names(site / 'objects.inv'))} names in the reference, {examples} Python "
        f"examples (tests/docs runs them); {len(faults)} faults"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
