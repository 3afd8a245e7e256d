"""The demo's comparison and table, on figures that are made up, and its processes."""

import dataclasses
import io
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

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
    build_table,
    compare,
    describe_copies,
    digest,
    first_difference,
    run_demo,
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
    console.print(describe_copies(by_mode))
    return console.export_text()


def test_ratios_are_of_what_is_above_idle_and_of_median_steps() -> None:
    config = DemoConfig()
    # Idle is 1 GiB. The first two steps are slow, and not counted.
    slow = step(duration_s=9.0)
    plain = result(Mode.NONE, [slow, slow, step(), step(), step()])
    offloaded = step(duration_s=3.0, peak=1.5, stats=StepStats(offloaded_bytes=GIB))
    other = result(Mode.EBBTIDE, [slow, slow, *[offloaded] * 3])
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


def run_until_it_has_a_process(out: Path, then: Callable[[int], None]) -> None:
    """Run a demo, and do something to its first process, given its number."""

    def wait_for_it() -> None:
        while not (children := multiprocessing.active_children()):
            time.sleep(0.01)
        then(children[0].pid or 0)

    threading.Thread(target=wait_for_it, daemon=True).start()
    run_demo(DemoConfig(64, 4, modes=(Mode.NONE,), out=out), Console(file=io.StringIO()))


@pytest.mark.slow
def test_a_dead_process_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    with pytest.raises(DeadModeError):
        run_until_it_has_a_process(tmp_path, lambda pid: os.kill(pid, signal.SIGKILL))


@pytest.mark.slow
def test_the_process_ends_when_ctrl_c_ends_the_demo(tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    with pytest.raises(KeyboardInterrupt):
        run_until_it_has_a_process(tmp_path, lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert not multiprocessing.active_children()
