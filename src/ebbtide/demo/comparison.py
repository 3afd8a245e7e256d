"""The table that compares the demo's modes, and sentences on what limits its figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from rich import box
from rich.table import Table

from ebbtide.demo.config import DemoConfig, Mode
from ebbtide.demo.results import ModeResult, first_difference
from ebbtide.transfers.stats import StepStats
from ebbtide.units import format_size

_ABSENT = "-"
_JUST_THERE = 0.95  # two measurements of the RSS of two processes differ by less
_NOISY = 1.5  # times vary too much above this ratio of a mode's slowest to its fastest step


def compare(results: list[ModeResult]) -> dict[Mode, str | None]:
    """Compare each other mode with the one without offload, if that ran.

    Returns:
        For each other mode the result of `first_difference`.
    """
    reference = _reference(results)
    if reference is None:
        return {}
    return {
        result.mode: first_difference(reference, result)
        for result in results
        if result is not reference
    }


def build_table(config: DemoConfig, results: list[ModeResult]) -> Table:
    """Build the table of results, with one column per mode."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(
        f"FNO, Darcy {config.resolution} x {config.resolution}, batch {config.batch_size}"
    )
    for result in results:
        table.add_column(
            result.mode.title, justify="right", style="bold" if result.mode is Mode.EBBTIDE else ""
        )
    for label, cell in _rows(config, results):
        table.add_row(label, *(cell(result) for result in results))
    return table


_Cell = Callable[[ModeResult], str]


def _rows(config: DemoConfig, results: list[ModeResult]) -> Iterator[tuple[str, _Cell]]:
    reference = _reference(results)
    what = "RSS" if config.device.type == "cpu" else "device memory"
    yield f"Peak {what} of a step", lambda result: format_size(result.peak_bytes)
    yield "  above idle", lambda result: format_size(_above_idle(result))
    if reference is not None:
        yield "  relative to no offload", _ratio(reference, _above_idle)
    yield f"Step, median of {len(results[0].timed)}", lambda result: f"{_digits(result.median_s)} s"
    if reference is not None:
        yield "  relative to no offload", _ratio(reference, lambda result: result.median_s)
    yield "  fastest - slowest", _range
    if config.device.type == "cpu":
        yield "  processor time, own / kernel", _processor_time
    yield from _stats_rows(results)
    yield "Train error, L2 / H1", _train_error
    yield "Test error, L2 / H1", _test_error
    if reference is not None:
        differences = compare(results)
        yield "Losses, gradients, weights", lambda result: _verdict(result, differences)


def _stats_rows(results: list[ModeResult]) -> Iterator[tuple[str, _Cell]]:
    if all(result.stats is None for result in results):
        return

    def size(field: str) -> _Cell:
        return lambda result: (
            _ABSENT if result.stats is None else format_size(getattr(result.stats, field))
        )

    yield "Saved by autograd in a step", size("saved_bytes")
    yield "  without repeats and weights", size("unique_bytes")
    yield "  rebuilt in backward", size("rebuilt_bytes")
    yield "  offloaded", size("offloaded_bytes")


def limits(config: DemoConfig, results: list[ModeResult]) -> Iterator[str]:
    """Yield sentences that say what limits ebbtide's figures, and how far to trust them."""
    for result in results:
        if result.stats is not None:
            yield from _limits_of(config, result, result.stats)
            if result.mode is Mode.EBBTIDE and result.stats.offloaded_bytes:
                yield from _floor(_reference(results) or result, result)
    if any(slowest_s > _NOISY * fastest_s for fastest_s, slowest_s in map(_extremes_s, results)):
        yield (
            "Times vary too much to compare: other programs run on this machine, or the steps are "
            "too short."
        )


def _limits_of(config: DemoConfig, result: ModeResult, stats: StepStats) -> Iterator[str]:
    if result.mode is Mode.REBUILD:
        return
    if not stats.offloaded_bytes:
        yield "Nothing was offloaded: no saved tensor was large enough. Increase --resolution."
        return
    where = "disk" if stats.peak_disk_bytes else "host memory"
    rate = format_size(int(stats.offloaded_bytes / result.median_s))
    yield (
        f"Time: in each step {format_size(stats.offloaded_bytes)} go to {where} and come back "
        f"while the model computes, which needs {rate}/s each way. In the last step the model "
        f"waited {stats.stall_s:.2f} s for copies ({stats.late_reloads} reloads were late)."
    )
    yield (
        f"Memory: saved tensors took at most {format_size(stats.peak_device_bytes)} at once, of a "
        f"peak of {format_size(_above_idle(result))} above idle."
    )
    if config.device.type == "cpu":
        yield "The kernel caches the file in otherwise unused RAM, which RSS does not count."


def _floor(reference: ModeResult, result: ModeResult) -> Iterator[str]:
    """Say what remains of the peak, and that no way of offloading can remove it."""
    final = reference.final
    assert final is not None
    lasting_bytes = max(0, final.lasting_bytes - reference.idle_bytes)
    floor_bytes = lasting_bytes + final.forward_bytes
    if not floor_bytes:
        return
    ratio = _above_idle(result) / floor_bytes
    place = f"{ratio:.2f} times that" if ratio > 1 else "just there"
    if ratio < _JUST_THERE:
        place = "below it, because it also returns what is freed in the middle of an operation"
    yield (
        f"Limit: a forward without autograd saves nothing at all, and it needs "
        f"{format_size(final.forward_bytes)} for this batch: the working memory of its largest "
        f"operation. With the {format_size(lasting_bytes)} of gradients and optimizer state that "
        f"stay between steps, {format_size(floor_bytes)} above idle is about what no offloader can "
        f"go below; ebbtide's peak is {place}. A smaller batch or resolution lowers it."
    )


def _reference(results: list[ModeResult]) -> ModeResult | None:
    return next((result for result in results if result.mode is Mode.NONE), None)


def _above_idle(result: ModeResult) -> int:
    return result.peak_bytes - result.idle_bytes


def _ratio(reference: ModeResult, value: Callable[[ModeResult], float]) -> _Cell:
    return lambda result: (
        f"{value(result) / value(reference):.2f}x" if value(reference) else _ABSENT
    )


def _digits(value: float) -> str:
    """Format with three significant digits, such as ``3.10``."""
    return f"{value:#.3g}".rstrip(".")


def _extremes_s(result: ModeResult) -> tuple[float, float]:
    durations_s = [step.duration_s for step in result.timed]
    return min(durations_s), max(durations_s)


def _range(result: ModeResult) -> str:
    fastest_s, slowest_s = _extremes_s(result)
    return f"{_digits(fastest_s)} - {_digits(slowest_s)} s"


def _processor_time(result: ModeResult) -> str:
    own_s = statistics.median(step.user_s for step in result.timed)
    kernel_s = statistics.median(step.kernel_s for step in result.timed)
    return f"{_digits(own_s)} / {_digits(kernel_s)} s"


def _train_error(result: ModeResult) -> str:
    return f"{result.steps[-1].train_l2:.3f} / {result.steps[-1].train_h1:.3f}"


def _test_error(result: ModeResult) -> str:
    assert result.final is not None
    return f"{result.final.test_l2:.3f} / {result.final.test_h1:.3f}"


def _verdict(result: ModeResult, differences: dict[Mode, str | None]) -> str:
    if result.mode is Mode.NONE:
        return _ABSENT
    difference = differences[result.mode]
    return "[green]same bits[/]" if difference is None else f"[red]differ: {difference}[/]"
