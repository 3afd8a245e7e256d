"""The cards that notebooks show: whole, escaped, without outside resources, and of bounded size."""

from __future__ import annotations

import base64
import re
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.runtime.events import TraceEvent
from ebbtide.units import COLOURS, Share, bar, card, facts, folded, note, table

POLICY = ebbtide.ActivationPolicy(min_bytes=1)
EVIL = '<script>alert("&")</script>'


class Page(HTMLParser):
    """The tags of a text, of which each must be closed, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        self.open.append(tag)
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words += data
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1].append(data)


def train(net: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        net(torch.randn(64, 64)).sum().backward()


def model(depth: int = 3) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(depth)])


@pytest.fixture(scope="module")
def cards() -> dict[str, str]:
    """Each kind of card, after a step."""
    net = model()
    found = {}
    with ebbtide.offload(net, activations=POLICY, trace=True) as handle:
        found["handle before"] = handle._repr_html_()
        train(net)
        for name in ("handle", "handle.stats", "handle.trace", "handle.inspect()"):
            found[name] = eval(name, {"handle": handle})._repr_html_()
    with ebbtide.offload(net, budget="16GiB") as handle:
        train(net, 2)
        assert handle.plan is not None
        found["plan"] = handle.plan._repr_html_()
    resting = ebbtide.WeightPolicy()
    with ebbtide.offload(net, weights=resting, activations=POLICY) as handle:
        train(net)
        found["inspect() of weights"] = handle.inspect()._repr_html_()
    found["schedule"] = ebbtide.schedule.default(2, 40)._repr_html_()
    found["session"] = ebbtide.OffloadSession(2, 6, device="cpu")._repr_html_()
    found["trace without events"] = ebbtide.Trace()._repr_html_()
    return found


def test_each_card_is_whole_html_and_loads_nothing(cards: dict[str, str]) -> None:
    for name, text in cards.items():
        page = Page(text)
        assert page.tags.count("style") == 1, name
        assert not {"script", "link", "iframe"} & set(page.tags), name
        rest = re.sub(r'src="data:image/png;base64,[^"]*"', "", text)
        assert not re.search(r"https?:|src=|url\(|@import|\bon\w+=", rest), name
        assert 'class="ebbtide"' in text


def test_a_card_takes_its_colours_from_the_page(cards: dict[str, str]) -> None:
    """A fixed colour of text or ground is wrong on a page that is dark, or on one that is light."""
    for text in cards.values():
        style = text.partition("</style>")[0]
        assert not re.search(r"#[0-9a-fA-F]{3,6}", style)
        assert not re.search(r"(?<!-)color:(?!inherit)", style)
        used = set(re.findall(r"#[0-9A-F]{6}", text))
        assert used <= set(COLOURS.values())


def test_the_rules_of_a_card_are_for_it_alone_and_outrank_those_of_notebooks(
    cards: dict[str, str],
) -> None:
    """`.jp-RenderedHTMLCommon:not(.jp-RenderedMarkdown) td` has two classes and aligns right."""
    style = cards["handle"].partition("<style>")[2].partition("</style>")[0]
    selectors = [one for rule in re.findall(r"([^{}]+)\{", style) for one in rule.split(",")]
    assert len(selectors) >= 20
    assert all(one.strip().startswith(".ebbtide" * 3) for one in selectors)


def test_a_card_fits_narrow_screens(cards: dict[str, str]) -> None:
    """What is wide scrolls by itself: each table, picture and text of columns is in such a box."""
    for name, text in cards.items():
        wide = len(re.findall(r"<(?:table|img|pre)[ >]", text))
        assert text.count('<div class="ebbtide-wide">') == wide, name
        assert "overflow-x:auto" in text


def test_a_bar_shows_what_became_of_the_bytes(cards: dict[str, str]) -> None:
    """64 x 64 floats, 16 KiB: each of 3 layers saves its input and the GELU's, or rebuilds it."""
    for name in ("handle", "handle.stats", "handle.inspect()"):
        widths = re.findall(r'<span style="width:([\d.]+)%', cards[name])
        assert sum(map(float, widths)) == pytest.approx(100, abs=0.05)
    assert "KiB offloaded" in Page(cards["handle"]).words
    assert 'class="ebbtide-bar"' not in cards["handle before"]


