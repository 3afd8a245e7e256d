"""The page of a report as text: what it says, that it is whole, safe and small."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.observe.page import figures_of
from ebbtide.observe.plots import OWNER_COLOURS
from ebbtide.runtime.events import Owner
from ebbtide.units import COLOURS
from report_cases import empty_record, make_record, page_of


def data_of(page: str) -> dict:
    packed = re.search(r'id="data">([^<]*)<', page)
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def test_the_page_needs_no_network() -> None:
    page = page_of(make_record("made up", 8, 6))
    assert "default-src 'none'" in page
    markup = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    assert re.findall(r'\b(?:src|href)="([^"]*)"', markup) == ["data:,"]
    assert "url(" not in page and "@import" not in page and "fetch(" not in page


def test_the_page_has_the_licence_of_what_it_contains() -> None:
    page = page_of(make_record("made up", 8, 6))
    assert "var uPlot=" in page
    assert "Copyright (c) 2022 Leon Sorokin" in page.partition("var uPlot=")[0]
    assert "THE SOFTWARE IS PROVIDED" in page.partition("var uPlot=")[0]


def test_a_page_of_1000_layers_is_small() -> None:
    """An eighth of that for one of eight layers, half of which is uPlot. Two runs fit, too."""
    before, after = make_record("before", 1000, 0), make_record("after", 1000, 900)
    assert len(after.events) > 5000
    assert len(page_of(after).encode()) < 1_000_000
    assert len(page_of(before, after).encode()) < 1_000_000
    assert len(page_of(make_record("made up", 8, 6)).encode()) < 125_000


def test_all_of_the_record_reaches_the_script() -> None:
    record = make_record("made up", 8, 6)
    (run,) = data_of(page_of(record))["runs"]
    assert sum(row["ph"] in ("X", "i") for row in run["traceEvents"]) == len(record.events)
    assert record.memory is not None
    samples = run["ebbtide"]["memory"]["samples"]
    assert len(samples) == len(record.memory.samples)
    first = {owner.name: size for owner, size in record.memory.samples[0].owned.items()}
    assert samples[0]["owned"] == first


def test_the_page_says_what_was_found() -> None:
    record = dataclasses.replace(make_record("made up", 8, 6), verdict="It is the copies.")
    page = page_of(record)
    assert '<p class="verdict">It is the copies.</p>' in page
    for finding in record.findings:
        assert finding.sentence.replace("'", "&#39;") in page
    assert record.limit_why in page
    assert "torch" in page and "2.13.0" in page
    assert record.notes[0] in page


@pytest.mark.parametrize(
    "bad", ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"'&<>"]
)
def test_names_are_never_read_as_html(bad: str) -> None:
    record = make_record(bad, 2, 1)
    layers = tuple(dataclasses.replace(layer, name=bad) for layer in record.layers)
    page = page_of(dataclasses.replace(record, layers=layers, settings={bad: bad}))
    assert bad not in page
    assert page.count("<script") == 3
    assert data_of(page)["runs"][0]["ebbtide"]["title"] == bad


def test_a_trace_alone_has_lanes_and_says_why_there_is_no_memory() -> None:
    page = page_of(empty_record("x", events=make_record("x").events))
    markup = page.partition("<script")[0]
    assert 'data-chart="lanes"' in markup and 'data-chart="memory"' not in markup
    assert "handle.save_run" in markup


def test_runs_are_compared_with_the_first() -> None:
    """512 MiB stay of 8 layers; with 6 of them gone, 128 MiB: three quarters less."""
    before, after = make_record("before", 8, 0), make_record("after", 8, 6)
    rows = figures_of([before, after])
    assert rows["Kept"] == [("512.0 MiB", ""), ("128.0 MiB", "\u221275%")]
    assert rows["Offloaded"] == [("0 B", ""), ("384.0 MiB", "")]
    assert rows["Rebuilt"] == [("64.0 MiB", ""), ("64.0 MiB", "")]
    assert "Recomputed" not in rows and "Budget" not in rows
    assert rows["Compute waited"] == [("0 s", ""), ("4.00 ms", "")]
    lost = dataclasses.replace(after, memory=None)
    rows = figures_of([before, lost])
    assert rows["Peak of memory"][1] == ("\u2013", "")


@pytest.mark.parametrize("trace", [True, False])
def test_a_handle_writes_a_page(trace: bool, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    policy = ebbtide.ActivationPolicy(min_bytes="32KiB")
    with ebbtide.offload(net, activations=policy, trace=trace) as handle:
        handle.report(tmp_path / "before.html")
        net(torch.randn(512, 64)).mean().backward()
        handle.report(tmp_path / "run.html", title="my run")
        handle.save_run(tmp_path / "run.json", title="my run")
    page = (tmp_path / "run.html").read_text()
    assert "<h1" in page and "my run" in page
    assert ('data-chart="lanes"' in page.partition("<script")[0]) is trace
    assert json.loads((tmp_path / "run.json").read_text())["ebbtide"]["title"] == "my run"
    with pytest.raises(OSError, match="missing"):
        handle.report(tmp_path / "missing" / "run.html")


def test_a_colour_means_the_same_for_owners_and_events() -> None:
    assert OWNER_COLOURS.keys() == set(Owner)
    assert len(set(OWNER_COLOURS.values())) == len(OWNER_COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)
    both = {owner: colour for owner, colour in OWNER_COLOURS.items() if colour in COLOURS.values()}
    assert both == {
        Owner.OTHER: COLOURS["other"],
        Owner.KEPT: COLOURS["keep"],
        Owner.LEAVING: COLOURS["offload"],
        Owner.RELOADED: COLOURS["reload"],
        Owner.REBUILT: COLOURS["rebuild"],
        Owner.RECOMPUTED: COLOURS["recompute"],
        Owner.OPTIMIZER: COLOURS["step"],
    }
