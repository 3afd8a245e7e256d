"""Records of runs: what a handle puts into them, their files, and what Perfetto is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from commands import call
from ebbtide import Trace, TraceEvent
from ebbtide.errors import PolicyError
from ebbtide.handle import record_run
from ebbtide.observe.run_record import (
    RunRecord,
    layer_figures,
    load_records,
    save_record,
)
from ebbtide.observe.trace import MEMORY_COUNTER
from ebbtide.runtime.events import Owner
from report_cases import MIB, make_record

KIB = 1024
ROWS, WIDTH = 256, 64  # one activation is 64 KiB
POLICY = ebbtide.ActivationPolicy(min_bytes=32 * KIB, rebuild=False, keep_last=1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])


def step(net: nn.Module) -> None:
    net(torch.randn(ROWS, WIDTH)).square().mean().backward()


def run(*, trace: bool = True) -> RunRecord:
    net = model()
    with ebbtide.offload(net, activations=POLICY, trace=trace) as handle:
        step(net)
        return record_run(handle, "a run")


# What a handle records


def test_the_layers_of_a_real_step_add_up_to_its_statistics() -> None:
    record = run()
    assert record.stats is not None
    layers = [each for each in record.layers if each.index is not None]
    assert [(each.index, each.name) for each in layers] == [(0, "0"), (1, "1"), (2, "2")]
    for name in ("kept_bytes", "offloaded_bytes", "rebuilt_bytes", "recomputed_bytes"):
        assert sum(getattr(each, name) for each in record.layers) == getattr(record.stats, name)
    # Block 0 saves its input and its output, block 1 its output; that of the last one stays.
    assert [each.offloaded_bytes for each in layers] == [128 * KIB, 64 * KIB, 0]
    passes = [event for event in record.events if event.what == "forward"]
    assert [each.forward_s for each in layers] == [event.duration_s for event in passes]
    assert all(each.backward_s for each in layers)


def test_settings_and_versions_say_what_ran() -> None:
    record = run()
    assert "keep_last=1" in record.settings["activations"]
    assert record.versions["torch"] == torch.__version__
    assert record.versions["device"].startswith("cpu")
    assert record.title == "a run"


def test_recomputed_layers_have_their_bytes() -> None:
    net = model()
    policy = ebbtide.ActivationPolicy(min_bytes=32 * KIB, mode="recompute", num_layers=2)
    with ebbtide.offload(net, activations=policy, trace=True) as handle:
        step(net)  # it verifies that the layers can be recomputed
        step(net)
        record = record_run(handle)
    assert record.stats is not None and record.stats.recomputed_bytes
    recomputed = {each.index: each.recomputed_bytes for each in record.layers}
    assert recomputed[0] and recomputed[1]
    assert sum(recomputed.values()) == record.stats.recomputed_bytes


def test_what_a_plan_predicts_is_on_record() -> None:
    net = model()
    with ebbtide.offload(net, budget="8GiB", trace=True) as handle:
        for _ in range(6):
            step(net)
        record = record_run(handle)
    assert record.budget_bytes == 8 * 2**30
    assert record.settings["budget"] == "8.00 GiB"
    assert handle.plan is not None
    assert record.predicted_peak_bytes == handle.plan.plan.peak_bytes > 0
    assert record.predicted_step_s == handle.plan.plan.step_s


def test_waits_for_weights_are_not_those_of_a_layer() -> None:
    """Weights move in groups, whose numbers are not those of layers."""
    events = [
        TraceEvent("wait", "compute", 0.0, 1.0, 3, name="blocks.3"),
        TraceEvent("wait", "compute", 1.0, 3.0, 3, name="blocks.7", kind="weights"),
    ]
    (layer,) = layer_figures(None, events)
    assert (layer.name, layer.wait_s) == ("blocks.3", 1.0)


# Files


def with_an_empty_owner(record: RunRecord) -> RunRecord:
    """An owner that is named with no bytes differs from one that is not named."""
    assert record.memory is not None
    first, *others = record.memory.samples
    named = dataclasses.replace(first, owned={**first.owned, Owner.REBUILT: 0})
    memory = dataclasses.replace(record.memory, samples=(named, *others))
    return dataclasses.replace(record, memory=memory)


def with_rounded_times(record: RunRecord) -> RunRecord:
    """A Chrome trace has its times in microseconds, which costs the last digits of seconds."""

    def rounded(events: tuple[TraceEvent, ...]) -> tuple[TraceEvent, ...]:
        return tuple(
            dataclasses.replace(each, begin_s=round(each.begin_s, 9), end_s=round(each.end_s, 9))
            for each in events
        )

    return dataclasses.replace(record, events=rounded(record.events))


MAKE_RECORD = {
    "traced": run,
    "untraced": lambda: run(trace=False),
    "made up": lambda: make_record("made up", 8, 6),
    "an empty owner": lambda: with_an_empty_owner(make_record("made up", 8, 6)),
}


@pytest.mark.parametrize("kind", MAKE_RECORD)
def test_a_file_gives_back_an_equal_record(kind: str, tmp_path: Path) -> None:
    record = MAKE_RECORD[kind]()
    save_record(tmp_path / "run.json", record)
    (loaded,) = load_records(tmp_path / "run.json")
    assert with_rounded_times(loaded) == with_rounded_times(record)


def test_the_file_is_a_chrome_trace_with_memory_as_a_counter(tmp_path: Path) -> None:
    record = make_record("made up", 4, 2)
    save_record(tmp_path / "run.json", record)
    document = json.loads((tmp_path / "run.json").read_text())
    assert document.keys() == {"displayTimeUnit", "traceEvents", "ebbtide"}
    rows = document["traceEvents"]
    counters = [row for row in rows if row["ph"] == "C"]
    assert record.memory is not None
    assert len(counters) == len(record.memory.samples)
    for row, sample in zip(counters, record.memory.samples, strict=True):
        assert row["name"] == MEMORY_COUNTER
        assert row["ts"] == pytest.approx(sample.begin_s * 1e6)
        assert sum(row["args"].values()) == sample.peak_bytes
    # A viewer would take a missing series as unchanged: all values have all of them.
    assert len({tuple(row["args"]) for row in counters}) == 1
    assert Owner.RELOADED.value in counters[0]["args"]


def test_a_trace_saves_its_memory_and_one_without_has_no_counter(tmp_path: Path) -> None:
    record = make_record("made up")
    for memory, number in ((record.memory, 17), (None, 0)):
        Trace(record.events, memory).save(tmp_path / "trace.json")
        rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert sum(row["ph"] == "C" for row in rows) == number  # 8 F, 8 B, the optimizer


def test_a_trace_file_gives_a_record_of_its_events(tmp_path: Path) -> None:
    events = [
        *make_record("made up", 4, 2).events,
        TraceEvent("reload", "h2d", 0.5, 0.75, 1, 1, "blocks.1", 2 * MIB, "weights"),
        TraceEvent("offload", "disk", 0.5, 0.75, 1, 0, "blocks.1", 2 * MIB, "gradients"),
        TraceEvent("offload", "disk", 0.625, 1.0, None, 0, "", 2 * MIB),
    ]
    trace = Trace(events)
    trace.save(tmp_path / "step 7.json")
    (record,) = load_records(tmp_path / "step 7.json")
    assert record.title == "step 7"
    assert record.memory is None and record.stats is None
    assert len(record.events) == len(trace.events)
    for got, expected in zip(record.events, trace.events, strict=True):
        assert got.begin_s == pytest.approx(expected.begin_s)
        assert got.end_s == pytest.approx(expected.end_s)
        begin_s, end_s = expected.begin_s, expected.end_s
        assert dataclasses.replace(got, begin_s=begin_s, end_s=end_s) == expected


WRONG_FILES = {
    "text": ("a log\n", "JSONDecodeError"),
    "a list": ("[1, 2]", "AttributeError"),
    "another program's trace": (
        '{"traceEvents": [{"ph": "X", "ts": 1, "dur": 2, "tid": 7, "name": "x"}]}',
        "KeyError: 'args'",
    ),
    "rows that are none": ('{"traceEvents": [3]}', "AttributeError"),
    "a run without a step": (
        '{"format": "ebbtide-run", "version": 3, "records": []}',
        "no model has finished a step",
    ),
    "an older run": ('{"format": "ebbtide-run", "version": 1}', "record the run again"),
    "a damaged run": ('{"format": "ebbtide-run", "version": 3, "records": [{}]}', "KeyError"),
    "a plan": ('{"format": "ebbtide-plan", "version": 1}', "KeyError: 'traceEvents'"),
    "a newer record": (
        '{"ebbtide": {"format": "ebbtide-record", "version": 99}}',
        "version 99.*install the ebbtide that wrote it",
    ),
    "a damaged record": ('{"ebbtide": {"format": "ebbtide-record", "version": 5}}', "lacks title"),
    "a foreign key": ('{"ebbtide": 3}', "TypeError"),
}


@pytest.mark.parametrize("kind", WRONG_FILES)
def test_a_wrong_file_says_what_is_wrong(kind: str, tmp_path: Path) -> None:
    text, message = WRONG_FILES[kind]
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(PolicyError, match=message):
        load_records(tmp_path / "run.json")


# The command


def test_the_command_writes_a_page_of_several_files(tmp_path: Path) -> None:
    save_record(tmp_path / "before.json", make_record("before the change"))
    make_trace = Trace(make_record("x", 4, 2).events)
    make_trace.save(tmp_path / "after.json")
    files = [str(tmp_path / name) for name in ("before.json", "after.json")]
    page = tmp_path / "page.html"
    result = call("report", *files, "-o", str(page))
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "before the change" in text and ">after<" in text


@pytest.mark.parametrize("name", ["missing.json", "wrong.json"])
def test_the_command_refuses_wrong_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text("{}")
    page = tmp_path / "page.html"
    result = call("report", str(tmp_path / name), "-o", str(page))
    assert result.exit_code == 2
    assert "ebbtide report: " in result.output and name in result.output
    assert not page.exists()