def test_statistics_that_are_zero_are_pale(cards: dict[str, str]) -> None:
    rows = re.findall(
        r"<tr( class=\"ebbtide-zero\")?><td>(\w+)</td><td[^>]*>([^<]+)", cards["handle.stats"]
    )
    assert len(rows) == len(ebbtide.StepStats.__dataclass_fields__)
    for pale, name, text in rows:
        assert bool(pale) == (text.startswith("0") and float(text.split()[0]) == 0), name


def test_a_plan_has_a_row_for_each_run_of_layers(cards: dict[str, str]) -> None:
    rows = Page(cards["plan"]).rows
    assert ["peak", "step"] in rows or ["", "peak", "step"] in rows
    heads = ["layers", "how", "keep", "offload", "rebuild", "why"]
    assert heads in rows
    assert rows[rows.index(heads) + 1 :]


def test_a_long_schedule_is_folded() -> None:
    text = ebbtide.schedule.default(30, 40)._repr_html_()
    page = Page(text)
    assert page.tags.count("details") == 1
    anchors = [row for row in page.rows if len(row) == 2 and re.fullmatch(r"[FB]\d+", row[0])]
    assert len(anchors) == len(ebbtide.schedule.default(30, 40).lines)
    assert "<details><summary>" in text


def test_a_long_inspection_is_folded() -> None:
    net = model(30)
    with ebbtide.offload(net, activations=POLICY) as handle:
        train(net)
        inspection = handle.inspect()
        page = Page(inspection._repr_html_())
    shown = [row for row in page.rows if len(row) >= 6 and row[0] != "layer"]
    assert len(shown) == len(inspection.storages) > 40
    assert "details" in page.tags


def test_names_are_escaped() -> None:
    parts = [
        facts({EVIL: EVIL}),
        table([EVIL], [[EVIL]], numbers=()),
        bar([Share("keep", EVIL, 1)]),
        folded(EVIL, note(EVIL)),
    ]
    text = card(EVIL, *parts)
    assert "<script" not in text
    assert Page(text).words.count(EVIL) == 8
    event = TraceEvent("forward", "compute", 0.0, 0.5, 0, name=EVIL)
    assert "<script" not in ebbtide.Trace([event])._repr_html_()
    net = type(EVIL, (nn.Linear,), {})(2, 2)
    with ebbtide.offload(net) as handle:
        assert EVIL in Page(handle._repr_html_()).words
        assert "<script" not in handle._repr_html_()


def test_a_bar_of_nothing_is_nothing() -> None:
    assert bar([]) == bar([Share("keep", "kept", 0)]) == ""


# Traces


EVENTS = [
    TraceEvent(what, lane, at * 1e-3, (at + 0.9) * 1e-3, at, name="blocks." + "x" * 50)
    for at in range(2000)
    for what, lane in (("forward", "compute"), ("offload", "d2h"), ("reload", "h2d"))
]


def test_a_trace_shows_the_picture_that_plot_draws(tmp_path: Path) -> None:
    """At half as many pixels, so that a trace of thousands of layers stays small, too."""
    pytest.importorskip("matplotlib")
    trace = ebbtide.Trace(EVENTS)
    text = trace._repr_html_()
    assert len(text) < 200_000
    packed = re.search(r'src="data:image/png;base64,([^"]+)"', text)
    assert packed is not None
    shown = base64.b64decode(packed[1])
    trace.plot(tmp_path / "lanes.png")
    saved = (tmp_path / "lanes.png").read_bytes()
    (width, height), (full_width, full_height) = (size_of(data) for data in (shown, saved))
    assert full_width == 2400
    assert (2 * width, 2 * height) == (full_width, full_height)


def size_of(png: bytes) -> tuple[int, int]:
    """The header of a PNG has width and height in its bytes 16 to 23."""
    return struct.unpack(">II", png[16:24])


def test_without_matplotlib_a_trace_shows_its_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trace = ebbtide.Trace(EVENTS[:30])
    page = Page(trace._repr_html_())
    assert "img" not in page.tags
    assert trace.timeline(100) in page.words


def test_an_empty_trace_says_so() -> None:
    assert "an empty trace" in Page(ebbtide.Trace()._repr_html_()).words
