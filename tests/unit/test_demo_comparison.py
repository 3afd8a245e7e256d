"""The demo's comparison and table, on figures that are made up, and its processes."""

import dataclasses
import io
import multiprocessing
import os
import signal

import pytest
import torch
from rich.console import Console

from ebbtide import StepStats
from ebbtide.tools.demo import (
    DeadModeError,
    DemoConfig,
    Mode,
    ModeResult,
    StepResult,
    Team,
    build_table,
    compare,
    digest,
    first_difference,
    limits,
)
from ebbtide.tools.demo import (
    step as train_step,
)

GIB = 2**30


def step(
    *, duration_s: float = 2.0, peak: float = 3.0, stats: StepStats | None = None
) -> StepResult:
    return StepResult(
        duration_s=duration_s,
        peak_bytes=int(peak * GIB),
        loss=1.5,
        gradients_sha256="a",
        stats=stats,
    )


def result(mode: Mode, steps: list[StepResult]) -> ModeResult:
    return ModeResult(mode, GIB, steps, "p")


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
    changed.parameters_sha256 = "q"
    assert first_difference(reference, changed) == "final parameters"


def test_digest_sees_one_bit() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    flipped = value.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    base = digest([("w", value)])
    assert digest([("w", value.clone())]) == base
    assert digest([("w", value.t().contiguous().t())]) == base
    others = [("w", flipped), ("v", value), ("w", value.reshape(3, 2)), ("w", None)]
    digests = {digest([other]) for other in others}
    assert len(digests | {base}) == 5


def render(config: DemoConfig, results: list[ModeResult]) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    by_mode = {each.mode: each for each in results}
    console.print(build_table(config, by_mode))
    for line in limits(by_mode):
        console.print(line)
    return console.export_text()


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


def test_a_difference_shows_in_the_table() -> None:
    steps = [step()] * 3
    results = [result(Mode.NONE, steps), result(Mode.EBBTIDE, steps)]
    assert "same bits" in render(DemoConfig(), results)
    results[1].steps = [*steps[:2], dataclasses.replace(step(), gradients_sha256="b")]
    assert compare({each.mode: each for each in results}) == {Mode.EBBTIDE: "gradients, step 3"}
    assert "differ:" in render(DemoConfig(), results)


# ---- processes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dead_process_is_reported() -> None:
    pytest.importorskip("neuralop")
    with Team(DemoConfig(64, 4, modes=(Mode.NONE, Mode.EBBTIDE))) as team:
        team.start()
        os.kill(team.ask(Mode.NONE, os.getpid), signal.SIGKILL)
        with pytest.raises(DeadModeError):
            team.ask(Mode.NONE, train_step)
        assert team.ask(Mode.EBBTIDE, train_step).duration_s > 0


def test_workers_end_when_an_error_ends_the_demo() -> None:
    pytest.importorskip("neuralop")
    team = Team(DemoConfig(64, 4, modes=(Mode.NONE,)))

    def interrupt() -> None:
        with team:
            team.start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not multiprocessing.active_children()
