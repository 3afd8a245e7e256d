"""A schedule rehearsed: the same engine, in virtual time; and the command that shows it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import call
from ebbtide import PolicyError, ScheduleError, Trace, rehearse, schedule

MIB = 2**20


def moments(trace: Trace, what: str) -> dict[int | None, float]:
    return {event.layer: event.begin_s for event in trace.events if event.what == what}


def test_a_fast_link_costs_nothing() -> None:
    plan = schedule.default(4, 20)
    trace = rehearse(plan, layer_bytes="64MiB", forward_s=1e-2, bandwidth_bytes_per_s=64e9)
    assert trace.duration_s == pytest.approx(20 * 1e-2 + 20 * 2e-2)
    # F16 begins when 16 forwards have run: there layer 0 is released. B18 begins after 20 forwards
    # and one backward: there layer 3 starts to come back.
    assert moments(trace, "release")[0] == pytest.approx(16 * 1e-2)
    assert moments(trace, "reload")[3] == pytest.approx(20 * 1e-2 + 2e-2)
    copies = [event for event in trace.events if event.what in ("offload", "reload")]
    assert len(copies) == 8
    for event in copies:
        assert event.size_bytes == 64 * MIB
        assert event.duration_s == pytest.approx(64 * MIB / 64e9, rel=1e-3)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_where_autograd_does_not_record_it_is_the_same(around: Any) -> None:
    plan = schedule.default(1, 3)
    expected = rehearse(plan).events
    with around():
        assert rehearse(plan).events == expected


def test_a_slow_link_makes_compute_wait() -> None:
    plan = schedule.default(1, 2)
    trace = rehearse(plan, layer_bytes=100, forward_s=1.0, bandwidth_bytes_per_s=50.0)
    # Layer 0 is computed at 1 s and out 2 s later; only then layer 1 computes, 3 s to 4 s. Backward
    # of layer 1 runs to 6 s; then layer 0 comes back in 2 s, and takes 2 s.
    assert trace.duration_s == pytest.approx(10.0)


def test_sizes_and_times_for_each_layer() -> None:
    plan = schedule.default(1, 3)
    trace = rehearse(
        plan,
        layer_bytes={0: "4KiB", 1: 7, 2: 9},
        forward_s={0: 1.0, 1: 2.0, 2: 3.0},
        backward_s={0: 1.0, 1: 1.0, 2: 0.5},
        bandwidth_bytes_per_s=1e9,
    )
    assert trace.duration_s == pytest.approx(6.0 + 2.5, rel=1e-4)
    assert {e.size_bytes for e in trace.events if e.what == "offload"} == {4096}


def test_a_split_backward() -> None:
    plan = schedule.from_pipeline("0F0 0F1 0I0 0F2 0I1 0W0 0W1 0I2 0W2", resident=2)
    trace = rehearse(plan, forward_s=1e-2, bandwidth_bytes_per_s=1e12)
    # Three forwards and three backwards of two halves each, whatever their order.
    assert trace.duration_s == pytest.approx(3 * 1e-2 + 3 * 2e-2, rel=1e-2)


def test_microbatches_are_told_apart() -> None:
    plan = schedule.from_pipeline("2F0 2F1 2F2 2B0 2B1 2B2", resident=2)
    trace = rehearse(plan)
    released = {(e.layer, e.microbatch) for e in trace.events if e.what == "release"}
    assert released == {(unit.layer, unit.microbatch) for unit in plan.offloaded} != set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layer_bytes": 0}, "layer_bytes of layer [01] must be a positive number"),
        ({"layer_bytes": {0: 1}}, "nothing of layer 1"),
        ({"layer_bytes": "many"}, "layer_bytes"),
        ({"forward_s": 0.0}, "forward_s of layer 0"),
        ({"backward_s": {0: 1.0}}, "backward_s of layer 1"),
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_s"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        rehearse(schedule.default(1, 2), **arguments)


def test_a_bad_schedule() -> None:
    with pytest.raises(ScheduleError):
        rehearse(schedule.Schedule.parse("order: F0 B0\nF0: reload 0"))


# ---- the command ---------------------------------------------------------------------------------


def invoke(*arguments: str, **options: str) -> tuple[int, str]:
    result = call("schedule", *arguments, **options)
    return result.exit_code, result.output


def test_the_command_shows_the_default(tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    code, output = invoke("--layers", "4/20", "--out", str(picture))
    assert code == 0
    assert "F16: release 0" in output
    # 4 of 20 layers of 64 MiB at 25 GB/s: 16 stay, and a copy takes 64 * 2**20 / 25e9 s. There are
    # 20 forwards of 10 ms and 20 backwards of 20 ms; copies are faster than that.
    found = re.findall(r"([\d.]+)(?: x 64.0 MiB| ms)", output)
    assert found[:4] == ["16", "20", "2.68", "600"]
    assert max(map(len, output.splitlines()[:-1])) <= 80
    assert picture.stat().st_size > 1000


def test_the_command_reads_files_and_pipelines(tmp_path: Path) -> None:
    file = tmp_path / "schedule.txt"
    file.write_text(str(schedule.default(2, 5)))
    assert "F3: release 0" in invoke(str(file))[1]
    assert "F3: release 0" in invoke("-", input=file.read_text())[1]
    assert invoke("--pipeline", "0F0 0F1 0F2 0B0 0B1 0B2", "--resident", "2")[0] == 0


def test_a_file_that_is_no_text_is_no_schedule(tmp_path: Path) -> None:
    file = tmp_path / "schedule.pt"
    file.write_bytes(bytes(range(128, 256)))
    assert invoke(str(file))[0] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give one schedule"),
        (("--layers", "4/20", "--pipeline", "0F0 0B0"), "give one schedule"),
        (("--layers", "4"), "not of the form k/N"),
        (("--layers", "20/20"), "fewer than 20 can be offloaded"),
        (("nowhere.txt",), "nowhere.txt"),
        (("--layers", "1/2", "--layer-size", "big"), "--layer-size"),
        (("--layers", "1/2", "--out", "step.gif"), "step.gif"),
        (("--pipeline", "0F0 0X0"), "0X0"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: tuple[str, ...], words: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert words in output
