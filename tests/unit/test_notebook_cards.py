"""The cards that notebooks show: whole, escaped, without outside resources, and of bounded size."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide import TraceEvent
from ebbtide.units import Share, bar, card, facts, folded, note, table

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


def test_a_bar_shows_what_became_of_the_bytes(cards: dict[str, str]) -> None:
    """64 x 64 floats, 16 KiB: each of 3 layers saves its input and the GELU's, or rebuilds it."""
    for name in ("handle", "handle.stats"):
        widths = re.findall(r'<span style="width:([\d.]+)%', cards[name])
        assert sum(map(float, widths)) == pytest.approx(100, abs=0.05)
    assert "KiB offloaded" in Page(cards["handle"]).words
    assert 'class="ebbtide-bar"' not in cards["handle before"]


def test_a_long_inspection_is_folded() -> None:
    net = model(30)
    with ebbtide.offload(net, activations=POLICY) as handle:
        train(net)
        inspection = handle.inspect()
        page = Page(inspection._repr_html_())
    assert len(inspection.storages) > 40
    assert str(inspection) in page.words and "details" in page.tags
    assert "<details open>" not in inspection._repr_html_()


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


# Traces


EVENTS = [
    TraceEvent(what, lane, at * 1e-3, (at + 0.9) * 1e-3, at, name="blocks." + "x" * 50)
    for at in range(2000)
    for what, lane in (("forward", "compute"), ("offload", "d2h"), ("reload", "h2d"))
]


def test_without_matplotlib_a_trace_shows_its_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trace = ebbtide.Trace(EVENTS[:30])
    page = Page(trace._repr_html_())
    assert "img" not in page.tags
    assert trace.timeline(100) in page.words
