"""The demo's comparison, its table and its sentences, on figures that are made up."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ebbtide import StepStats
from ebbtide.tools import demo as demo_module
from ebbtide.tools import demo_worker as worker
from ebbtide.tools.demo import (
    Outputs,
    build_table,
    compare,
    limits,
    seconds_left,
    training,
)
from ebbtide.tools.demo_config import (
    DemoConfig,
    FinalResult,
    Mode,
    ModeResult,
    StepResult,
    first_difference,
)

GIB = 2**30


def step(
    *, duration_s: float = 2.0, peak: float = 3.0, stats: StepStats | None = None
) -> StepResult:
    return StepResult(
        duration_s=duration_s,
        peak_bytes=int(peak * GIB),
        loss=1.5,
        train_l2=0.5,
        train_h1=0.25,
        gradients_sha256="a",
        stats=stats,
        timeline=[(0.0, GIB), (1.0, 2 * GIB)],
    )


def result(mode: Mode, steps: list[StepResult]) -> ModeResult:
    final = FinalResult(0.1, 0.2, "p", GIB + 128 * 2**20, 256 * 2**20, ())
    return ModeResult(mode, GIB, steps, final)


def test_equal_runs_have_no_difference() -> None:
    steps = [step() for _ in range(3)]
    assert first_difference(result(Mode.NONE, steps), result(Mode.EBBTIDE, steps)) is None


def test_a_changed_bit_is_found_and_named() -> None:
    steps = [step() for _ in range(3)]
    reference = result(Mode.NONE, steps)
    other = dataclasses.replace(step(), gradients_sha256="b")
    assert first_difference(reference, result(Mode.EBBTIDE, [*steps[:2], other])) == (
        "gradients, step 3"
    )
    other = dataclasses.replace(step(), loss=1.5 + 2**-52)
    assert first_difference(reference, result(Mode.EBBTIDE, [other, *steps[1:]])) == "loss, step 1"
    changed = result(Mode.EBBTIDE, steps)
    changed.final = FinalResult(0.1, 0.2, "q", GIB, GIB, ())
    assert first_difference(reference, changed) == "final parameters"
    assert first_difference(reference, result(Mode.EBBTIDE, steps[:2])) == "number of steps"


def test_digest_sees_one_bit() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    flipped = value.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    base = worker.digest([("w", value)])
    assert worker.digest([("w", value.clone())]) == base
    assert worker.digest([("w", value.t().contiguous().t())]) == base
    others = [("w", flipped), ("v", value), ("w", value.reshape(3, 2)), ("w", None)]
    digests = {worker.digest([other]) for other in others}
    assert len(digests | {base}) == 5


def test_digest_takes_complex_and_scalar_tensors() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert worker.digest([("w", value.conj())]) == worker.digest([("w", value.conj_physical())])
    assert worker.digest([("w", value.conj())]) != worker.digest([("w", value)])
    assert worker.digest([("w", torch.tensor(1.0))]) != worker.digest([("w", torch.tensor(2.0))])


def render(config: DemoConfig, results: list[ModeResult]) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(build_table(config, results))
    for line in limits(config, results):
        console.print(line)
    return console.export_text()


def test_table_of_three_modes_on_an_accelerator_fits() -> None:
    config = DemoConfig(1024, 64, device=torch.device("meta"))
    stats = StepStats(saved_bytes=999 * GIB, unique_bytes=888 * GIB, offloaded_bytes=888 * GIB)
    results = [result(mode, [step(duration_s=123.4, peak=1234.5)] * 4) for mode in Mode]
    results[2].steps = [step(duration_s=123.4, peak=1234.5, stats=stats)] * 4
    table = render(config, results)
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table
    assert "save_on_cpu" in table
    assert "1234.50 GiB" in table


def test_ratios_are_of_what_is_above_idle_and_of_median_steps() -> None:
    config = DemoConfig()
    # Idle is 1 GiB. The first two steps of a turn of five are slow, and not counted.
    slow = step(duration_s=9.0)
    plain = result(Mode.NONE, [slow, slow, step(), step(), step(), slow, slow])
    offloaded = step(duration_s=3.0, peak=1.5, stats=StepStats(offloaded_bytes=GIB))
    other = result(Mode.EBBTIDE, [slow, slow, *[offloaded] * 3, slow, slow])
    other.steps = [dataclasses.replace(one, peak_bytes=int(1.5 * GIB)) for one in other.steps]
    table = render(config, [plain, other])
    assert "0.25x" in table  # (1.5 - 1) / (3 - 1)
    assert "1.50x" in table  # 3 s / 2 s


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_the_report_can_be_printed_in_any_encoding(encoding: str) -> None:
    """In a container without a locale, or with PYTHONIOENCODING, standard output may be ASCII."""
    written = io.TextIOWrapper(io.BytesIO(), encoding)
    console = Console(width=80, file=written)
    stats = StepStats(offloaded_bytes=GIB)
    results = [result(Mode.NONE, [step()] * 3), result(Mode.EBBTIDE, [step(stats=stats)] * 3)]
    console.print(build_table(DemoConfig(), results))
    for line in limits(DemoConfig(), results):
        console.print(line)
    with training(console, [Mode.NONE], 3) as note:
        note(Mode.NONE, step())
    written.flush()
    assert b"Peak RSS" in written.buffer.getvalue()


def test_a_difference_shows_in_the_table() -> None:
    steps = [step()] * 3
    results = [result(Mode.NONE, steps), result(Mode.EBBTIDE, steps)]
    assert "same bits" in render(DemoConfig(), results)
    results[1].steps = [*steps[:2], dataclasses.replace(step(), gradients_sha256="b")]
    assert compare(results) == {Mode.EBBTIDE: "gradients, step 3"}
    assert "differ:" in render(DemoConfig(), results)


def test_the_limit_is_said_in_figures() -> None:
    """Idle is 1 GiB. 128 MiB stay between steps, a forward needs 256: 384 MiB. The peak is 768."""
    stats = StepStats(offloaded_bytes=GIB)
    plain = result(Mode.NONE, [step()] * 3)
    other = result(Mode.EBBTIDE, [step(peak=1.75, stats=stats)] * 3)
    for results in ([plain, other], [other]):
        text = " ".join(render(DemoConfig(), results).split())
        assert "it needs 256.0 MiB for this batch" in text
        assert "With the 128.0 MiB of gradients and optimizer state" in text
        assert "384.0 MiB above idle is about what no offloader can go below" in text
        assert "ebbtide's peak is 2.00 times that" in text
    for peak, place in ((1.37, "just there"), (1.25, "below it, because it also returns")):
        lower = result(Mode.EBBTIDE, [step(peak=peak, stats=stats)] * 3)
        text = " ".join(render(DemoConfig(), [plain, lower]).split())
        assert f"ebbtide's peak is {place}" in text
    rebuilt = result(Mode.REBUILD, [step(peak=1.75, stats=stats)] * 3)
    assert "Limit" not in render(DemoConfig(), [plain, rebuilt])


def test_json_is_printed_instead_of_the_table(tmp_path: Path) -> None:
    results = [result(Mode.NONE, [step()] * 3)]
    for as_json in (False, True):
        report = io.StringIO()
        outputs = Outputs(Console(file=io.StringIO()), Console(file=report, width=80), as_json)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo_module, "draw", lambda *_: False)
            demo_module._report(DemoConfig(out=tmp_path), results, outputs)
        if as_json:
            assert json.loads(report.getvalue())["format"] == "ebbtide-demo"
            assert report.getvalue() == (tmp_path / "demo.json").read_text()
        else:
            assert "Peak RSS" in report.getvalue()
            assert 'Picture: not drawn; pip install "ebbtide[plots]"' in report.getvalue()


def test_noise_is_admitted() -> None:
    steps = [step(), step(), step(duration_s=2.0), step(duration_s=3.5)]
    assert any("vary" in line for line in limits(DemoConfig(), [result(Mode.NONE, steps)]))
    assert not any(
        "vary" in line for line in limits(DemoConfig(), [result(Mode.NONE, [step()] * 3)])
    )


def test_what_is_left_counts_the_steps_of_all_modes_at_their_own_speed() -> None:
    """Of 5 steps each: 3 at 2 s, 4 at 1 s; a mode without a step is as fast as the mean, 1.5 s."""
    assert seconds_left([[1.0, 3.0], [1.0]], 5) == 3 * 2.0 + 4 * 1.0
    assert seconds_left([[1.0, 3.0], [1.0], []], 5) == 3 * 2.0 + 4 * 1.0 + 5 * 1.5
