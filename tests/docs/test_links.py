"""The README's links work on the package page, too, where there are no files beside it."""

from __future__ import annotations

import re

from test_docs import ROOT

README = (ROOT / "README.md").read_text()
HOME = "https://github.com/ebbtide/ebbtide"
PLACES = (f"{HOME}/blob/main/", "https://raw.githubusercontent.com/ebbtide/ebbtide/main/")


def test_every_link_is_absolute_and_leads_to_a_file() -> None:
    definitions = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", README, re.MULTILINE))
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    used = {match.lower() for match in re.findall(r"\]\[([^\]]+)\]", text)}
    assert used == definitions.keys(), "a link without an address, or an address without a link"
    assert not re.findall(r"\]\((?!https?://)", text), "a relative link"
    for address in definitions.values():
        place = next((place for place in PLACES if address.startswith(place)), None)
        assert place, f"{address} is not in the repository"
        assert (ROOT / address.removeprefix(place)).is_file(), f"{address} leads nowhere"


def test_pictures_are_addressed_raw() -> None:
    """The page of a picture is no picture."""
    pictures = re.findall(r'<img src="([^"]+)"', README)
    assert pictures
    assert "![" not in README, "a picture whose width is not given"
    for address in pictures:
        assert address.startswith(PLACES[1])
        assert (ROOT / address.removeprefix(PLACES[1])).is_file()


def test_the_metadata_has_the_same_home() -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    urls = dict(re.findall(r'^(\w+) = "(https://[^"]+)"$', metadata, re.MULTILINE))
    assert urls.keys() == {"Repository", "Documentation", "Changelog", "Issues"}
    assert urls["Repository"] == HOME
    assert all(address.startswith(HOME) for address in urls.values())
    for name in ("Documentation", "Changelog"):
        assert (ROOT / urls[name].split("/main/")[1]).exists()
