"""The demo's comparison and table, on figures that are made up, and its processes."""

import dataclasses
import io
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ebbtide import StepStats
from ebbtide.tools.demo import (
    DemoConfig,
    Result,
    build_table,
    describe_copies,
    digest,
    first_difference,
    run_demo,
    timed_s,
)

GIB = 2**30


def step(
    *, duration_s: float = 2.0, peak: float = 3.0, stats: StepStats | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "duration_s": duration_s,
        "peak_bytes": int(peak * GIB),
        "loss": 1.5,
        "gradients_sha256": "a",
        "stats": stats and dataclasses.asdict(stats),
    } | more


def result(steps: list[dict[str, Any]], parameters: str = "p") -> Result:
    found: Result = {"idle_bytes": GIB, "steps": steps, "parameters_sha256": parameters}
    peak_bytes = max(each["peak_bytes"] for each in steps)
    return found | {"peak_bytes": peak_bytes, "median_s": statistics.median(timed_s(found))}


def test_equal_runs_have_no_difference() -> None:
    steps = [step() for _ in range(3)]
    assert first_difference(result(steps), result(steps)) is None


def test_a_changed_bit_is_found_and_named() -> None:
    steps = [step() for _ in range(3)]
    reference = result(steps)
    other = step(gradients_sha256="b")
    assert first_difference(reference, result([*steps[:2], other])) == "gradients, step 3"
    other = step(loss=1.5 + 2**-52)
    assert first_difference(reference, result([other, *steps[1:]])) == "loss, step 1"
    assert first_difference(reference, result(steps, "q")) == "final parameters"


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


def render(plain: Result, offloaded: Result) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    results = {"none": plain, "ebbtide": offloaded}
    console.print(build_table(DemoConfig(), results))
    console.print(describe_copies(offloaded))
    return console.export_text()


STATS = StepStats(offloaded_bytes=GIB)


def test_ratios_are_of_what_is_above_idle_and_of_median_steps() -> None:
    # Idle is 1 GiB. The first two steps are slow, and not counted.
    plain = result([step(duration_s=9.0)] * 2 + [step()] * 3)
    slow, fast = (step(duration_s=each, peak=1.5, stats=STATS) for each in (9.0, 3.0))
    table = render(plain, result([slow] * 2 + [fast] * 3))
    assert "0.25x" in table  # (1.5 - 1) / (3 - 1)
    assert "1.50x" in table  # 3 s / 2 s
    assert "2.00 s - 2.00 s" in table  # without the first ones


def test_a_difference_shows_in_the_table() -> None:
    steps = [step(stats=STATS)] * 3
    assert "same bits" in render(result(steps), result(steps))
    other = result([*steps[:2], step(stats=STATS, gradients_sha256="b")])
    assert "differ: gradients, step 3" in render(result(steps), other)


# ---- processes -----------------------------------------------------------------------------------


def run_until_it_has_a_process(out: Path, then: Callable[[int], None]) -> None:
    """Run a demo, and do something to its first process, given its number."""

    def wait_for_it() -> None:
        while not (children := multiprocessing.active_children()):
            time.sleep(0)  # as soon as it can be, while the pool is still starting
        then(children[0].pid or 0)

    threading.Thread(target=wait_for_it, daemon=True).start()
    run_demo(DemoConfig(64, 4, out=out), Console(file=io.StringIO()))


@pytest.mark.slow
def test_a_dead_process_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    with pytest.raises(BrokenProcessPool):
        run_until_it_has_a_process(tmp_path, lambda pid: os.kill(pid, signal.SIGKILL))


@pytest.mark.slow
def test_the_process_ends_when_ctrl_c_ends_the_demo(tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    with pytest.raises(KeyboardInterrupt):
        run_until_it_has_a_process(tmp_path, lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert not multiprocessing.active_children()
