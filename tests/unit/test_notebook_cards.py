"""What notebooks show of ebbtide's objects: their texts, escaped, and the picture of a trace."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide import TraceEvent

POLICY = ebbtide.ActivationPolicy(min_bytes=1)
EVIL = '<script>alert("&")</script>'


class Page(HTMLParser):
    """The tags of a text, of which each must be closed, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def train(net: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        net(torch.randn(64, 64)).sum().backward()


def model(depth: int = 3) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(depth)])


@pytest.fixture(scope="module")
def shown() -> dict[str, object]:
    """Each kind of object that shows itself, after a step."""
    net = model()
    found: dict[str, object] = {}
    with ebbtide.offload(net, activations=POLICY, trace=True) as handle:
        train(net)
        found |= {"stats": handle.stats, "trace": handle.trace, "inspect()": handle.inspect()}
        found |= {"explain()": handle.explain(), "memory": handle.explain().memory}
    with ebbtide.offload(net, budget="16GiB") as handle:
        train(net, 2)
        found["plan"] = handle.plan
    found["schedule"] = ebbtide.schedule.default(2, 40)
    found["trace without events"] = ebbtide.Trace()
    return found


def test_objects_show_what_they_print_and_load_nothing(shown: dict[str, object]) -> None:
    for name, thing in shown.items():
        text = thing._repr_html_()  # type: ignore[attr-defined]
        page = Page(text)
        assert page.words == str(thing), name
        assert set(page.tags) <= {"pre", "img"}, name
        rest = re.sub(r'src="data:image/png;base64,[^"]*"', "", text)
        assert not re.search(r"https?:|src=|url\(|@import|\bon\w+=", rest), name
    assert Page(shown["trace"]._repr_html_()).tags == ["img", "pre"]  # type: ignore[attr-defined]


def test_names_are_escaped() -> None:
    net = nn.Sequential(OrderedDict(zip((EVIL, "b", "c"), model(), strict=True)))
    with ebbtide.offload(net, activations=POLICY) as handle:
        train(net)
        inspection = handle.inspect()
    assert str(inspection).count("<script")  # what a terminal prints is not escaped
    assert "<script" not in inspection._repr_html_()


def test_without_matplotlib_a_trace_shows_its_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trace = ebbtide.Trace(
        TraceEvent(what, lane, at * 1e-3, (at + 0.9) * 1e-3, at, name="blocks." + "x" * 50)
        for at in range(10)
        for what, lane in (("forward", "compute"), ("offload", "d2h"), ("reload", "h2d"))
    )
    page = Page(trace._repr_html_())
    assert "img" not in page.tags
    assert trace.timeline(100) in page.words
